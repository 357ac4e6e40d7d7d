"""The C library's heap. It keeps what is freed for later, so a process whose activations leave stays as large.

glibc gives back only free memory at the heap's end. Offloading frees tensors in another order than it allocates them,
and so leaves holes. `malloc_trim` gives the pages of the holes back. They have to be faulted in again when they are
reused, hence this is done once for many blocks.
"""

from __future__ import annotations

import ctypes
import time

__all__ = ["HeapTrimmer", "trim_heap"]

# A trim walks all free chunks: in a heap of very many it may take long, but no more than this part of the time.
_MOST_TIME = 0.02


def trim_heap() -> None:
    """Give the heap's free pages back to the system; nothing where the C library has no `malloc_trim` (glibc has)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class HeapTrimmer:
    """Trims the heap as blocks come and go.

    Args:
        every: Bytes of blocks from one trim to the next, which is about what the heap holds in vain at most.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # Threads share these without a lock: what is lost is a trim a little early or late.
        self._passed = 0
        self._not_before = 0.0

    def passed(self, nbytes: int) -> None:
        """Note that a block of so many bytes came or went."""
        self._passed += nbytes
        if self._passed < self._every:
            return
        began = time.monotonic()
        if began < self._not_before:
            return
        self._passed = 0
        trim_heap()
        ended = time.monotonic()
        self._not_before = ended + (ended - began) / _MOST_TIME
