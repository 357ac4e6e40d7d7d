"""Blocks in one nameless file of a directory, past the page cache and without a copy."""

from __future__ import annotations

import ctypes
import errno
import threading
from typing import TYPE_CHECKING

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import PAGE, DeviceBuffer, Edges, Extent, HostBuffer, SpillStore
from ssdtrain.storage.bounce import BouncePool
from ssdtrain.storage.extents import ExtentAllocator, ShrinkPolicy
from ssdtrain.storage.spill_file import SpillFile

if TYPE_CHECKING:
    import os

__all__ = ["DirectStore"]

# A file grows in large steps, because blocks reserved together lie together, because a write inside the
# file's size takes a shared lock in the kernel where one that extends it takes an exclusive one, and because
# a full disk is then met here and not in the middle of a write. Reserving 256 MiB takes about a millisecond.
GROWTH_STEP = 256 << 20

# Shorter buffers go through a bounce buffer: their edges, up to 8190 bytes, would be more than an eighth of
# them and stay in memory, while copying 64 KiB takes a tenth of the time that the disk needs for it.
IN_PLACE_MIN = 64 << 10

# Long enough to see an evaluation or two between training steps, short enough to give space back within
# minutes.
SHRINK_CYCLES = 8


class DirectStore(SpillStore):
    """Blocks in a spill file of one directory.

    [Note: written in place] Direct I/O wants page-aligned memory, and the allocator of torch aligns to 64
    bytes. A large buffer is not copied for that. It is cut at the page boundaries inside it: the whole pages
    go to the disk from where they are, and the bytes before the first and after the last boundary stay in
    memory, in `Extent.edges`. A destination with the same address modulo `PAGE` is filled in place the same
    way; any other through bounce buffers. The first byte after the head lies at the offset of the write, so
    the file holds the middle only. A buffer written whole has empty edges.

    Args:
        directory: An existing, writable directory on an SSD.
        max_bytes: Most bytes the file may have; None: no bound.
        min_free_bytes: Free bytes to leave to others on the file system.
        direct: True: O_DIRECT or an error. False: buffered. None: O_DIRECT where it works.

    Raises:
        ConfigError: The directory cannot be used, or not as asked.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
        direct: bool | None = None,
    ) -> None:
        self._file = SpillFile(directory, direct)
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._bounce = BouncePool()
        self._closed = False
        # Guards the three below; held for arithmetic only.
        self._extents_lock = threading.Lock()
        self._extents = ExtentAllocator(PAGE)
        self._policy = ShrinkPolicy(SHRINK_CYCLES, GROWTH_STEP)
        self._cycle_running = False
        # Guards the file's size, and so is held while the kernel changes it: the one lock here that is held
        # over I/O. Only threads that need a larger file wait for it; reads, writes, frees and allocations
        # that find room do not. Taken before `_extents_lock`, never inside it.
        self._file_size_lock = threading.Lock()

    @property
    def backend(self) -> str:
        """Either "direct" or "buffered"."""
        return "direct" if self._file.direct else "buffered"

    @property
    def live_bytes(self) -> int:
        """Bytes occupied by extents that are not freed."""
        if self._closed:
            return 0
        return self._extents.live_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the spill file."""
        return self._extents.size

    def allocate(self, nbytes: int) -> Extent:
        """Reserve room for `nbytes`; the file grows if none is free."""
        assert nbytes > 0
        self._refuse_if_closed(f"cannot reserve {nbytes} bytes")
        with self._extents_lock:
            too_large = self._policy.target(self._extents.size) < self._extents.size
            offset = None if too_large and not self._cycle_running else self._take(nbytes)
        if offset is None:
            offset = self._resize_and_take(nbytes)
        return Extent(nbytes, offset, self._extents.rounded(nbytes))

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write the buffer, its whole pages from where they are."""
        self._check(extent, buffer, offset)
        # A failed write must not leave the edges of an earlier one, by which it could be read.
        extent.edges.pop(offset, None)
        head, tail = self._cut(buffer)
        end = buffer.nbytes - tail
        # Before the write, during which the memory may be freed (`storage.resize_(0)`): the kernel then answers with
        # an error, while reading it here would end the process.
        edges = Edges(
            buffer.nbytes,
            head=ctypes.string_at(buffer.address, head),
            tail=ctypes.string_at(buffer.address + end, tail),
        )
        if self._in_place(buffer.address + head, end - head):
            self._file.write(buffer.view(head, end), extent.offset + offset)
        else:
            self._write_padded(buffer, extent.offset + offset)
        extent.edges[offset] = edges

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Fill the buffer, its whole pages where they are if its address allows."""
        self._check(extent, buffer, offset)
        edges = self._written(extent, buffer, offset)
        head, end = len(edges.head), buffer.nbytes - len(edges.tail)
        if self._in_place(buffer.address + head, end - head):
            self._file.read(buffer.view(head, end), extent.offset + offset)
        else:
            self._read_through_bounce(buffer, head, end, extent.offset + offset)
        ctypes.memmove(buffer.address, edges.head, head)
        ctypes.memmove(buffer.address + end, edges.tail, len(edges.tail))

    def free(self, extent: Extent) -> None:
        """Give the extent back; with the last one a cycle ends, see `ShrinkPolicy`."""
        with self._extents_lock:
            self._extents.free(extent.offset)
            if self._cycle_running and self._extents.live_count == 0:
                self._cycle_running = False
                self._policy.record(self._extents.high_water)
                self._extents.reset_high_water()

    def close(self) -> None:
        """Close the file, which has no name, so that its space is free at once."""
        self._closed = True
        self._bounce.clear()
        self._file.close()

    def describe(self, extent: Extent) -> str:
        """Directory, offset and length of an extent."""
        where = f"offset {extent.offset}, {extent.nbytes} bytes"
        return f"spill file in {self._file.directory} ({self.backend}), {where}"

    def location(self, extent: Extent) -> str:  # noqa: ARG002 - all extents lie in one directory
        """The spill directory."""
        return self._file.directory

    def _refuse_if_closed(self, doing: str) -> None:
        if self._closed:
            raise StoreError(errno.EBADF, f"{doing}: the store is closed", self._file.directory)

    def _check(self, extent: Extent, buffer: HostBuffer | DeviceBuffer, offset: int) -> None:
        self._refuse_if_closed(f"cannot use offset {extent.offset + offset} of the spill file")
        assert offset % PAGE == 0, f"a piece begins at a multiple of {PAGE}, not at {offset}"
        assert offset + buffer.nbytes <= extent.length, (
            f"{buffer.nbytes} bytes at {offset} do not fit into {extent}"
        )

    def _written(self, extent: Extent, buffer: HostBuffer | DeviceBuffer, offset: int) -> Edges:
        """What the write was whose bytes are asked for."""
        edges = extent.edges.get(offset)
        if edges is None or edges.nbytes != buffer.nbytes:
            doing = f"cannot read {buffer.nbytes} bytes at offset {extent.offset + offset} of the spill file"
            reason = "no write there succeeded" if edges is None else f"{edges.nbytes} were written"
            raise StoreError(errno.EINVAL, f"{doing}: {reason}", self._file.directory)
        return edges

    def _cut(self, buffer: HostBuffer) -> tuple[int, int]:
        """The lengths of head and tail that are not written, see [Note: written in place]."""
        if not self._file.direct or buffer.nbytes < IN_PLACE_MIN:
            return 0, 0
        return -buffer.address % PAGE, (buffer.address + buffer.nbytes) % PAGE

    def _in_place(self, address: int, nbytes: int) -> bool:
        return not self._file.direct or (address % PAGE == 0 and nbytes % PAGE == 0)

    def _write_padded(self, buffer: HostBuffer, position: int) -> None:
        padded = -(-buffer.nbytes // PAGE) * PAGE
        with self._bounce.lend() as bounce:
            ctypes.memmove(bounce.address, buffer.address, buffer.nbytes)
            # Not what the bounce buffer held before.
            ctypes.memset(bounce.address + buffer.nbytes, 0, padded - buffer.nbytes)
            self._file.write(bounce.view(0, padded), position)

    def _read_through_bounce(self, buffer: HostBuffer, start: int, end: int, position: int) -> None:
        with self._bounce.lend() as bounce:
            while start < end:
                count = min(bounce.nbytes, end - start)
                self._file.read(bounce.view(0, -(-count // PAGE) * PAGE), position)
                ctypes.memmove(buffer.address + start, bounce.address, count)
                start += count
                position += count

    def _take(self, nbytes: int) -> int | None:
        """Under `_extents_lock`."""
        offset = self._extents.allocate(nbytes)
        self._cycle_running |= offset is not None
        return offset

    def _resize_and_take(self, nbytes: int) -> int:
        with self._file_size_lock:
            self._shrink_if_idle()
            while True:
                with self._extents_lock:
                    # Another thread may have grown the file, or freed, while this one waited.
                    offset = self._take(nbytes)
                    size, missing = self._extents.size, self._extents.missing(nbytes)
                if offset is not None:
                    return offset
                doing = f"cannot reserve {nbytes} bytes at offset {size} of the spill file"
                new_size = self._grow_file(size, missing, doing)
                with self._extents_lock:
                    self._extents.grow(new_size - size)

    def _shrink_if_idle(self) -> None:
        """Cut the file as the policy says. Under `_file_size_lock`."""
        with self._extents_lock:
            target = self._policy.target(self._extents.size)
            if self._cycle_running or target == self._extents.size:
                return
            # Before the file is cut, so that nobody is given what is about to go.
            self._extents.shrink(target)
        self._file.shrink(target)

    def _grow_file(self, size: int, missing: int, doing: str) -> int:
        """Make the file larger by `missing` bytes or more. Under `_file_size_lock`.

        Returns:
            Its new size.
        """
        step = self._allowed_growth(size, missing, doing)
        try:
            self._file.grow(size, size + step, doing)
        except StoreError as error:
            if step == missing or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            step = missing
            self._file.grow(size, size + step, doing)
        return size + step

    def _allowed_growth(self, size: int, missing: int, doing: str) -> int:
        """By how much the file is to grow: a large step, or what quota and free bytes leave of it."""
        quota = (1 << 62) if self._max_bytes is None else self._max_bytes - size
        free = self._file.free_bytes() - self._min_free_bytes
        if quota < missing:
            reason = f"max_spill_bytes allows {self._max_bytes} bytes here; allow more, or offload less"
        elif self._min_free_bytes and free < missing:
            reason = (
                f"{free + self._min_free_bytes} bytes are free, of which min_free_bytes leaves "
                f"{self._min_free_bytes} to others; free some space, or leave less"
            )
        else:
            step = -(-missing // GROWTH_STEP) * GROWTH_STEP
            return max(missing, min(step, quota, free) // PAGE * PAGE)
        raise StoreError(errno.ENOSPC, f"{doing}: {reason}", self._file.directory)
