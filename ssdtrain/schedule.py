"""In which order backward asks for blocks, learnt from the last backward of the same shape."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ssdtrain.block import Block

__all__ = ["Pass", "Schedule"]

# Blocks that may be gone before a pass is looked at. More than a forward pass drops on its way.
_WORN_OUT = 4096


class Pass:
    """The blocks of one or more forwards before any backward, as they were packed. Guarded by the engine's lock.

    Several forwards are one pass where backward waits for all of them, as with the micro-batches of a pipeline: then
    the order that is learnt leads from one micro-batch to the next.

    Saved tensors share a block only within a forward. Between forwards, memory may change in ways that no version
    tells: through an optimizer's or gradcheck's `.data`, or as running statistics.

    Args:
        schedule: Tells the order in which backward will ask, and learns the one in which it did.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._blocks: list[weakref.ref[Block]] = []  # weak: a block lives as long as its handles
        # By the id of their storage. Ids are reused, so the block's reference has the last word.
        self._of_storage: dict[int, list[weakref.ref[Block]]] = {}
        self._order: Sequence[int] | None = None
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._last = -1  # position of the block that was asked for last
        self._asked: dict[int, None] = {}
        self._task: int | None = None
        self._asked_by_task: set[int] = set()
        self.signature = 0  # of the sizes of its blocks: equal for passes of one shape
        self.live = 0  # blocks that are not freed

    def blocks_of(self, storage: torch.UntypedStorage, root: Tensor) -> list[Block]:
        """The blocks of a root in a storage that are not gone, newest first."""
        blocks = [ref() for ref in reversed(self._of_storage.get(id(storage), ()))]
        return [
            block
            for block in blocks
            if block is not None and block.storage() is storage and block.root() is root
        ]

    def add(self, block: Block) -> int:
        """Append a block; returns its index."""
        ref = weakref.ref(block)
        self._blocks.append(ref)
        self._of_storage.setdefault(id(block.source), []).append(ref)
        self.live += 1
        self.signature = hash((self.signature, block.span.nbytes))
        return len(self._blocks) - 1

    def share_no_more(self) -> None:
        """Another forward begins: it shares no block of those before. Called on the thread that packs."""
        self._of_storage.clear()

    @property
    def begun_backward(self) -> bool:
        """Whether backward has asked for any block of this pass."""
        return bool(self._asked)

    @property
    def worn_out(self) -> bool:
        """Whether it is mostly made of blocks that are gone: a loop of graphs that are dropped without backward."""
        return len(self._blocks) > 2 * self.live + _WORN_OUT

    def ask(self, index: int, task: int) -> None:
        """Backward asks for a block: what was expected before it is no longer worth reading ahead.

        Args:
            index: The block's, in this pass.
            task: Tells one backward pass over a retained graph from the next.
        """
        if task != self._task:
            self._task = task
            self._asked_by_task.clear()
            self._cursor = 0
        self._asked_by_task.add(index)
        if self._order is None:
            self._order = self._schedule.recall(self.signature) or range(len(self._blocks) - 1, -1, -1)
            self._position = {block: at for at, block in enumerate(self._order)}
        self._asked.setdefault(index)
        self._last = self._position.get(index, -1)
        self._cursor = max(self._cursor, self._last + 1)

    def next(self) -> Block | None:
        """The block that backward is expected to ask for after those taken by `advance`; None at the end."""
        while self._order is not None and self._cursor < len(self._order):
            index = self._order[self._cursor]
            block = self._blocks[index]() if index < len(self._blocks) else None
            if block is not None and index not in self._asked_by_task:
                return block
            self._cursor += 1
        return None

    def advance(self) -> None:
        """Take the block that `next` returned."""
        self._cursor += 1

    def passed(self, index: int) -> bool:
        """Whether a block is not expected any more: it was to be asked for before the last one that was."""
        return self._position.get(index, -1) < self._last

    def forget(self) -> bool:
        """One block less; with the last one the order is learnt. Returns whether backward has ended so."""
        self.live -= 1
        if self.live:
            return False
        if self.begun_backward:
            self._schedule.learn(self.signature, list(self._asked))
            return True
        # A graph that was dropped: nothing of it may add up in a pass that goes on.
        self._blocks.clear()
        self._of_storage.clear()
        self.signature = 0
        return False


class Schedule:
    """Orders by the signature of the forward pass.

    Args:
        capacity: Signatures remembered; the least recently used are forgotten.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._orders: OrderedDict[int, list[int]] = OrderedDict()
        self._capacity = capacity

    def learn(self, signature: int, order: list[int]) -> None:
        """Remember how backward asked."""
        self._orders[signature] = order
        self._orders.move_to_end(signature)
        if len(self._orders) > self._capacity:
            self._orders.popitem(last=False)

    def recall(self, signature: int) -> Sequence[int] | None:
        """The order of the last backward of such a pass."""
        return self._orders.get(signature)
