"""Host memory before a disk: new blocks stay there, and the oldest move on when it fills up.

[Note: Which blocks stay]
Backward asks first for what forward saved last. So host memory takes every block that it has room for, and a thread
moves the oldest to the store below while more than half of it is in use. When backward begins, the newest blocks are
in host memory, and the store below got only what exceeded it. Nothing waits for that thread: a block that host memory
has no room for goes to the store below by itself, by whoever writes it.

[Note: Moving]
A block moves only while nobody is inside its host memory (`_Place.users`). Others may come while it is written to the
store below: whoever reads it may go on after it has moved, and the last of them gives the host memory back. Whoever
writes it makes the move void. So does freeing it, and then the move gives back both. A move that fails leaves the
block where it is.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.errors import SSDTrainError, StoreError
from ssdtrain.storage.base import DeviceStore, Extent, HostBuffer, SpillStore
from ssdtrain.storage.pieces import DevicePieces, Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ssdtrain.storage.host import HostStore

__all__ = ["TieredStore"]


@dataclass(slots=True, eq=False)
class _Place:
    """Where a block is: below, once that is set, and else in host memory."""

    nbytes: int
    host: Extent | None = None
    below: Extent | None = None
    moved: bool = False  # it lies below in `Pieces`, and not as it was written
    users: int = 0  # who are inside its host memory
    moving: bool = False
    void: bool = False  # the move is for nothing: it was freed, or is being written
    freed: bool = False


class _Held(NamedTuple):
    """The store that a block is in, and the block's extent there."""

    store: SpillStore
    extent: Extent
    moved: bool


