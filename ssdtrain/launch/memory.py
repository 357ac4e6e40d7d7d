"""How much memory this process holds, and the most that it held since a moment of our choosing."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

__all__ = ["PeakMemory", "map_large_tensors", "resident_bytes", "trim"]

# glibc, <malloc.h>. Setting either stops glibc from moving both by itself.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM = 4 << 20
_HEAP_SPARE = 32 << 20


def map_large_tensors() -> None:
    """Let every large CPU tensor have memory of its own, in huge pages, that the system gets back at once.

    By default glibc keeps freed tensors of up to 32 MiB for later, and a process whose activations leave during
    the forward pass stays a quarter larger than what is in use. Mapping each tensor costs page faults, which
    torch's switch for huge pages makes few. The heap of smaller tensors keeps some free memory, rather than hand
    it back and fault it in again at every tensor. A process that keeps its activations is faster without all this:
    its heap is the same in every step.
    """
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # read by torch when it first allocates
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_M_TRIM_THRESHOLD, _HEAP_SPARE)


def trim() -> None:
    """Hand freed memory back to the system, so that what stays resident is in use."""
    gc.collect()
    # Only glibc has it; other C libraries give memory back by themselves or not at all.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """The resident set now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The largest resident set since construction.

    Where the kernel does not let a process reset its high-water mark, the peak is that of the whole process:
    then `source` is "ru_maxrss".
    """

    def __init__(self) -> None:
        self.source = "VmHWM"
        try:
            # Linux, proc_pid_clear_refs(5): 5 resets the high-water mark to the present resident set.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.bytes()
        except (OSError, LookupError):
            self.source = "ru_maxrss"

    def bytes(self) -> int:
        """The peak so far."""
        if self.source == "ru_maxrss":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        status = Path("/proc/self/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in status.splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
