"""A block: one storage that is kept, written, on disk, being read or restored. The unit of offloading.

```
      cancelled      failed       wanted soon, or changed in place
      ┌─────────┬──────────────┬──────────────┐
      ▼         │              │              │           failed
    KEPT ──► QUEUED ──────► WRITING ─────► WRITTEN ──► SPILLED ◄──► READING ──► RESTORED
                                                          ▲                        │
                                                          └────────────────────────┘
```

Every state but WRITING and READING may also move to FREED, when the last handle dies. A block that is being read or
written then is freed when that has ended.
"""

from __future__ import annotations

import enum
import errno
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque

    import torch
    from torch import Tensor

    from ssdtrain.device.base import Arrival, Transfer
    from ssdtrain.engine import Engine
    from ssdtrain.saved import Geometry, Span
    from ssdtrain.schedule import Pass
    from ssdtrain.storage.base import Extent

__all__ = ["Block", "Handle", "State"]


class State(enum.Enum):
    """Where a block's bytes are."""

    KEPT = "in the original memory"
    QUEUED = "in the original memory, to be written"
    WRITING = "in the original memory, being written"
    WRITTEN = "in the original memory and on disk"
    SPILLED = "on disk"
    READING = "on disk, being read"
    RESTORED = "on disk and in restored memory"
    FREED = "nowhere"

    # Members are singletons; the hash of Enum is Python, and states are looked up several times a block.
    __hash__ = object.__hash__


_IN_STORE_QUEUE = frozenset({State.QUEUED, State.WRITING, State.WRITTEN})

# The version of a tensor that nobody has changed in place.
_AS_READ = 0

_MOVES = {
    State.KEPT: {State.QUEUED, State.FREED},
    State.QUEUED: {State.WRITING, State.KEPT, State.FREED},
    State.WRITING: {State.WRITTEN, State.KEPT},
    State.WRITTEN: {State.SPILLED, State.KEPT, State.FREED},
    State.SPILLED: {State.READING, State.FREED},
    State.READING: {State.RESTORED, State.SPILLED},
    State.RESTORED: {State.SPILLED, State.FREED},
    State.FREED: set[State](),
}


