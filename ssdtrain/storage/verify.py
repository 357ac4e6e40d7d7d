"""Checksums around any store: what is read is what was written, or an error."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ssdtrain.errors import StoreError, missing_extra
from ssdtrain.storage.base import Extent, HostBuffer, SpillStore

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VerifyingStore"]

# Of a write whose memory changes under it. What changes it is a handful of operations on neighbouring bytes.
_ATTEMPTS = 5


class VerifyingStore(SpillStore):
    """Keeps the XXH3-64 of every write and compares it on every read.

    It finds what the disk, the cable, the kernel or this package changed on the way; not what changed the
    memory before the write. XXH3 reads memory at about 12 GB/s on one core, several times an SSD's speed, and
    releases the GIL meanwhile.

    Args:
        inner: The store that keeps the bytes; closed with this one.

    Raises:
        ConfigError: xxhash is not installed.
    """

    def __init__(self, inner: SpillStore) -> None:
        self._inner = inner
        self._digest = _digest()

    @property
    def backend(self) -> str:
        """The inner store's."""
        return self._inner.backend

    @property
    def live_bytes(self) -> int:
        """The inner store's."""
        return self._inner.live_bytes

    @property
    def bytes_on_disk(self) -> int:
        """The inner store's."""
        return self._inner.bytes_on_disk

    @property
    def members(self) -> int:
        """The inner store's."""
        return self._inner.members

    def allocate(self, nbytes: int) -> Extent:
        """Reserve room in the inner store."""
        return self._inner.allocate(nbytes)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write, and keep the checksum if all was written.

        The buffer may hold bytes that others change meanwhile and nobody will want from here: then it is written
        again, so that the checksum is that of what was written.

        Raises:
            StoreError: EBUSY when they change each time.
        """
        extent.checksums.pop(offset, None)
        before = self._digest(buffer.view())
        for _ in range(_ATTEMPTS):
            self._inner.write(extent, buffer, offset)
            after = self._digest(buffer.view())
            if after == before:
                extent.checksums[offset] = after
                return
            before = after
        raise self._error(
            errno.EBUSY, "the memory keeps changing while it is written", extent, buffer, offset
        )

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Read and compare.

        Raises:
            StoreError: EIO when the bytes are not those that were written; EINVAL when no write of them
                succeeded.
        """
        self._inner.read(extent, buffer, offset)
        wanted = extent.checksums.get(offset)
        if wanted is None:
            raise self._error(errno.EINVAL, "no checksum, for no write succeeded", extent, buffer, offset)
        found = self._digest(buffer.view())
        if found != wanted:
            what = f"checksum mismatch (wrote {wanted:016x}, read {found:016x})"
            raise self._error(errno.EIO, what, extent, buffer, offset)

    def free(self, extent: Extent) -> None:
        """Give the extent back."""
        self._inner.free(extent)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def describe(self, extent: Extent) -> str:
        """Where the inner store keeps the extent."""
        return self._inner.describe(extent)

    def location(self, extent: Extent) -> str:
        """Where the inner store keeps the extent."""
        return self._inner.location(extent)

    def _error(self, code: int, what: str, extent: Extent, buffer: HostBuffer, offset: int) -> StoreError:
        where = f"{buffer.nbytes} bytes at offset {extent.offset + offset} of the spill file"
        return StoreError(code, f"{what}: {where}", self.location(extent))


def _digest() -> Callable[[memoryview], int]:
    try:
        import xxhash
    except ImportError as error:
        raise missing_extra("xxhash", "verify", "verify=True") from error

    def digest(view: memoryview) -> int:
        # Not the one-call function: up to xxhash 3.5 at least that one keeps the GIL.
        state = xxhash.xxh3_64()
        state.update(view)
        return int(state.intdigest())

    return digest
