"""A file system of a few megabytes that really fills up, without root where namespaces allow it."""

import ctypes
import errno
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_BALLAST = "ballast"
_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespace() -> bool:
    """Give this process and its children mounts of their own, which end with the last of them.

    Call it before there is a second thread. False: the system does not allow it, nothing changed.
    """
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWNS):
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
            return False
        # be root there, the same user outside
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)


class SmallDisk:
    """A tmpfs at a folder; needs `enter_namespace`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """OSError: it cannot be mounted."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        if not _mount("chaos", str(folder), "tmpfs", 0, f"size={max_bytes}"):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))

    def fill(self, left_bytes: int) -> None:
        """Leave so much, to the page, if the kvstore does not write just now; else what is left."""
        file = os.open(self._folder / _BALLAST, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for _ in range(100):
                found = os.statvfs(self._folder)
                num_bytes = found.f_bavail * found.f_frsize - left_bytes
                try:
                    os.posix_fallocate(file, 0, max(1, num_bytes))
                    return
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        finally:
            os.close(file)

    def empty(self) -> None:
        """There is room again."""
        (self._folder / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount, at once if nobody uses it."""
        _libc.umount2(os.fsencode(self._folder), 2)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> bool:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    return _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) == 0
