"""Moving a block between the memory that autograd uses and a store.

Only this folder knows streams. The rest calls, in this order: `hold` and `mark` at pack; `write` on an I/O thread;
`read` on whichever thread reads; `Arrival.deliver` at unpack; `passed` after pack and unpack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssdtrain.saved import Span
    from ssdtrain.storage.base import Extent, SpillStore

__all__ = ["Arrival", "Transfer"]


class Arrival(ABC):
    """When restored bytes are there, which may be later than `Transfer.read` returns. Holds no memory."""

    @abstractmethod
    def deliver(self, restored: Tensor) -> None:
        """Order what the calling thread computes from now on after it.

        Args:
            restored: The bytes, from the same `Transfer.read`.
        """


class Transfer(ABC):
    """The way to and from the memory of one device."""

    @abstractmethod
    def hold(self, tensor: Tensor) -> None:
        """Whatever the calling thread computes with a tensor, its memory is not reused before that has ended."""

    @abstractmethod
    def mark(self) -> object:
        """The point in the calling thread's order of compute at which a tensor being packed has its value."""

    @abstractmethod
    def reached(self, mark: object) -> bool:
        """Whether compute has come to a mark."""

    @abstractmethod
    def wait(self, mark: object) -> None:
        """Return when compute has come to a mark. No lock of the engine is held."""

    @abstractmethod
    def write(
        self, store: SpillStore, extent: Extent, storage: torch.UntypedStorage, span: Span, mark: object
    ) -> None:
        """Write the span's bytes, as they are at `mark`. On return nothing reads them any more, also after an error.

        Raises:
            OSError: They are not all in the store.
        """

    @abstractmethod
    def read(self, store: SpillStore, extent: Extent, span: Span, mark: object) -> tuple[Tensor, Arrival]:
        """Restore a span's bytes, in memory that is reused when their last view dies.

        Args:
            store: Where they are.
            extent: What `write` wrote.
            span: What it was.
            mark: What it was written at: the memory is most likely to be used where that was made.

        Returns:
            The storage's bytes from `origin` on, uint8, and when they are there.

        Raises:
            OSError: They cannot be read.
            MemoryError: There is no memory for them.
        """

    @abstractmethod
    def origin(self, span: Span) -> int:
        """The place in the saved tensor's storage, in bytes, of the first byte that `read` returns."""

    @abstractmethod
    def passed(self, nbytes: int) -> None:
        """Note that a block of so many bytes was packed or unpacked. No lock of the engine is held.

        The place to give freed memory back, where its allocator does not reuse it well.
        """

    @abstractmethod
    def trim(self) -> None:
        """Give restored memory that no block uses back to the system: a backward pass has used its last block."""