class Block:
    """State and memory of one block. The engine's lock guards all of it but what never changes.

    Args:
        storage: What is to be offloaded.
        root: The tensor whose versions tell of changes; the saved tensors are it and views of it.
        span: Which part of the storage.
        version: `Tensor._version` of the saved tensors; any other version is another block.
        transfer: How its bytes get to a store and back.
        to_settle: Where the block goes when its write has ended, for the thread that packed it.
        forward_pass: The forward pass that it belongs to.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "_watched",
        "arrival",
        "counted",
        "extent",
        "forward_pass",
        "handles",
        "handles_made",
        "index",
        "mark",
        "restored",
        "root",
        "saved",
        "source",
        "span",
        "state",
        "storage",
        "to_settle",
        "transfer",
        "unread",
        "version",
        "wanted",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        root: Tensor,
        span: Span,
        version: int,
        *,
        transfer: Transfer,
        to_settle: deque[Block],
        forward_pass: Pass,
    ) -> None:
        self.storage = weakref.ref(storage)
        self.root = weakref.ref(root)
        self.span = span
        self.version = version
        self.transfer = transfer
        self.mark = transfer.mark()
        self.to_settle = to_settle
        self.forward_pass = forward_pass
        self.index = -1  # in `forward_pass`, once it is stored
        self.counted = False  # among the live blocks
        self.state = State.KEPT
        # The original memory: held until the block is spilled. `saved` has each handle's own tensor, whose
        # version counter tells of in-place changes.
        self.source: torch.UntypedStorage | None = storage
        self._memory = (storage.data_ptr(), storage.nbytes())
        self.saved: dict[int, Tensor] = {}
        self.extent: Extent | None = None
        # The restored memory: held here while a handle is yet to ask for it, afterwards only watched, so that
        # views that are alive at the same time share it.
        self.restored: Tensor | None = None
        self._watched: weakref.ref[Tensor] | None = None
        self.arrival: Arrival | None = None  # of the bytes that are watched
        # Keys of handles, as sets: taking one out twice, after an interrupt, does no harm.
        self.handles: set[int] = set()
        self.handles_made = 0
        self.unread: set[int] = set()  # backward has not asked for them
        self.wanted = False  # backward is near: do not let go of the original memory

    def join(self, tensor: Tensor) -> int:
        """One handle more, whose saved tensor this is; returns the handle's key."""
        key = self.handles_made
        self.handles_made += 1
        self.handles.add(key)
        self.unread.add(key)
        if self.in_original_memory():
            self.saved[key] = tensor
        return key

    def leave(self, key: int) -> Tensor | None:
        """One handle less; returns its saved tensor."""
        self.handles.discard(key)
        self.unread.discard(key)
        return self.saved.pop(key, None)

    def move(self, to: State) -> None:
        """Change the state; the only place that does."""
        assert to in _MOVES[self.state], f"a block cannot move from {self.state} to {to}"
        self.state = to

    def begin_reading(self) -> None:
        """The bytes are nowhere in memory, and the caller is about to read them."""
        assert self.on_disk_only()
        if self.state is State.RESTORED:
            self.move(State.SPILLED)
        self.move(State.READING)

    def unchanged(self) -> bool:
        """Whether the memory is what it was: no saved tensor was changed in place, and the storage was not freed."""
        return self.has_its_memory() and all(
            tensor._version == self.version for tensor in self.saved.values()
        )

    def has_its_memory(self) -> bool:
        """Whether the storage has its memory. FSDP, for one, frees and refills it without a new version."""
        assert self.source is not None
        return (self.source.data_ptr(), self.source.nbytes()) == self._memory

    def check_memory(self) -> None:
        """Check the same.

        Raises:
            OSError: EFAULT; it was freed.
        """
        if not self.has_its_memory():
            raise OSError(errno.EFAULT, "the storage was resized while it was to be written")

    def release_original(self) -> list[object]:
        """Let go of the original memory; the caller drops what is returned after it has left the lock."""
        doomed: list[object] = [self.source, self.saved]
        self.source, self.saved = None, {}
        return doomed

    def release_all(self) -> list[object]:
        """Let go of all memory, likewise."""
        doomed: list[object] = [self.restored, *self.release_original()]
        self.restored = None
        return doomed

    def in_original_memory(self) -> bool:
        """Whether the memory that was packed is still held."""
        return self.state is State.KEPT or self.in_store_queue()

    def in_store_queue(self) -> bool:
        """Whether the store queue holds the memory."""
        return self.state in _IN_STORE_QUEUE

    def on_disk_only(self) -> bool:
        """Whether the bytes are nowhere in memory, nor on their way."""
        return self.state is State.SPILLED or (self.state is State.RESTORED and self.restored_bytes() is None)

    def hold_restored(self, restored: Tensor, arrival: Arrival) -> None:
        """Remember restored memory and keep it alive, until `restored` is set to None.

        Args:
            restored: The storage's bytes, uint8. Saved tensors are views of it, so its version tells whether
                any of them was changed in place.
            arrival: When they are there.
        """
        self.arrival = arrival
        self._watched = weakref.ref(restored)
        self.restored = restored

    def restored_bytes(self) -> Tensor | None:
        """The restored memory, if any tensor or this block still holds it and nobody has changed it."""
        restored = self._watched() if self._watched is not None else None
        if restored is None or restored._version != _AS_READ:
            return None
        return restored


class Handle:
    """What the pack hook returns: a share of a block, and how one saved tensor views it.

    Args:
        engine: Told when the handle dies.
        block: Shared; lives as long as its handles.
        key: Names this handle within the block.
        geometry: The saved tensor's.
    """

    __slots__ = ("block", "engine", "geometry", "key")

    def __init__(self, engine: Engine, block: Block, key: int, geometry: Geometry) -> None:
        self.engine = engine
        self.block = block
        self.key = key
        self.geometry = geometry

    def view(self, restored: Tensor, arrival: Arrival) -> Tensor:
        """The saved tensor again, on its block's restored bytes."""
        arrival.deliver(restored)
        return self.geometry.view(restored, self.block.transfer.origin(self.block.span))

    def __del__(self) -> None:
        # Dynamo, where it traces the hooks, makes handles without __init__.
        if hasattr(self, "geometry"):
            self.engine.release(self.block, self.key)
