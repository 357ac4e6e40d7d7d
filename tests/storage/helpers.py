"""Looks under a store, and ways of failing at the boundary to the operating system."""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path


def address_of(memory):
    """Of a bytearray."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def free_bytes(directory):
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def under(store):
    """A second descriptor of the store's nameless file, for looking at what really lies there."""
    return os.open(f"/proc/self/fd/{descriptor(store)}", os.O_RDWR)


def descriptor(store):
    return store._file._fd


@contextlib.contextmanager
def look_under(store):
    fd = under(store)
    try:
        yield fd
    finally:
        os.close(fd)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def run_script(text, *arguments):
    """Run Python code in a process of its own, for what changes a whole process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
