"""CPU tensors: the store writes from, and reads into, the tensors' own memory. There is nothing to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdtrain.device.base import Arrival, Transfer
from ssdtrain.storage.base import PAGE, HostBuffer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssdtrain.memory.heap import HeapTrimmer
    from ssdtrain.memory.pool import BufferPool, Region
    from ssdtrain.saved import Span
    from ssdtrain.storage.base import Extent, SpillStore

__all__ = ["CpuTransfer"]


class _Arrived(Arrival):
    def deliver(self, restored: Tensor) -> None:
        """Nothing: the read had ended before the tensor was made."""


_ARRIVED = _Arrived()


class CpuTransfer(Transfer):
    """Identity transfer.

    Args:
        pool: Where restored blocks live.
        heap: Where torch's allocator gets the memory of the others.
    """

    def __init__(self, pool: BufferPool, heap: HeapTrimmer) -> None:
        self._pool = pool
        self._heap = heap

    def hold(self, tensor: Tensor) -> None:
        """Nothing: operations on CPU tensors have ended when they return."""

    def mark(self) -> object:
        """Nothing, likewise."""
        return None

    def reached(self, mark: object) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def wait(self, mark: object) -> None:
        """Nothing."""

    def write(
        self, store: SpillStore, extent: Extent, storage: torch.UntypedStorage, span: Span, mark: object
    ) -> None:
        """Write the span, in place."""
        assert mark is None
        store.write(extent, HostBuffer(storage.data_ptr() + span.start, span.nbytes, storage))

    def read(self, store: SpillStore, extent: Extent, span: Span, mark: object) -> tuple[Tensor, Arrival]:  # noqa: ARG002
        """Read into memory that begins at the same place within a page as the original did."""
        region = self._region_for(span)
        store.read(extent, HostBuffer(region.address + span.start, span.nbytes, region))
        return region.tensor(), _ARRIVED

    def _region_for(self, span: Span) -> Region:
        """A region of the pool for a whole storage, and for a slice fresh memory of which only the slice is real."""
        base_skew = (span.skew - span.start) % PAGE
        if span.nbytes == span.storage_nbytes:
            return self._pool.take(span.storage_nbytes, base_skew)
        return self._pool.reserve(span.storage_nbytes, base_skew)

    def origin(self, span: Span) -> int:  # noqa: ARG002
        """The storage's beginning."""
        return 0

    def passed(self, nbytes: int) -> None:
        """Let the heap shrink."""
        self._heap.passed(nbytes)

    def trim(self) -> None:
        """Give the pool's free memory back."""
        self._pool.trim()
