"""How much memory this process holds, and the most that it held since a moment of our choosing."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import NamedTuple

__all__ = ["PeakMemory", "resident_bytes", "tune_heap"]

# glibc, <malloc.h>. Setting either stops glibc from moving both by itself.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class _Heap(NamedTuple):
    map_from: int
    """Larger allocations get memory of their own, which the system has back when they are freed."""
    keep_at_end: int
    """Free bytes at the heap's end that are not given back."""


# Offloading trims the heap by itself, holes included, so nearly everything may live there and be used again. With
# recomputation nothing does, so what is large is mapped.
_HEAPS = {
    "recompute": _Heap(map_from=4 << 20, keep_at_end=32 << 20),
    "offload": _Heap(map_from=128 << 20, keep_at_end=1 << 30),
}


def tune_heap(mode: str) -> None:
    """Let the memory of freed activations go back to the system, and fault it in again in huge pages.

    A process that keeps its activations has the same heap in every step, which glibc's defaults suit.

    Args:
        mode: What becomes of the activations: "keep", "recompute" or "offload".
    """
    if mode not in _HEAPS:
        return
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # read by torch when it first allocates
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAPS[mode].map_from)
        mallopt(_M_TRIM_THRESHOLD, _HEAPS[mode].keep_at_end)


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