class TieredStore(SpillStore):
    """See [Note: Which blocks stay].

    Args:
        host: A bounded one; closed with this store.
        below: Where the rest goes; closed with this store.

    Attributes:
        failed_moves: Blocks that could not be moved, and so stayed in host memory.

    Raises:
        SSDTrainError: No more threads are to be had.
    """

    def __init__(self, host: HostStore, below: SpillStore) -> None:
        assert host.max_bytes is not None
        self.failed_moves = 0
        self._host = host
        self._below = below
        self._enough = host.max_bytes // 2
        self._pieces = Pieces(below)
        # Guards all below, and the places; the thread waits for it. The host store's own lock is taken inside it.
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._resting = False  # after a failed move, until there is another block
        self._places: dict[int, _Place] = {}  # by the offset of this store's extents, which name nothing else
        self._movable: OrderedDict[int, _Place] = OrderedDict()  # whole, in host memory, the oldest first
        self._live_bytes = 0
        self._next_offset = 0
        self._thread = threading.Thread(target=self._run, name="ssdtrain-tier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SSDTrainError(f"host_memory_bytes: its thread cannot be started ({error})") from error

    @property
    def backend(self) -> str:
        """Both, such as "host+direct"."""
        return f"{self._host.backend}+{self._below.backend}"

    @property
    def live_bytes(self) -> int:
        """Bytes occupied in either store by extents that are not freed."""
        with self._changed:
            return 0 if self._closed else self._live_bytes

    @property
    def bytes_on_disk(self) -> int:
        """Those of the store below."""
        return self._below.bytes_on_disk

    @property
    def members(self) -> int:
        """Those of the store below."""
        return self._below.members

    def allocate(self, nbytes: int) -> Extent:
        """Reserve host memory, or else room in the store below."""
        place = _Place(nbytes)
        try:
            extent = place.host = self._host.allocate(nbytes)
        except StoreError:
            extent = place.below = self._below.allocate(nbytes)
        with self._changed:
            offset = self._next_offset
            self._next_offset += extent.length
            self._places[offset] = place
            self._live_bytes += extent.length
        return Extent(nbytes, offset, extent.length)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write to where the extent is.

        Raises:
            StoreError: EBUSY where all of it was written before, and so was moved.
        """
        with self._held(extent, write=True) as held:
            held.store.write(held.extent, buffer, offset)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Read from where the extent is."""
        with self._held(extent, write=False) as held:
            if held.moved:
                self._pieces.read(held.extent, buffer, offset)
            else:
                held.store.read(held.extent, buffer, offset)

    @contextmanager
    def borrow(self, extent: Extent, *, write: bool) -> Iterator[HostBuffer | None]:
        """The extent's host memory, from where it is not moved meanwhile."""
        with (
            self._held(extent, write=write) as held,
            held.store.borrow(held.extent, write=write) as memory,
        ):
            yield memory

    def device_store(self, extent: Extent) -> DeviceStore | None:
        """The store below's, for extents there."""
        with self._changed:
            place = self._places.get(extent.offset)
            below = None if place is None else place.below
        device_store = None if below is None else self._below.device_store(below)
        if place is None or below is None or device_store is None:
            return None
        return DevicePieces(device_store, below, in_pieces=place.moved)

    def free(self, extent: Extent) -> None:
        """Give the extent back, also while it is being moved."""
        with self._changed:
            place = None if self._closed else self._places.pop(extent.offset, None)
            if place is None:
                return
            self._movable.pop(extent.offset, None)
            self._live_bytes -= extent.length
            if place.moving:
                place.void = place.freed = True
                return
        self._give_back(place.host, place.below)

    def close(self) -> None:
        """Stop moving blocks, after the write that is under way, and close both stores."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._pieces.clear()
        try:
            self._host.close()
        finally:
            self._below.close()

    def describe(self, extent: Extent) -> str:
        """Where the extent is now."""
        held = self._find(extent)
        return super().describe(extent) if held is None else held.store.describe(held.extent)

    def location(self, extent: Extent) -> str:
        """Where the extent is now."""
        held = self._find(extent)
        return super().location(extent) if held is None else held.store.location(held.extent)

    # Finding blocks.

    def _find(self, extent: Extent) -> _Held | None:
        with self._changed:
            place = self._places.get(extent.offset)
            return None if place is None else self._store_of(place)

    def _store_of(self, place: _Place) -> _Held:
        if place.below is not None:
            return _Held(self._below, place.below, place.moved)
        assert place.host is not None
        return _Held(self._host, place.host, moved=False)

    @contextmanager
    def _held(self, extent: Extent, *, write: bool) -> Iterator[_Held]:
        """Where the extent is, and stays readable until the context ends."""
        with self._changed:
            place = None if self._closed else self._places.get(extent.offset)
            held = None if place is None else self._store_of(place)
            inside = held is not None and held.store is self._host
            if place is not None and inside:
                place.users += 1
                if write:
                    self._movable.pop(extent.offset, None)
                    place.void = True
        if place is None or held is None:
            raise self._error(errno.EBADF, "the store is closed", extent)
        if held.moved and write:
            # It lies in other pieces now, of which what is written would replace a part.
            raise self._error(errno.EBUSY, "it was written, and moved to the disk", extent)
        try:
            yield held
        finally:
            if inside:
                self._leave(extent.offset, place, write=write)

    def _leave(self, key: int, place: _Place, *, write: bool) -> None:
        left = None
        with self._changed:
            place.users -= 1
            if place.below is not None:
                if not place.users:
                    left, place.host = place.host, None
            elif write and place.host is not None and self._host.is_whole(place.host):
                self._movable[key] = place
                self._resting = False
            if self._host.live_bytes > self._enough:
                self._changed.notify()
        self._give_back(left, None)

    def _give_back(self, host: Extent | None, below: Extent | None) -> None:
        if host is not None:
            self._host.free(host)
        if below is not None:
            self._below.free(below)

    def _error(self, code: int, reason: str, extent: Extent) -> StoreError:
        return StoreError(code, f"cannot use {self.describe(extent)}: {reason}", self.location(extent))

    # On the thread.

    def _run(self) -> None:
        while (found := self._next()) is not None:
            self._move(*found)

    def _next(self) -> tuple[int, _Place] | None:
        """Wait for a block that is to be moved; None when the store is closed."""
        with self._changed:
            while not self._closed:
                if not self._resting and self._host.live_bytes > self._enough:
                    for key, place in self._movable.items():
                        if not place.users:
                            place.moving, place.void = True, False
                            return key, place
                self._changed.wait()
            return None

    def _move(self, key: int, place: _Place) -> None:
        below = None
        written = failed = False
        try:
            below = self._below.allocate(place.nbytes)
            assert place.host is not None
            with self._host.borrow(place.host, write=False) as memory:
                assert memory is not None
                written = self._pieces.write(below, memory, lambda: not (place.void or self._closed))
        except (OSError, MemoryError):
            failed = True
        finally:
            self._end_move(key, place, below, written=written, failed=failed)

    def _end_move(
        self, key: int, place: _Place, below: Extent | None, *, written: bool, failed: bool
    ) -> None:
        left = None
        with self._changed:
            place.moving = False
            if place.freed:
                left = place.host
            elif written and not place.void:
                self._movable.pop(key, None)
                place.below, below = below, None
                place.moved = True
                if not place.users:
                    left, place.host = place.host, None
            elif failed:
                # Not tried again: the next time it would most likely fail as well.
                self._movable.pop(key, None)
                self.failed_moves += 1
                self._resting = True
        self._give_back(left, below)
