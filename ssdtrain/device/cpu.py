"""CPU tensors: the store writes from, and reads into, the tensors' own memory. There is nothing to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdtrain.device.base import Incoming, Transfer
from ssdtrain.storage.base import PAGE, HostBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from ssdtrain.memory.heap import HeapTrimmer
    from ssdtrain.memory.pool import BufferPool, Region
    from ssdtrain.saved import Span

__all__ = ["CpuTransfer"]


class CpuTransfer(Transfer):
    """Identity transfer.

    Args:
        pool: Where restored blocks live.
        heap: Where torch's allocator gets the memory of the others.
    """

    def __init__(self, pool: BufferPool, heap: HeapTrimmer) -> None:
        self._pool = pool
        self._heap = heap

    def mark(self) -> object:
        """Nothing: a CPU tensor has its value when the operation that made it returns."""
        return None

    def outgoing(
        self, storage: torch.UntypedStorage, span: Span, mark: object
    ) -> Iterator[tuple[int, HostBuffer]]:
        """The span itself, in place."""
        assert mark is None
        yield 0, HostBuffer(storage.data_ptr() + span.start, span.nbytes, storage)

    def incoming(self, span: Span) -> Incoming:
        """A region of the pool for a whole storage, and for a slice fresh memory of which only the slice is real."""
        base_skew = (span.skew - span.start) % PAGE
        if span.nbytes == span.storage_nbytes:
            return _IncomingRegion(self._pool.take(span.storage_nbytes, base_skew), span)
        return _IncomingRegion(self._pool.reserve(span.storage_nbytes, base_skew), span)

    def deliver(self, restored: Tensor) -> None:
        """Nothing: the read had ended before the tensor was made."""

    def passed(self, nbytes: int) -> None:
        """Let the heap shrink."""
        self._heap.passed(nbytes)

    def trim(self) -> None:
        """Give the pool's free memory back."""
        self._pool.trim()


class _IncomingRegion(Incoming):
    def __init__(self, region: Region, span: Span) -> None:
        self._region = region
        self._span = span

    def pieces(self) -> Iterator[tuple[int, HostBuffer]]:
        yield 0, HostBuffer(self._region.address + self._span.start, self._span.nbytes, self._region)

    def tensor(self) -> Tensor:
        return self._region.tensor()
