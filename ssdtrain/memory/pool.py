"""The memory that restored blocks live in: page-aligned, reused, bounded.

Fresh memory costs a page fault and a page of zeros for every 4 KiB before the disk's bytes overwrite it. Here one
arena is faulted in in huge pages, and cut into ranges of any size, so that the room of two small blocks serves
a large one and the other way round.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssdtrain.errors import ConfigError
from ssdtrain.storage.base import PAGE
from ssdtrain.storage.extents import ExtentAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BufferPool", "Region"]

# Address space is not memory: an arena may be larger than what is free. Linux's number, where Python has no name.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class _Watch(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    """Waits for the death of the range at `offset`; only while it lives itself."""

    __slots__ = ("offset",)
    offset: int


class Region:
    """Memory for one storage.

    Its lifetime: it belongs to whoever took it, then to the storage made from it, and when the last tensor on that
    storage dies its range is free again. `memory` is held throughout.
    """

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        self._array = (ctypes.c_char * nbytes).from_buffer(memory, start)
        self.address = ctypes.addressof(self._array)

    def watch(self, offset: int, on_death: Callable[[_Watch], None]) -> _Watch:
        """Tell when the memory is no longer used: torch holds the array until the last view dies."""
        watch = _Watch(self._array, on_death)
        watch.offset = offset
        return watch

    def tensor(self) -> Tensor:
        """The whole of it, as uint8."""
        return torch.frombuffer(self._array, dtype=torch.uint8)


class BufferPool:
    """An arena, and mappings of their own for what does not fit.

    Args:
        capacity: Bytes of the arena. They are address space until they are used.

    Raises:
        ConfigError: There is not so much address space.
    """

    def __init__(self, capacity: int) -> None:
        try:
            self._memory = _map(max(capacity, PAGE), huge=True)
        except OSError as error:
            raise ConfigError(
                f"prefetch_bytes: {capacity} bytes of address space cannot be reserved for it "
                f"({error.strerror}); choose a smaller one"
            ) from error
        # Ranges on their way back: a storage may die anywhere, inside any lock, and a deque needs none.
        self._returned: deque[_Watch] = deque()
        self._ranges_lock = threading.Lock()  # guards all below
        self._in_doubt = (
            False  # an interrupt came in the middle of the arithmetic: the ranges are used no more
        )
        self._ranges = ExtentAllocator(PAGE)
        self._ranges.grow(len(self._memory))
        self._watches: dict[int, _Watch] = {}  # of the ranges that are taken

    def take(self, nbytes: int, skew: int) -> Region:
        """Memory that begins at `skew` modulo the page size."""
        with self._ranges_lock:
            offset = self._take_range(nbytes + skew)
            if offset is not None:
                region = Region(self._memory, offset + skew, nbytes)
                self._watches[offset] = region.watch(offset, self._returned.append)
                return region
        return self.reserve(nbytes, skew, huge=True)

    @staticmethod
    def reserve(nbytes: int, skew: int, *, huge: bool = False) -> Region:
        """A mapping of its own: for what the arena has no room for, or of which only a small part is touched.

        Args:
            nbytes: Its length.
            skew: Where it begins, modulo the page size.
            huge: In huge pages: not for a small part, which would have whole ones behind it.
        """
        return Region(_map(nbytes + skew, huge=huge), skew, nbytes)

    def trim(self) -> None:
        """Give the memory of all free ranges back to the system."""
        with self._ranges_lock:
            if self._in_doubt:
                return
            self._collect()
            for offset, length in self._ranges.free_ranges():
                if offset < self._ranges.high_water:
                    touched = min(length, self._ranges.high_water - offset)
                    self._memory.madvise(mmap.MADV_DONTNEED, offset, touched)
            self._ranges.reset_high_water()

    def _take_range(self, nbytes: int) -> int | None:
        if self._in_doubt:
            return None
        self._in_doubt = True
        self._collect()
        offset = self._ranges.allocate(nbytes)
        self._in_doubt = False
        return offset

    def _collect(self) -> None:
        while self._returned:
            offset = self._returned.popleft().offset
            self._ranges.free(offset)
            del self._watches[offset]


def _map(nbytes: int, *, huge: bool) -> mmap.mmap:
    nbytes = -(-nbytes // PAGE) * PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, nbytes, flags=flags)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
