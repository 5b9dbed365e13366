"""A small service for the supervisor's tests: python small_child.py MODE FOLDER NAME."""

import signal
import socket
import subprocess
import sys
from pathlib import Path


def main(mode: str, folder: Path, name: str) -> int:
    if mode == "fails":
        print("boom: the flux is not coupled", flush=True)
        return 3
    if mode == "refuses":
        print("gateway.port: nonsense", flush=True)
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # sigwait takes it from here
    if mode == "family":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (folder / f"{name}.grandchild").write_text(str(child.pid))
    if mode == "binds":
        socket.socket(socket.AF_UNIX).bind(str(folder / f"{name}.sock"))
    (folder / f"{name}.up").touch()
    while True:
        signal.sigwait([signal.SIGTERM])
        if mode != "stubborn":
            with (folder / "stopped").open("a") as file:
                file.write(f"{name}\n")
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
