"""Writes blocks behind the forward pass and reads them ahead of the backward pass.

[Note: Who may let go of memory]
An in-place operation bumps a tensor's version after it has changed the bytes. A worker that looks at the
version when its write ends can therefore miss a change that is half done. So a worker never lets go of the
original memory: it hands the block back through `Block.to_settle`, and the thread that packed the block lets go
(`_settle`) the next time that it packs or unpacks. Then no operation of that thread is under way, and an
unchanged version means that the bytes on disk are the saved ones. If the version did move, the block is kept,
and backward raises as torch does.

[Note: Dying handles]
A handle can die anywhere: in backward, or in a garbage collection that starts inside one of the critical
sections below. `release` therefore only appends to a queue, and works the queue off only if nobody has the lock.
Extents go back on an I/O thread (`_give_back_freed`), since a store has locks of its own. Memory is dropped after the
lock is released, for unmapping takes a while: methods that collect it return it, as `doomed`.

[Note: Running ahead of a device]
The compute thread only queues work for an accelerator, and may have queued a whole forward pass before the device
has computed the first layer. Then the store queue is full of blocks that do not exist yet, which says nothing of
the disk. If the next blocks were kept for that, nearly all would be. So the compute thread waits for the device to
compute half of the queue, and no more than half: the device always has work queued.

[Note: Interrupts]
Ctrl-C raises KeyboardInterrupt in the main thread, anywhere: in practice where a function begins or a call into C
returns. Locks are taken with `with` only, what must be undone is undone in `finally`, and numbers that belong
together change between two calls. Working off a dead handle can be repeated. What an interrupt can still cost is the
memory of a block or two, where Python drops it inside a `__del__`.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import warnings
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import OutOfMemoryError

from ssdtrain.block import Block, Handle, State
from ssdtrain.budgets import ReadAhead, StoreQueue
from ssdtrain.config import in_bytes
from ssdtrain.errors import ActivationLostError, SSDTrainError, StoreError
from ssdtrain.saved import check_version, refuse_unfilled
from ssdtrain.stats import OffloadStats
from ssdtrain.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ssdtrain.config import OffloadConfig
    from ssdtrain.device.base import Arrival, Transfer
    from ssdtrain.saved import Geometry
    from ssdtrain.schedule import Pass
    from ssdtrain.storage.base import Extent, SpillStore

__all__ = ["Engine"]

_T = TypeVar("_T")

# How often a waiting thread looks whether the workers that it waits for are alive.
_HEARTBEAT_SECONDS = 1.0


class Engine:
    """Queues, worker threads and budgets over one store.

    Args:
        store: Where blocks go; closed with the engine.
        config: Budgets and choices.
    """

    def __init__(self, store: SpillStore, config: OffloadConfig) -> None:
        store_queue_bytes, prefetch_bytes = map(in_bytes, (config.store_queue_bytes, config.prefetch_bytes))
        self._store = store
        self._wait_when_full = config.on_full_queue == "wait"
        self._raise_store_errors = config.on_store_error == "raise"
        self._pid = os.getpid()

        self._lock = threading.Lock()  # guards everything below, and the blocks
        self._done = threading.Condition(self._lock)  # a write or a read has ended
        self._queue = StoreQueue(store_queue_bytes)
        self._ahead = ReadAhead(prefetch_bytes)
        self._live_blocks = 0
        self._counters: Counter[str] = Counter()
        self._stall_seconds = 0.0
        self._store_error: StoreError | None = None  # the first, or the first since one was raised
        self._warned = False
        self._closing = False

        # These need no lock: a deque's append and popleft are atomic.
        self._dead: deque[tuple[Block, int]] = deque()  # handles, see [Note: Dying handles]
        self._freed: deque[Extent] = deque()  # to be given back to the store
        self._idle: deque[Transfer] = deque()  # to be trimmed: a backward pass has used its last block

        try:
            self._workers = Workers(
                config.io_threads * store.members,
                next_job=self._next_job,
                on_crash=self._wake_waiting,
                smallest_budget=min(store_queue_bytes, prefetch_bytes or sys.maxsize),
            )
        except RuntimeError as error:
            store.close()
            raise SSDTrainError(
                f"io_threads: {config.io_threads} threads for each of {store.members} directories cannot be "
                f"started ({error}); choose fewer"
            ) from error

    # Forward.

    def exempt(self, to_settle: deque[Block]) -> None:
        """One more saved tensor that is not offloaded.

        Args:
            to_settle: Blocks packed by the calling thread, to be settled. See [Note: Who may let go of memory].
        """
        with self._lock:
            self._counters["tensors_packed"] += 1
            self._counters["tensors_exempt"] += 1
            doomed = self._settle(to_settle)
        del doomed

    def share(self, block: Block, geometry: Geometry, tensor: Tensor) -> Handle | None:
        """A handle on a block that is there, for one more saved tensor; None if the block is gone.

        Args:
            block: Found by the storage that it has in common with `tensor`.
            geometry: The tensor's.
            tensor: Detached, plain. Held until the block is spilled.
        """
        with self._lock:
            doomed = self._reap() + self._settle(block.to_settle)
            handle = None if block.state is State.FREED else self._join(block, geometry, tensor)
            self._counters["blocks_deduplicated"] += handle is not None
        del doomed
        return handle

    def store(self, block: Block, geometry: Geometry, tensor: Tensor) -> Handle:
        """A handle on a new block, which is queued to be written if there is room, and else kept or waited for.

        Args:
            block: New.
            geometry: The tensor's.
            tensor: Detached, plain. Held until the block is spilled.

        Raises:
            StoreError: An earlier write failed, and the config says raise.
        """
        if not self._queue.has_room(block):
            self._wait_for_device(block)
        with self._lock:
            doomed = self._reap() + self._settle(block.to_settle)
            self._check_stores()
            if self._wait_when_full and not self._closing:
                self._stall_seconds += self._wait(lambda: self._room_after_settling(block, doomed))
            handle = self._join(block, geometry, tensor)
            block.index = block.forward_pass.add(block)
            block.counted = True
            self._live_blocks += 1
            if not self._closing and (self._wait_when_full or self._queue.has_room(block)):
                self._queue.put(block)
                wake = self._workers.queued(block.span.nbytes)
            else:
                self._counters["blocks_kept"] += 1
                wake = False
        doomed.clear()
        self._report()
        if wake:
            self._workers.wake()
        block.transfer.passed(block.span.nbytes)
        return handle

    def _wait_for_device(self, block: Block) -> None:
        """See [Note: Running ahead of a device]."""
        with self._lock:
            doomed = self._settle(block.to_settle)
            queued = self._queue.to_be_computed(block)
        del doomed
        if queued is not None:
            self._workers.wake()
            queued.transfer.wait(queued.mark)

    def end_forward(self) -> None:
        """No more blocks are to come for now. See [Note: Waking workers]."""
        self._workers.wake()

    def _join(self, block: Block, geometry: Geometry, tensor: Tensor) -> Handle:
        self._counters["tensors_packed"] += 1
        return Handle(self, block, block.join(tensor), geometry)

    def synchronize(self, to_settle: deque[Block]) -> None:
        """Wait until no store is queued or running, and settle.

        Args:
            to_settle: Blocks packed by the calling thread.

        Raises:
            StoreError: A write failed, and the config says raise.
        """
        with self._lock:
            self._wait(lambda: self._queue.idle)  # no stall: the caller asked to wait
            doomed = self._settle(to_settle)
            self._check_stores()
        del doomed
        self._report()

    def _room_after_settling(self, block: Block, doomed: list[object]) -> bool:
        doomed += self._settle(block.to_settle)
        # With nothing left to write, the queue is full of what other threads are yet to settle.
        return self._queue.has_room(block) or self._queue.idle

    def _settle(self, to_settle: deque[Block]) -> list[object]:
        """Let go of the memory of blocks whose write has ended."""
        doomed: list[object] = []
        while to_settle:
            block = to_settle.popleft()
            if block.state is not State.WRITTEN:
                continue  # freed
            if block.wanted or self._closing or not block.unchanged():
                self._queue.let_go(block, State.KEPT)
                self._give_back(block)
            else:
                self._queue.let_go(block, State.SPILLED)
                doomed += block.release_original()
            self._tell_of_store()
        return doomed

    # Backward.

    def fetch(self, handle: Handle, task: int | None, to_settle: deque[Block]) -> Tensor:
        """The saved tensor that a handle stands for.

        Args:
            handle: From `store` or `share`.
            task: The number of the backward pass that asks, whose order is worth learning; None outside one.
            to_settle: Blocks packed by the calling thread, to be settled.

        Raises:
            ActivationLostError: The block cannot be read back.
            InplaceModificationError: It is still in memory, and was changed in place.
        """
        self._report()
        block = handle.block
        saved = restored = None
        reading = False
        try:
            with self._lock:
                doomed = self._reap()
                if task is not None:
                    block.forward_pass.ask(block.index, task)
                if block.state is State.READING:
                    self._stall_seconds += self._wait(lambda: block.state is not State.READING)
                if block.in_original_memory():
                    saved = self._take_original(handle)
                else:
                    restored = self._take_restored(handle)
                    reading = restored is None
                wake = task is not None and self._read_ahead(block.forward_pass)
                # After the lookup: settling first would let go of the very blocks that backward asks for first, since
                # they were written last.
                doomed += self._settle(to_settle)
            if reading:
                # On this thread: it has nothing else to do, and no other has to wake up for it.
                self._workers.wake()
                began = time.perf_counter()
                restored = self._read(block)
        finally:
            if reading:
                self._end_read(block, restored)
        if reading:
            with self._lock:
                self._mark_read(handle)
                self._stall_seconds += time.perf_counter() - began
        del doomed
        if wake:
            self._workers.wake()
        block.transfer.passed(block.span.nbytes)
        if saved is not None:
            return saved
        assert restored is not None
        return handle.view(*restored)

    def _take_original(self, handle: Handle) -> Tensor:
        """The saved tensor itself, from memory that has not been let go."""
        block = handle.block
        tensor = block.saved[handle.key]
        check_version(tensor, block.version)
        self._mark_read(handle)
        self._counters["blocks_forwarded"] += block.state in {State.QUEUED, State.WRITING}
        self._keep_in_memory(block)
        return tensor

    def _take_restored(self, handle: Handle) -> tuple[Tensor, Arrival] | None:
        """The block's restored bytes; None where the caller is to read them: then the block is READING."""
        block = handle.block
        refuse_unfilled()
        restored = block.restored_bytes()
        if restored is None:
            self._counters["prefetch_misses"] += 1
            block.begin_reading()
            return None
        self._counters["prefetch_hits"] += block in self._ahead
        self._mark_read(handle)
        assert block.arrival is not None
        return restored, block.arrival

    def _read_ahead(self, forward_pass: Pass) -> bool:
        """Queue what backward will ask for; returns whether workers are to be woken."""
        before = self._ahead.queued_bytes
        for block in self._ahead.extend(forward_pass):
            self._counters["blocks_forwarded"] += block.state is State.QUEUED
            self._keep_in_memory(block)
        more = self._ahead.queued_bytes - before
        if more == 0:
            return False
        if self._workers.queued(more):
            return True
        following = forward_pass.next()
        # Else no batch will be full soon.
        return following is None or self._workers.is_batch(following.span.nbytes)

    def _mark_read(self, handle: Handle) -> None:
        block = handle.block
        block.unread.discard(handle.key)
        self._ahead.discard(block)
        if not block.unread:
            block.restored = None  # the caller has it; from here on it is only watched

    def _keep_in_memory(self, block: Block) -> None:
        """Neither write nor let go of what backward is about to use."""
        if block.state is State.QUEUED:
            self._cancel(block, State.KEPT)
        elif block.state is not State.KEPT and block.unread:
            block.wanted = True

    def _read(self, block: Block) -> tuple[Tensor, Arrival]:
        """Fill memory from the store. The block is READING; `_end_read` must follow."""
        assert block.extent is not None
        try:
            return block.transfer.read(self._store, block.extent, block.span, block.mark)
        except OSError as error:
            raise ActivationLostError(
                f"an activation of {block.span.nbytes} bytes cannot be read back "
                f"({self._store.describe(block.extent)}): {error}"
            ) from error

    def _end_read(self, block: Block, restored: tuple[Tensor, Arrival] | None) -> None:
        """The block is RESTORED or, where the read failed, SPILLED again."""
        with self._lock:
            if restored is None:
                block.move(State.SPILLED)
                self._ahead.discard(block)
            else:
                block.move(State.RESTORED)
                block.hold_restored(*restored)
                self._counters["bytes_read"] += block.span.nbytes
            doomed = [] if block.handles else self._free(block)
            self._done.notify_all()
        del doomed

    # On the workers.

    def _next_job(self) -> Callable[[], None] | None:
        """A read, else a store; None when there is neither."""
        with self._lock:
            doomed = self._reap()
            job = self._take_job()
        del doomed
        self._give_back_freed()
        return job

    def _take_job(self) -> Callable[[], None] | None:
        if (block := self._ahead.take()) is not None:
            return partial(self._read_for_later, block)
        if (block := self._queue.take()) is not None:
            return partial(self._write, block)
        return None

    def _read_for_later(self, block: Block) -> None:
        restored = None
        try:
            restored = self._read(block)
        except (ActivationLostError, MemoryError, OutOfMemoryError):
            # Backward reads again on its own thread, and raises what it meets.
            return
        finally:
            self._end_read(block, restored)

    def _write(self, block: Block) -> None:
        extent = error = None
        source = block.source  # without the lock: a block that is WRITING holds it, also without handles
        assert source is not None
        try:
            block.check_memory()
            extent = self._store.allocate(block.span.nbytes)
            block.transfer.write(self._store, extent, source, block.span, block.mark)
            block.check_memory()
        except (OSError, MemoryError) as failure:
            # A new error: the traceback of the caught one holds this frame, and so the block's memory.
            code, reason = getattr(failure, "errno", None), getattr(failure, "strerror", None)
            error = StoreError(code or errno.ENOMEM, reason or str(failure), self._place(failure))
        with self._lock:
            block.extent = extent
            if error is None:
                self._counters["blocks_offloaded"] += 1
                self._counters["bytes_written"] += block.span.nbytes
                self._queue.written(block)
                block.to_settle.append(block)
            else:
                self._queue.failed(block)
                self._give_back(block)
                self._counters["store_failures"] += 1
                self._store_error = self._store_error or error
            doomed = [] if block.handles else self._free(block)
            self._tell_of_store()
        del doomed

    @staticmethod
    def _place(failure: OSError | MemoryError) -> str:
        return str(getattr(failure, "filename", None) or "memory")

    # The ends of blocks.

    def release(self, block: Block, key: int) -> None:
        """A handle has died. See [Note: Dying handles]."""
        if os.getpid() != self._pid:
            return  # a forked child shares the file, but owns nothing in it
        self._dead.append((block, key))
        if not self._lock.locked():  # else whoever has it may be this very thread
            with self._lock:
                doomed = self._reap()
            del doomed
        else:
            self._workers.wake_one()  # who has it may be past looking

    def _reap(self) -> list[object]:
        """Work off the handles that have died; the caller drops what is returned outside the lock."""
        doomed: list[object] = []
        while self._dead:
            block, key = self._dead[0]  # it goes when all is done, see [Note: Interrupts]
            doomed.append(block.leave(key))
            if not block.handles:
                doomed += self._free(block)
            elif not block.unread and block not in self._ahead:
                doomed.append(block.restored)
                block.restored = None
            self._dead.popleft()
        return doomed

    def _free(self, block: Block) -> list[object]:
        if block.state in {State.WRITING, State.READING}:
            return []  # freed when that has ended
        if block.state is State.QUEUED:
            self._cancel(block, State.FREED)
        elif block.state is State.WRITTEN:
            self._queue.let_go(block, State.FREED)
            self._tell_of_store()
        elif block.state is not State.FREED:
            block.move(State.FREED)
        self._ahead.discard(block)
        self._give_back(block)
        if block.counted:
            block.counted = False
            self._live_blocks -= 1
            if block.forward_pass.forget():
                self._idle.append(block.transfer)
            if block.forward_pass.live == 0:
                self._workers.wake_one()  # to sweep
        return block.release_all()

    def _cancel(self, block: Block, to: State) -> None:
        self._queue.cancel(block, to)
        self._tell_of_store()

    def _tell_of_store(self) -> None:
        """A store has ended. Waking a thread for nothing would take the GIL from the I/O threads."""
        if self._wait_when_full or self._queue.idle:
            self._done.notify_all()

    def _give_back(self, block: Block) -> None:
        if block.extent is not None:
            self._freed.append(block.extent)
            block.extent = None

    def _give_back_freed(self) -> None:
        """Give freed extents and idle memory back. Without the lock: stores and pools have their own."""
        if self._freed:
            for extent in _drain(self._freed):
                self._store.free(extent)
        if self._idle:
            for transfer in _drain(self._idle):
                transfer.trim()

    # Waiting, watching, ending.

    def _wait(self, until: Callable[[], bool]) -> float:
        """Wait for workers; the lock is free meanwhile. Returns the seconds that it took."""
        began = time.perf_counter()
        self._workers.wake()
        while not until():
            self._workers.check()
            self._workers.wake_one()  # whatever became of earlier wake-ups
            self._done.wait(_HEARTBEAT_SECONDS)
        return time.perf_counter() - began

    def _wake_waiting(self) -> None:
        """Have waiting threads look again."""
        with self._lock:
            self._done.notify_all()

    def _check_stores(self) -> None:
        self._workers.check()
        if self._raise_store_errors and self._store_error is not None:
            error, self._store_error = self._store_error, None
            raise error

    def _report(self) -> None:
        """Warn of the first failed write, on a thread of the user's: there a filter may make it an error."""
        if self._store_error is not None and not self._warned and not self._raise_store_errors:
            self._warned = True
            warnings.warn(
                f"ssdtrain keeps activations in memory that it could not write: {self._store_error}. Further "
                "failures are only counted, in stats.store_failures.",
                RuntimeWarning,
                stacklevel=5,
            )

    def snapshot(self) -> OffloadStats:
        """Counters, as of now."""
        with self._lock:
            doomed = self._reap()
        del doomed
        self._give_back_freed()
        bytes_on_disk = self._store.bytes_on_disk  # before the lock, for the store has its own
        with self._lock:
            return OffloadStats(
                **self._counters,
                stall_seconds=self._stall_seconds,
                live_blocks=self._live_blocks,
                live_bytes_on_disk=bytes_on_disk,
                backend=self._store.backend,
            )

    def close(self) -> None:
        """Stop the workers, after what they are doing, and close the store. Idempotent.

        Blocks that were only queued stay in memory; blocks on disk are lost to backward.
        """
        if os.getpid() != self._pid:
            return  # the threads and the lock's owner are in the parent
        with self._lock:
            self._closing = True
            self._queue.cancel_all()
            self._ahead.stop()
            self._done.notify_all()
        self._workers.stop()
        self._store.close()

    def close_from_finalizer(self) -> None:
        """Close, when a garbage collection asks: perhaps on a thread that has to end first, or inside the lock."""
        if os.getpid() != self._pid:
            return
        # The store may have threads, too.
        on_own_thread = threading.current_thread().name.startswith("ssdtrain-")
        if on_own_thread or not self._lock.acquire(timeout=_HEARTBEAT_SECONDS):
            threading.Thread(target=self.close, name="ssdtrain-close", daemon=True).start()
        else:
            self._lock.release()
            self.close()


def _drain(items: deque[_T]) -> Iterator[_T]:
    """Pop until empty, also while other threads do."""
    with suppress(IndexError):
        while True:
            yield items.popleft()
