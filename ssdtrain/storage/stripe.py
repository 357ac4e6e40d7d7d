"""Several SSDs as one store: whole blocks, spread by how busy and how full each member is."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ssdtrain.errors import SSDTrainError, StoreError
from ssdtrain.storage.base import DeviceBuffer, DeviceStore, Extent, HostBuffer, SpillStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["StripeStore"]

# After a failed write a member gets a block again only when this many were placed elsewhere, or nowhere else
# is room: a broken disk is always the emptiest and the idlest, and would be chosen every time.
REST_AFTER_FAILURE = 64


class StripeStore(SpillStore):
    """Blocks spread over member stores, each block whole on one of them.

    A new block goes to the member with the fewest bytes being written, of those to the one with the fewest
    live bytes, and of those to the next in turn. A member that refuses is passed over.

    Args:
        stores: The members, at least one; they are closed with this store.
    """

    def __init__(self, stores: Sequence[SpillStore]) -> None:
        assert stores
        self._stores = tuple(stores)
        # Guards the three below.
        self._load_lock = threading.Lock()
        self._writing = [0] * len(self._stores)
        self._resting = [0] * len(self._stores)
        self._turn = 0

    @property
    def backend(self) -> str:
        """The members' backends, each once: "direct", or "direct+buffered" where they differ."""
        return "+".join(dict.fromkeys(store.backend for store in self._stores))

    @property
    def live_bytes(self) -> int:
        """Bytes occupied on all members."""
        return sum(store.live_bytes for store in self._stores)

    @property
    def members(self) -> int:
        """The devices of all members."""
        return sum(store.members for store in self._stores)

    def allocate(self, nbytes: int) -> Extent:
        """Reserve room on the member that has least to do; on the next one if it refuses."""
        refusal: StoreError | None = None
        for index in self._preferred():
            try:
                extent = self._stores[index].allocate(nbytes)
            except StoreError as error:
                refusal = refusal or error
            else:
                extent.member = index
                return extent
        assert refusal is not None
        raise refusal

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write to the extent's member."""
        with self._counted(extent.member, buffer.nbytes):
            self._stores[extent.member].write(extent, buffer, offset)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Read from the extent's member."""
        self._stores[extent.member].read(extent, buffer, offset)

    def free(self, extent: Extent) -> None:
        """Give the extent back to its member."""
        self._stores[extent.member].free(extent)

    def close(self) -> None:
        """Close every member, also after one has failed to close.

        Raises:
            SSDTrainError: The first member's error.
        """
        failure: SSDTrainError | None = None
        for store in self._stores:
            try:
                store.close()
            except SSDTrainError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def device_store(self, extent: Extent) -> DeviceStore | None:
        """The member's, counted like its writes through host memory."""
        inner = self._stores[extent.member].device_store(extent)
        return None if inner is None else _CountedDeviceStore(self, inner)

    def describe(self, extent: Extent) -> str:
        """Directory, offset and length of an extent."""
        return self._stores[extent.member].describe(extent)

    def location(self, extent: Extent) -> str:
        """The spill directory of the extent's member."""
        return self._stores[extent.member].location(extent)

    def _preferred(self) -> list[int]:
        """The members, best first."""
        live = [store.live_bytes for store in self._stores]
        count = len(self._stores)
        with self._load_lock:
            turn = self._turn
            self._turn = (turn + 1) % count
            resting = [left > 0 for left in self._resting]
            self._resting = [max(0, left - 1) for left in self._resting]
            writing = list(self._writing)
        return sorted(
            range(count),
            key=lambda index: (resting[index], writing[index], live[index], (index - turn) % count),
        )

    @contextmanager
    def _counted(self, member: int, nbytes: int) -> Iterator[None]:
        """Counts the bytes as being written, and a failure against the member."""
        rest = 0
        with self._load_lock:
            self._writing[member] += nbytes
        try:
            yield
        except StoreError:
            rest = REST_AFTER_FAILURE
            raise
        finally:
            with self._load_lock:
                self._writing[member] -= nbytes
                self._resting[member] = max(self._resting[member], rest)


class _CountedDeviceStore(DeviceStore):
    """A member's device store whose writes the stripe knows of."""

    def __init__(self, stripe: StripeStore, inner: DeviceStore) -> None:
        self._stripe = stripe
        self._inner = inner

    def write_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        with self._stripe._counted(extent.member, buffer.nbytes):
            self._inner.write_device(extent, buffer, offset)

    def read_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        self._inner.read_device(extent, buffer, offset)
