"""Builds and drives the stand-in for libcuda.so.1, see the head of cuda.c."""

import ctypes
import shutil
import subprocess
import weakref
from pathlib import Path

from ssdtrain.storage import DeviceBuffer

DEVICES = 2
ILLEGAL_ADDRESS = 700


def build(directory):
    """Compile it into `directory`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the tests of GPUDirect Storage need a C compiler: install gcc, or deselect test_gds*"
    library = Path(directory) / "libcuda.so.1"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    subprocess.run(
        [compiler, *flags, "-Wl,-soname,libcuda.so.1", Path(__file__).with_name("cuda.c"), "-o", library],
        check=True,
    )
    return library


class StandIn:
    """The loaded library."""

    def __init__(self, library):
        self.directory = library.parent
        self.cuda = ctypes.CDLL(str(library))
        self.cuda.stand_in_alloc.restype = ctypes.c_void_p
        self.cuda.stand_in_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self.cuda.stand_in_view.restype = ctypes.c_void_p
        self.cuda.stand_in_view.argtypes = [ctypes.c_void_p]
        self.cuda.stand_in_free.argtypes = [ctypes.c_void_p]
        self.cuda.stand_in_fail.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]

    def memory(self, nbytes, *, device=0, skew=0):
        return DeviceMemory(self, nbytes, device, skew)

    def fail_copy(self, after=0):
        """One copy between host and device fails: the next one, or one after it."""
        self.cuda.stand_in_fail(0, after, ILLEGAL_ADDRESS)

    def fail_no_more(self):
        self.cuda.stand_in_fail(0, -1, 0)

    def set_current(self, device):
        """The calling thread's context; -1: none."""
        self.cuda.stand_in_set_current(device)


class Allocation:
    """Freed with the last reference."""

    def __init__(self, cuda, nbytes, device):
        self.address = cuda.stand_in_alloc(nbytes, device)
        assert self.address
        weakref.finalize(self, cuda.stand_in_free, self.address)


class DeviceMemory:
    """Memory that only the device can use, and the bytes behind it."""

    def __init__(self, stand_in, nbytes, device, skew):
        owner = Allocation(stand_in.cuda, nbytes + skew, device)
        self.buffer = DeviceBuffer(owner.address + skew, nbytes, device, owner)
        self._view = stand_in.cuda.stand_in_view(self.buffer.address)

    def fill(self, content):
        assert len(content) == self.buffer.nbytes
        ctypes.memmove(self._view, bytes(content), len(content))

    def content(self):
        return ctypes.string_at(self._view, self.buffer.nbytes)

    def part(self, start, nbytes):
        """A range of it."""
        return self.buffer._replace(address=self.buffer.address + start, nbytes=nbytes)
