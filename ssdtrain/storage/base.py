"""What a spill store is: a place for bytes, addressed by extents. It knows buffers and nothing of tensors."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["PAGE", "DeviceBuffer", "DeviceStore", "Edges", "Extent", "HostBuffer", "SpillStore"]

# The unit of every layout, not the machine's page size: a multiple of what direct I/O asks of memory and
# offset on any disk in use (512 or 4096), and the boundary at which a buffer is cut to be written in place.
PAGE = 4096

_PYBUF_WRITE = 0x200
# An array type of ctypes would do as well, but making one for every length costs twenty times this call.
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class HostBuffer:
    """A range of host memory, by address, that a store reads from or writes into without a copy.

    Args:
        address: First byte.
        nbytes: Length in bytes, at least 1.
        owner: Whatever must live for the memory to stay valid; the buffer holds it.
    """

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        assert nbytes > 0
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Bytes `start` to `stop` as a writable memoryview; valid only while this buffer lives."""
        stop = self.nbytes if stop is None else stop
        assert 0 <= start <= stop <= self.nbytes
        view: memoryview = _memory_view(self.address + start, stop - start, _PYBUF_WRITE)
        return view


class DeviceBuffer(NamedTuple):
    """A range of an accelerator's memory."""

    address: int
    nbytes: int
    device: int
    """The accelerator's index."""
    owner: object
    """Whatever must live for the memory to stay valid."""


class Edges(NamedTuple):
    """One write: how long it was, and its bytes before the first and after the last page boundary.

    Both are empty where the buffer was written whole.
    """

    nbytes: int
    head: bytes = b""
    tail: bytes = b""


@dataclass(slots=True, eq=False)
class Extent:
    """A reserved range of a store.

    Attributes:
        nbytes: The bytes it was reserved for.
        offset: Where it begins in the store's file, in bytes.
        length: The bytes it occupies there, a multiple of the store's alignment.
        member: Which of several directories holds it.
        edges: By offset of the write: what did not fit the alignment of direct I/O and stays in memory, less
            than two pages a write. Only `storage/direct.py` fills and reads it.
        checksums: By offset of the write. Only `storage/verify.py` fills and reads it.
    """

    nbytes: int
    offset: int = 0
    length: int = 0
    member: int = 0
    edges: dict[int, Edges] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)


class DeviceStore(ABC):
    """The part of a store that needs no host memory between a device and the disk.

    What was written here can be read through host buffers, in pieces of any length, and the other way round.
    """

    @abstractmethod
    def write_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        """`SpillStore.write` from device memory. Whatever computes the bytes has ended."""

    @abstractmethod
    def read_device(self, extent: Extent, buffer: DeviceBuffer, offset: int = 0) -> None:
        """`SpillStore.read` into device memory. Whatever used it before has ended."""


class SpillStore(ABC):
    """Where blocks go. Every method may be called from any thread, for different extents also at once.

    An extent is reserved, written once, piece by piece or whole, read any number of times, and freed. A piece
    is read as it was written: same `offset`, same length.
    """

    @property
    @abstractmethod
    def backend(self) -> str:
        """The path really in use, such as "direct", "buffered" or "host"."""

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes occupied by extents that are not freed."""

    @property
    def bytes_on_disk(self) -> int:
        """Of those, the ones that are not in host memory before the disk."""
        return self.live_bytes

    @property
    def members(self) -> int:
        """How many devices work in parallel; the engine gives each its own threads."""
        return 1

    @abstractmethod
    def allocate(self, nbytes: int) -> Extent:
        """Reserve room for `nbytes` (at least 1).

        Raises:
            StoreError: ENOSPC where the disk, the quota or the free bytes to be left do not allow it.
        """

    @abstractmethod
    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write the whole buffer at `offset` of the extent; on return its memory may be reused.

        Args:
            extent: From `allocate`.
            buffer: At any address and of any length that fits into the extent.
            offset: A multiple of 4096.

        Raises:
            StoreError: The bytes are not all there; the extent is to be freed.
        """

    @abstractmethod
    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Fill the whole buffer with what was written at `offset`.

        A buffer whose address is equal to the written one's modulo 4096 is read into without a copy.

        Raises:
            StoreError: The bytes are not what was written, or cannot be read; the buffer's content is
                undefined.
        """

    @abstractmethod
    def free(self, extent: Extent) -> None:
        """Give the extent back. Nothing may be reading or writing it. After `close` this does nothing.

        Never called from a finalizer or a garbage collection: it may take locks.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all room back. Idempotent. Every later call but `free` and `close` raises `StoreError`."""

    def device_store(self, extent: Extent) -> DeviceStore | None:  # noqa: ARG002 - most have none
        """What moves the extent's bytes between device memory and the disk; None: host buffers do."""
        return None

    def borrow(
        self,
        extent: Extent,  # noqa: ARG002 - most have none
        *,
        write: bool,  # noqa: ARG002
    ) -> AbstractContextManager[HostBuffer | None]:
        """The host memory that the extent itself is; None where it is not in host memory, or not any more.

        To be copied into or from, instead of a `write` or a `read` of the whole extent. It stays valid until the
        context ends, which all copies must have done by then. What was filled so, and is not in host memory any
        more, can be read in pieces of any length.

        Args:
            extent: From `allocate`.
            write: Whether it is to be filled. If the context ends without an error, it was.

        Raises:
            StoreError: It is to be read, and not all of it was written.
        """
        return nullcontext()

    def describe(self, extent: Extent) -> str:
        """File, offset and length of an extent, for an error's text."""
        return f"{self.backend} store, offset {extent.offset}, {extent.nbytes} bytes"

    def location(self, extent: Extent) -> str:  # noqa: ARG002 - stores with several places look at it
        """The directory that holds an extent, for an error's `filename`."""
        return f"{self.backend} store"
