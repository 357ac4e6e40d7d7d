"""A block that lies in another store in pieces of one size, and of which any part is asked for."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import DeviceBuffer, DeviceStore, Extent, HostBuffer, SpillStore
from ssdtrain.storage.bounce import BouncePool

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PIECE_BYTES", "DevicePieces", "Pieces"]

# Full speed for an SSD, and as much as a device's staging buffer: what is read through these needs no copy.
PIECE_BYTES = 4 << 20


class Pieces:
    """Writes blocks in pieces, and reads any part of them.

    Args:
        store: Where they lie.
    """

    def __init__(self, store: SpillStore) -> None:
        self._store = store
        self._bounce = BouncePool(PIECE_BYTES, keep=1)

    def write(self, extent: Extent, buffer: HostBuffer, wanted: Callable[[], bool]) -> bool:
        """Write a whole block.

        Args:
            extent: The store's.
            buffer: All of its bytes.
            wanted: Asked before each piece.

        Returns:
            Whether all of it is there, for it was wanted to the end.
        """
        for begin in range(0, buffer.nbytes, PIECE_BYTES):
            if not wanted():
                return False
            length = min(PIECE_BYTES, buffer.nbytes - begin)
            self._store.write(extent, HostBuffer(buffer.address + begin, length, buffer), begin)
        return True

    def read(self, extent: Extent, buffer: HostBuffer, offset: int) -> None:
        """Fill the buffer from `offset` on. Pieces of which only a part is asked for are read aside."""
        end = offset + buffer.nbytes
        if end > extent.nbytes:
            doing = f"cannot read {buffer.nbytes} bytes at {offset} of {self._store.describe(extent)}"
            raise StoreError(errno.EINVAL, f"{doing}: it ends before", self._store.location(extent))
        for begin in range(offset // PIECE_BYTES * PIECE_BYTES, end, PIECE_BYTES):
            length = min(PIECE_BYTES, extent.nbytes - begin)
            start, stop = max(begin, offset), min(begin + length, end)
            part = HostBuffer(buffer.address + start - offset, stop - start, buffer)
            if part.nbytes == length:
                self._store.read(extent, part, begin)
                continue
            with self._bounce.lend() as bounce:
                self._store.read(extent, HostBuffer(bounce.address, length, bounce), begin)
                part.view()[:] = bounce.view(start - begin, stop - begin)

    def clear(self) -> None:
        """Give idle memory back."""
        self._bounce.clear()


class DevicePieces(DeviceStore):
    """One block of a `DeviceStore`, whatever extent the caller knows it by.

    Args:
        store: Where it lies.
        extent: Its extent there.
        in_pieces: Whether `Pieces` wrote it.
    """

    def __init__(self, store: DeviceStore, extent: Extent, *, in_pieces: bool) -> None:
        self._store = store
        self._extent = extent
        self._in_pieces = in_pieces

    def write_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:  # noqa: ARG002
        """As the store."""
        self._store.write_device(self._extent, buffer, offset)

    def read_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:  # noqa: ARG002
        """As the store, which refuses what does not begin and end with a piece."""
        step = PIECE_BYTES if self._in_pieces else buffer.nbytes
        for begin in range(0, buffer.nbytes, step):
            length = min(step, buffer.nbytes - begin)
            piece = buffer._replace(address=buffer.address + begin, nbytes=length)
            self._store.read_device(self._extent, piece, offset + begin)
