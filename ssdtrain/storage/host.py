"""Blocks in host memory: no disk. For tests, and for devices whose memory is scarcer than the host's."""

from __future__ import annotations

import ctypes
import errno
import threading
from typing import NamedTuple

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import PAGE, Extent, HostBuffer, SpillStore
from ssdtrain.storage.bounce import page_aligned

__all__ = ["HostStore"]

_PLACE = "host memory"


class _Memory(NamedTuple):
    """An extent's mapping, and the length of each write by its offset."""

    buffer: HostBuffer
    written: dict[int, int]


class HostStore(SpillStore):
    """Every extent is a memory mapping of its own, which goes back to the system when the extent is freed.

    Args:
        max_bytes: Most bytes at one time; None: no bound.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
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
        """Map memory for `nbytes`."""
        assert nbytes > 0
        length = -(-nbytes // PAGE) * PAGE
        doing = f"cannot reserve {nbytes} bytes of host memory"
        with self._bytes_lock:
            if self._closed:
                raise StoreError(errno.EBADF, f"{doing}: the store is closed", _PLACE)
            if self._max_bytes is not None and self._live_bytes + length > self._max_bytes:
                raise StoreError(
                    errno.ENOSPC, f"{doing}: max_spill_bytes allows {self._max_bytes} bytes here", _PLACE
                )
            self._live_bytes += length
            offset = self._next_offset
            self._next_offset += length
        try:
            self._memory[offset] = _Memory(page_aligned(length), {})
        except OSError as error:
            self._forget(length)
            raise StoreError.from_os(error, doing, _PLACE) from error
        return Extent(nbytes, offset, length)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Copy the buffer into the extent's memory; the GIL is released meanwhile."""
        memory = self._memory_of(extent, buffer, offset)
        ctypes.memmove(memory.buffer.address + offset, buffer.address, buffer.nbytes)
        memory.written[offset] = buffer.nbytes

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Copy from the extent's memory into the buffer; the GIL is released meanwhile."""
        memory = self._memory_of(extent, buffer, offset)
        if memory.written.get(offset) != buffer.nbytes:
            message = f"cannot read {buffer.nbytes} bytes at {offset} of {self.describe(extent)}"
            raise StoreError(errno.EINVAL, f"{message}: they were not written", _PLACE)
        ctypes.memmove(buffer.address, memory.buffer.address + offset, buffer.nbytes)

    def free(self, extent: Extent) -> None:
        """Unmap the extent's memory."""
        if self._memory.pop(extent.offset, None) is not None:
            self._forget(extent.length)

    def close(self) -> None:
        """Unmap all memory."""
        self._closed = True
        self._memory.clear()

    def location(self, extent: Extent) -> str:  # noqa: ARG002 - there is one place
        """Always "host memory"."""
        return _PLACE

    def _memory_of(self, extent: Extent, buffer: HostBuffer, offset: int) -> _Memory:
        assert offset % PAGE == 0, f"a piece begins at a multiple of {PAGE}, not at {offset}"
        assert offset + buffer.nbytes <= extent.length, (
            f"{buffer.nbytes} bytes at {offset} do not fit into {extent}"
        )
        memory = None if self._closed else self._memory.get(extent.offset)
        if memory is None:
            raise StoreError(errno.EBADF, f"cannot use {self.describe(extent)}: the store is closed", _PLACE)
        return memory

    def _forget(self, length: int) -> None:
        with self._bytes_lock:
            self._live_bytes -= length
