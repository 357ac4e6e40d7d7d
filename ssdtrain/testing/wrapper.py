"""A store around a store that changes nothing: what the stores for tests are derived from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdtrain.storage.base import Extent, HostBuffer, SpillStore

if TYPE_CHECKING:
    from typing import Literal

    Kind = Literal["allocate", "write", "read"]

__all__ = ["WrapperStore"]


class WrapperStore(SpillStore):
    """Passes every call on, but for `borrow` and `device_store`, which have the answer of a store without them.

    What they give is filled and read past the store; one that delays, counts or spoils writes has to see them.

    Args:
        inner: The store that does the work; closed with this one.
    """

    def __init__(self, inner: SpillStore) -> None:
        self.inner = inner

    @property
    def backend(self) -> str:
        """The inner store's."""
        return self.inner.backend

    @property
    def live_bytes(self) -> int:
        """The inner store's."""
        return self.inner.live_bytes

    @property
    def bytes_on_disk(self) -> int:
        """The inner store's."""
        return self.inner.bytes_on_disk

    @property
    def members(self) -> int:
        """The inner store's."""
        return self.inner.members

    def allocate(self, nbytes: int) -> Extent:
        """As the inner store."""
        return self.inner.allocate(nbytes)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """As the inner store."""
        self.inner.write(extent, buffer, offset)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """As the inner store."""
        self.inner.read(extent, buffer, offset)

    def free(self, extent: Extent) -> None:
        """As the inner store."""
        self.inner.free(extent)

    def close(self) -> None:
        """As the inner store."""
        self.inner.close()

    def describe(self, extent: Extent) -> str:
        """As the inner store."""
        return self.inner.describe(extent)

    def location(self, extent: Extent) -> str:
        """As the inner store."""
        return self.inner.location(extent)
