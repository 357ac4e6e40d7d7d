"""Blocks in host memory: no disk. For tests, and for devices whose memory is scarcer than the host's."""

from __future__ import annotations

import ctypes
import errno
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import PAGE, Extent, HostBuffer, SpillStore
from ssdtrain.storage.bounce import page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ssdtrain.memory.slabs import SlabArena

__all__ = ["HostStore"]

_PLACE = "host memory"


class _Memory(NamedTuple):
    """An extent's memory, and the length of each write by its offset."""

    buffer: HostBuffer
    written: dict[int, int]


class HostStore(SpillStore):
    """Extents are memory.

    Args:
        max_bytes: Most bytes at one time; None: no bound.
        slabs: What extents are cut from, closed with the store; it has the same bound. For pinned memory, which is
            slow to get. None: every extent is a mapping of its own, which goes back to the system when it is freed.
    """

    def __init__(self, *, max_bytes: int | None = None, slabs: SlabArena | None = None) -> None:
        self.max_bytes = max_bytes
        self._slabs = slabs
        self._closed = False
        self._memory: dict[int, _Memory] = {}
        self._bytes_lock = threading.Lock()  # guards the two below
        self._live_bytes = 0
        self._next_offset = 0

    @property
    def backend(self) -> str:
        """Always "host"."""
        return "host"

    @property
    def live_bytes(self) -> int:
        """Bytes occupied by extents that are not freed."""
        with self._bytes_lock:
            return 0 if self._closed else self._live_bytes

    def allocate(self, nbytes: int) -> Extent:
        """Get memory for `nbytes`."""
        assert nbytes > 0
        length = -(-nbytes // PAGE) * PAGE
        doing = f"cannot reserve {nbytes} bytes of host memory"
        with self._bytes_lock:
            if self._closed:
                raise StoreError(errno.EBADF, f"{doing}: the store is closed", _PLACE)
            if self.max_bytes is not None and self._live_bytes + length > self.max_bytes:
                raise self._full(doing)
            self._live_bytes += length
            offset = self._next_offset
            self._next_offset += length
        buffer = None
        try:
            buffer = page_aligned(length) if self._slabs is None else self._slabs.take(length)
        except OSError as error:
            raise StoreError.from_os(error, doing, _PLACE) from error
        except (MemoryError, Warning) as error:
            # Pinning warns when it fails. A filter that makes it an error must not end an I/O thread.
            raise StoreError(errno.ENOMEM, f"{doing}: {error}", _PLACE) from error
        finally:
            if buffer is None:
                self._forget(length)
        if buffer is None:
            raise self._full(doing)
        self._memory[offset] = _Memory(buffer, {})
        return Extent(nbytes, offset, length)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Copy the buffer into the extent's memory; the GIL is released meanwhile."""
        memory = self._memory_for(extent, buffer, offset)
        ctypes.memmove(memory.buffer.address + offset, buffer.address, buffer.nbytes)
        memory.written[offset] = buffer.nbytes

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Copy from the extent's memory into the buffer; the GIL is released meanwhile."""
        memory = self._memory_for(extent, buffer, offset)
        if memory.written.get(offset) != buffer.nbytes:
            message = f"cannot read {buffer.nbytes} bytes at {offset} of {self.describe(extent)}"
            raise StoreError(errno.EINVAL, f"{message}: they were not written", _PLACE)
        ctypes.memmove(buffer.address, memory.buffer.address + offset, buffer.nbytes)

    @contextmanager
    def borrow(self, extent: Extent, *, write: bool) -> Iterator[HostBuffer | None]:
        """The extent's memory; to be read only if all of it was written."""
        memory = self._memory_of(extent)
        if write:
            # What fails half-way must not leave what was there before, by which it could be read.
            memory.written.clear()
        elif not self.is_whole(extent):
            message = f"cannot read {self.describe(extent)}: not all of it was written"
            raise StoreError(errno.EINVAL, message, _PLACE)
        yield HostBuffer(memory.buffer.address, extent.nbytes, memory.buffer)
        if write:
            memory.written[0] = extent.nbytes

    def is_whole(self, extent: Extent) -> bool:
        """Whether all of an extent was written, in one piece or in several."""
        memory = self._memory.get(extent.offset)
        return memory is not None and sum(tuple(memory.written.values())) == extent.nbytes

    def free(self, extent: Extent) -> None:
        """Give the extent's memory back."""
        memory = self._memory.pop(extent.offset, None)
        if memory is not None:
            if self._slabs is not None:
                self._slabs.give_back(memory.buffer)
            self._forget(extent.length)

    def close(self) -> None:
        """Give all memory back."""
        self._closed = True
        self._memory.clear()
        if self._slabs is not None:
            self._slabs.close()

    def location(self, extent: Extent) -> str:  # noqa: ARG002 - there is one place
        """Always "host memory"."""
        return _PLACE

    def _memory_for(self, extent: Extent, buffer: HostBuffer, offset: int) -> _Memory:
        assert offset % PAGE == 0, f"a piece begins at a multiple of {PAGE}, not at {offset}"
        assert offset + buffer.nbytes <= extent.length, (
            f"{buffer.nbytes} bytes at {offset} do not fit into {extent}"
        )
        return self._memory_of(extent)

    def _memory_of(self, extent: Extent) -> _Memory:
        memory = None if self._closed else self._memory.get(extent.offset)
        if memory is None:
            raise StoreError(errno.EBADF, f"cannot use {self.describe(extent)}: the store is closed", _PLACE)
        return memory

    def _full(self, doing: str) -> StoreError:
        allows = f"host_memory_bytes or max_spill_bytes allows {self.max_bytes} bytes here"
        return StoreError(errno.ENOSPC, f"{doing}: {allows}; allow more, or offload less", _PLACE)

    def _forget(self, length: int) -> None:
        with self._bytes_lock:
            self._live_bytes -= length
