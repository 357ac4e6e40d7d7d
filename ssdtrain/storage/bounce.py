"""Page-aligned memory for the transfers that cannot use their caller's."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ssdtrain.storage.base import HostBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BouncePool", "page_aligned"]


def page_aligned(nbytes: int) -> HostBuffer:
    """Fresh page-aligned memory, given back to the system when the last reference to the buffer goes."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    owner = ctypes.c_char.from_buffer(memory)
    return HostBuffer(ctypes.addressof(owner), nbytes, owner)


class BouncePool:
    """A few reused page-aligned buffers.

    Nobody waits for a buffer: one is made where none is idle. As many exist at once as threads are inside a
    transfer, and no more than `keep` stay when they have left.

    Args:
        nbytes: Size of each. 1 MiB: large enough for the disk's full speed, small enough to stay in the
            cache.
        keep: How many stay.
    """

    def __init__(self, nbytes: int = 1 << 20, keep: int = 4) -> None:
        self.nbytes = nbytes
        self._keep = keep
        # Appending and popping are atomic: no lock.
        self._idle: deque[HostBuffer] = deque()

    @contextmanager
    def lend(self) -> Iterator[HostBuffer]:
        """A buffer for the time of the block."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = page_aligned(self.nbytes)
        try:
            yield buffer
        finally:
            if len(self._idle) < self._keep:
                self._idle.append(buffer)

    def clear(self) -> None:
        """Give the idle buffers back to the system."""
        self._idle.clear()
