"""What a service does about memory that is freed and not given back."""

import platform
import subprocess
import sys

import pytest

# Where small pieces lie that other threads ask for, seen from the process's own heap.
THREADS = """
import ctypes, threading
from deepmesh import garbage
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
found = []
for _ in range(3):
    thread = threading.Thread(target=lambda: found.append(libc.malloc(100)))
    thread.start()
    thread.join()
with open("/proc/self/maps") as maps:
    (heap,) = (line.split()[0].split("-") for line in maps if "[heap]" in line)
print(sum(int(heap[0], 16) <= address < int(heap[1], 16) for address in found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize(("first", "in_heap"), [("garbage.share_arena()", "3"), ("", "0")])
def test_threads_share_one_arena(first: str, in_heap: str) -> None:
    argv = [sys.executable, "-c", THREADS.format(first=first)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == in_heap
