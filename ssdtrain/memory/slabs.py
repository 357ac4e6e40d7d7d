"""Ranges cut from a few large pieces of memory that are slow to get, and so are kept until the end."""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING

from ssdtrain.memory.pinned import pinned_bytes
from ssdtrain.storage.base import PAGE, HostBuffer
from ssdtrain.storage.extents import ExtentAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SlabArena"]

# Pinning takes a fraction of a millisecond for each MiB: some tens of them now and then, on an I/O thread.
SLAB_BYTES = 256 << 20


class SlabArena:
    """Slabs are made when they are needed. Each is a power of two long, which is what pinned memory is rounded up to.

    Args:
        allocate: Makes page-aligned memory of so many bytes, and may raise MemoryError.
        max_bytes: Most bytes of all slabs; None: no bound.
        slab_bytes: Of a slab, a power of two. It is larger for a larger range, and smaller where `max_bytes` leaves
            less.
    """

    def __init__(
        self,
        allocate: Callable[[int], HostBuffer],
        max_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        assert slab_bytes == pinned_bytes(slab_bytes)
        assert slab_bytes >= PAGE
        self._allocate = allocate
        self._max_bytes = (1 << 62) if max_bytes is None else max_bytes
        self._slab_bytes = slab_bytes
        # Held while memory is pinned: only threads that find no room wait for it. Taken before `_ranges_lock`.
        self._growth_lock = threading.Lock()
        self._ranges_lock = threading.Lock()  # guards all below
        self._closed = False
        self._slabs: list[HostBuffer] = []
        self._begins: list[int] = []  # of each slab, among the offsets of `_ranges`
        self._ranges = ExtentAllocator(PAGE)
        self._offsets: dict[int, int] = {}  # of the ranges that are taken, by address

    @property
    def nbytes(self) -> int:
        """Of all slabs."""
        with self._ranges_lock:
            return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> HostBuffer | None:
        """A page-aligned range, which lies in one slab; None where `max_bytes` does not allow it.

        Raises:
            MemoryError: There is no memory for another slab.
        """
        buffer = self._cut(nbytes)
        if buffer is not None:
            return buffer
        with self._growth_lock:
            # Another thread may have made a slab meanwhile, or may use up the one that is made here.
            while (buffer := self._cut(nbytes)) is None:
                slab_bytes = self._next_slab_bytes(nbytes)
                if slab_bytes is None:
                    return None
                self._add(self._allocate(slab_bytes))
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a range back, for another. After `close` this does nothing."""
        with self._ranges_lock:
            offset = self._offsets.pop(buffer.address, None)
            if offset is not None:
                self._ranges.free(offset)

    def close(self) -> None:
        """Let go of the slabs; each lives until the last range of it does."""
        with self._ranges_lock:
            self._closed = True
            self._slabs.clear()
            self._begins.clear()
            self._offsets.clear()
            self._ranges = ExtentAllocator(PAGE)

    def _cut(self, nbytes: int) -> HostBuffer | None:
        with self._ranges_lock:
            offset = self._ranges.allocate(nbytes)
            if offset is None:
                return None
            at = bisect_right(self._begins, offset) - 1
            slab = self._slabs[at]
            buffer = HostBuffer(slab.address + offset - self._begins[at], nbytes, slab)
            self._offsets[buffer.address] = offset
            return buffer

    def _add(self, slab: HostBuffer) -> None:
        with self._ranges_lock:
            if self._closed:
                return
            # Slabs are not neighbours in memory, so nor are they here.
            self._ranges.leave_gap()
            self._slabs.append(slab)
            self._begins.append(self._ranges.size)
            self._ranges.grow(slab.nbytes)

    def _next_slab_bytes(self, nbytes: int) -> int | None:
        left = self._max_bytes - self.nbytes
        needed = pinned_bytes(max(nbytes, PAGE))
        if self._closed or needed > left:
            return None
        return max(needed, min(self._slab_bytes, 1 << left.bit_length() - 1))
