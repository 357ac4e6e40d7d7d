"""Two budgets in bytes: what waits for the disk, and what is read ahead of backward.

Both are plain data, guarded by the engine's lock.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from ssdtrain.block import Block, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ssdtrain.schedule import Pass

__all__ = ["ReadAhead", "StoreQueue"]


class StoreQueue:
    """Blocks to be written, and the memory that they hold until they are let go.

    The order of statements matters: an interrupt (Ctrl-C) comes between calls, and must find the numbers right.

    Args:
        limit: Most bytes held. A block larger than that passes alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: deque[Block] = deque()
        self._held_bytes = 0  # of blocks that are QUEUED, WRITING or WRITTEN
        self._writing: dict[Block, None] = {}  # in the order in which they were taken

    def has_room(self, block: Block) -> bool:
        """Whether a block may join."""
        return self._held_bytes == 0 or self._held_bytes + block.span.nbytes <= self._limit

    def to_be_computed(self, block: Block) -> Block | None:
        """The block with which half of the queue is computed; None if it is, or if there is room for `block`.

        Until then the device is behind, and not the disk.
        """
        if self.has_room(block) or block.transfer.reached(block.mark):
            return None
        nbytes, half = 0, None
        for queued in chain(self._writing, self._blocks):
            if queued.state is State.QUEUED or queued.state is State.WRITING:  # and not cancelled
                half = queued
                nbytes += queued.span.nbytes
                if nbytes >= self._limit // 2:
                    break
        return None if half is None or half.transfer.reached(half.mark) else half

    def put(self, block: Block) -> None:
        """Queue a block."""
        block.move(State.QUEUED)
        self._held_bytes += block.span.nbytes
        self._blocks.append(block)

    @property
    def idle(self) -> bool:
        """Whether no block is to be written or being written."""
        return not self._writing and self._first() is None

    def take(self) -> Block | None:
        """The next block, now being written."""
        block = self._first()
        if block is not None:
            self._blocks.popleft()
            block.move(State.WRITING)
            self._writing[block] = None
        return block

    def _first(self) -> Block | None:
        # A block that was cancelled has left its place here.
        while self._blocks and self._blocks[0].state is not State.QUEUED:
            self._blocks.popleft()
        return self._blocks[0] if self._blocks else None

    def cancel(self, block: Block, to: State) -> None:
        """A queued block is not to be written."""
        assert block.state is State.QUEUED
        block.move(to)
        self._held_bytes -= block.span.nbytes

    def written(self, block: Block) -> None:
        """A write has succeeded; the memory is still held."""
        block.move(State.WRITTEN)
        del self._writing[block]

    def failed(self, block: Block) -> None:
        """A write has failed."""
        block.move(State.KEPT)
        del self._writing[block]
        self._held_bytes -= block.span.nbytes

    def let_go(self, block: Block, to: State) -> None:
        """A written block holds no memory on behalf of the queue any more."""
        assert block.state is State.WRITTEN
        block.move(to)
        self._held_bytes -= block.span.nbytes

    def cancel_all(self) -> None:
        """No block is to be written any more."""
        while (block := self._first()) is not None:
            self.cancel(block, State.KEPT)


class ReadAhead:
    """Blocks read, or to be read, before backward asks for them.

    Args:
        limit: Most bytes of them. A block larger than that is read ahead alone; 0 reads nothing ahead.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: dict[Block, None] = {}  # in the order in which they were queued
        self._bytes = 0
        self._to_read: deque[Block] = deque()
        self.queued_bytes = 0  # of all that were ever queued

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def extend(self, forward_pass: Pass) -> Iterator[Block]:
        """Queue what backward is expected to ask for, as far as the budget goes.

        Yields:
            Blocks on the way whose bytes are still in the store queue: they need no read, only to be spared.
        """
        while (block := forward_pass.next()) is not None:
            if block.in_store_queue():
                yield block
            elif block.on_disk_only() and block not in self._blocks:
                if not self._fits(block) and not (
                    self._drop_wrong_guesses(forward_pass) and self._fits(block)
                ):
                    return
                self._blocks[block] = None
                self._bytes += block.span.nbytes
                self.queued_bytes += block.span.nbytes
                self._to_read.append(block)
            forward_pass.advance()

    def take(self) -> Block | None:
        """The next block to read, now being read."""
        while self._to_read:
            block = self._to_read.popleft()
            if block in self._blocks and block.on_disk_only():
                block.begin_reading()
                return block
        return None

    def discard(self, block: Block) -> None:
        """Backward has asked for a block, or never will."""
        if block in self._blocks:
            del self._blocks[block]
            self._bytes -= block.span.nbytes

    def stop(self) -> None:
        """Read nothing more ahead."""
        for block in self._to_read:
            if block.on_disk_only():
                self.discard(block)
        self._to_read.clear()
        self._limit = 0

    def _fits(self, block: Block) -> bool:
        alone = self._bytes == 0 and self._limit > 0
        return alone or self._bytes + block.span.nbytes <= self._limit

    def _drop_wrong_guesses(self, forward_pass: Pass) -> bool:
        """Let go of blocks that backward has passed by, or that belong to another pass."""
        wrong = [
            block
            for block in self._blocks
            if block.state is not State.READING
            and (block.forward_pass is not forward_pass or block.forward_pass.passed(block.index))
        ]
        for block in wrong:
            block.restored = None
            self.discard(block)
        return bool(wrong)
