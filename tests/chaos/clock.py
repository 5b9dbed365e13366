"""The wall clock of a mesh's processes, which a test can set; theirs alone, not the machine's."""

import mmap
import os
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.cpp")


class WallClock:
    """A library that processes preload, and the file that says how far they are off."""

    def __init__(self, folder: Path) -> None:
        """Compile it. CalledProcessError: that failed."""
        library, offset = folder / "clock.so", folder / "clock"
        compiler = os.environ.get("CXX", "g++")
        argv = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run([*argv, "-ldl"], check=True, timeout=120)
        offset.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offset)}
        with offset.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def jump(self, offset_s: float) -> None:
        """From now on they are so far ahead of the real time; negative: behind."""
        self._map[:] = round(offset_s * 1e9).to_bytes(8, "little", signed=True)

    @property
    def offset_s(self) -> float:
        """How far they are ahead."""
        return int.from_bytes(self._map[:], "little", signed=True) / 1e9

    def now_s(self) -> float:
        """What they read, s since the epoch."""
        return time.time() + self.offset_s
