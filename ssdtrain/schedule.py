"""In which order backward asks for blocks, learnt from the last backward of the same shape."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdtrain.block import Block

__all__ = ["Pass", "Schedule"]


class Pass:
    """The blocks of one forward pass, in the order in which they were packed. Guarded by the engine's lock.

    Args:
        schedule: Tells the order in which backward will ask, and learns the one in which it did.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._blocks: list[weakref.ref[Block]] = []  # weak: a block lives as long as its handles
        self._order: Sequence[int] | None = None
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._asked: dict[int, None] = {}
        self.shape = 0
        self.live = 0

    def add(self, block: Block) -> int:
        """Append a block; returns its index."""
        self._blocks.append(weakref.ref(block))
        self.shape = hash((self.shape, block.span.nbytes))
        self.live += 1
        return len(self._blocks) - 1

    @property
    def begun_backward(self) -> bool:
        """Whether backward has asked for any block of this pass."""
        return bool(self._asked)

    def ask(self, index: int) -> None:
        """Backward asks for a block: what was expected before it is no longer worth reading ahead."""
        if self._order is None:
            self._order = self._schedule.recall(self.shape) or range(len(self._blocks) - 1, -1, -1)
            self._position = {block: at for at, block in enumerate(self._order)}
        self._asked.setdefault(index)
        self._cursor = max(self._cursor, self._position.get(index, -1) + 1)

    def next(self) -> Block | None:
        """The block that backward is expected to ask for after those taken by `advance`; None at the end."""
        while self._order is not None and self._cursor < len(self._order):
            index = self._order[self._cursor]
            block = self._blocks[index]() if index < len(self._blocks) else None
            if block is not None and index not in self._asked:
                return block
            self._cursor += 1
        return None

    def advance(self) -> None:
        """Take the block that `next` returned."""
        self._cursor += 1

    def passed(self, index: int) -> bool:
        """Whether a block was expected before the last one that backward asked for."""
        last = next(reversed(self._asked), None)
        return last is not None and self._position.get(index, -1) < self._position.get(last, -1)

    def forget(self) -> bool:
        """One block less; with the last one the order is learnt. Returns whether backward has ended so."""
        self.live -= 1
        ended = self.live == 0 and self.begun_backward
        if ended:
            self._schedule.learn(self.shape, list(self._asked))
        return ended


class Schedule:
    """Orders by the shape of the forward pass.

    Args:
        capacity: Shapes remembered; the least recently used are forgotten.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._orders: OrderedDict[int, list[int]] = OrderedDict()
        self._capacity = capacity

    def learn(self, shape: int, order: list[int]) -> None:
        """Remember how backward asked."""
        self._orders[shape] = order
        self._orders.move_to_end(shape)
        if len(self._orders) > self._capacity:
            self._orders.popitem(last=False)

    def recall(self, shape: int) -> Sequence[int] | None:
        """The order of the last backward of this shape."""
        return self._orders.get(shape)
