"""Moving a block's bytes between the memory that autograd uses and buffers that a store takes.

Only this folder knows streams. The rest calls, in this order: `mark` at pack; `outgoing` on an I/O thread;
`incoming` on whichever thread reads; `deliver` at unpack; `passed` after pack and unpack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from ssdtrain.saved import Span
    from ssdtrain.storage.base import HostBuffer

__all__ = ["Incoming", "Transfer"]


class Incoming(ABC):
    """Memory for a block on its way back."""

    @abstractmethod
    def pieces(self) -> Iterator[tuple[int, HostBuffer]]:
        """Buffers to be filled, each with its offset in the block; one is full before the next is asked for."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The restored storage's bytes, uint8, once every piece is full; reused when their last view dies."""


class Transfer(ABC):
    """The way to and from the memory of one kind of device."""

    @abstractmethod
    def mark(self) -> object:
        """The point in the current order of compute at which a tensor being packed has its value."""

    @abstractmethod
    def outgoing(
        self, storage: torch.UntypedStorage, span: Span, mark: object
    ) -> Iterator[tuple[int, HostBuffer]]:
        """Buffers that hold the span's bytes as they are at `mark`, each with its offset in the block.

        A buffer is valid until the next one is asked for. Offsets are multiples of 4096.
        """

    @abstractmethod
    def incoming(self, span: Span) -> Incoming:
        """Memory for a span's bytes, at the same place within a page as the original."""

    @abstractmethod
    def deliver(self, restored: Tensor) -> None:
        """Order the current compute after the arrival of restored bytes."""

    @abstractmethod
    def passed(self, nbytes: int) -> None:
        """Note that a block of so many bytes was packed or unpacked. No lock of the engine is held.

        The place to give freed memory back, where its allocator does not reuse it well.
        """

    @abstractmethod
    def trim(self) -> None:
        """Give restored memory that no block uses back to the system: a backward pass has used its last block."""
