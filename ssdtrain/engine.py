"""Writes blocks behind the forward pass and reads them ahead of the backward pass, within byte budgets.

[Note: Who may let go of memory]
An in-place operation bumps a tensor's version after it has changed the bytes. A worker that looks at the version when
its write ends can therefore miss a change that is half done. So a worker never lets go of the original memory: it
hands the block back through `Block.written`, and the thread that packed the block lets go (`settle`) the next time
that it packs or unpacks. Then no operation of that thread is under way, and an unchanged version means that the bytes
on disk are the saved ones. If the version did move, the block is kept, and backward raises as torch does.

[Note: Dying handles]
A handle can die anywhere: in backward, or in a garbage collection that starts inside one of the critical sections
below. `release` therefore only appends to a queue, and works the queue off only if it gets the lock without waiting.
Extents are given back by the next ordinary call, since a store has locks of its own.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ssdtrain.block import IN_ORIGINAL_MEMORY, IN_STORE_QUEUE, Block, Handle, State
from ssdtrain.errors import ActivationLostError, SSDTrainError, StoreError
from ssdtrain.saved import Geometry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssdtrain.config import OffloadConfig
    from ssdtrain.device.base import Transfer
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
        assert isinstance(config.store_queue_bytes, int)
        assert isinstance(config.prefetch_bytes, int)
        self._store = store
        self._queue_limit = config.store_queue_bytes
        self._ahead_limit = config.prefetch_bytes
        self._wait_when_full = config.on_full_queue == "wait"
        self._raise_store_errors = config.on_store_error == "raise"
        self._pid = os.getpid()

        self._lock = threading.Lock()  # guards everything below, and the blocks
        self._work = threading.Condition(self._lock)  # a worker may have something to do
        self._done = threading.Condition(self._lock)  # a write or a read has ended
        self._stores: deque[Block] = deque()
        self._reads: deque[Block] = deque()
        self._unwritten = 0  # stores queued or running
        self._queued_bytes = 0  # of blocks in the store queue, until their memory is let go
        # Blocks read ahead that backward has not asked for, oldest first, and their bytes.
        self._ahead: dict[Block, None] = {}
        self._ahead_bytes = 0
        self._live_blocks = 0
        self._counters: Counter[str] = Counter()
        self._stall_seconds = 0.0
        self._store_error: StoreError | None = None
        self._crash: BaseException | None = None
        self._closing = False

        # These two need no lock: a deque's append and popleft are atomic.
        self._dead: deque[tuple[Block, int, bool]] = deque()  # see [Note: Dying handles]
        self._freed: deque[Extent] = deque()
        self._idle: deque[Transfer] = deque()  # a forward pass has no blocks left: their memory is to be trimmed

        self._workers = [
            threading.Thread(target=self._run, name=f"ssdtrain-io-{number}", daemon=True)
            for number in range(config.io_threads * store.members)
        ]
        for worker in self._workers:
            worker.start()

    # Forward.

    def count(self, *, exempt: bool) -> None:
        """One more saved tensor."""
        with self._lock:
            self._counters["tensors_packed"] += 1
            self._counters["tensors_exempt"] += exempt

    def share(self, block: Block, geometry: Geometry, tensor: Tensor) -> Handle | None:
        """A handle of a block, for one more saved tensor; None if the block is gone.

        Args:
            block: New, or found by the storage that it has in common with `tensor`.
            geometry: The tensor's.
            tensor: Detached, plain. Held until the block is spilled.
        """
        with self._lock:
            doomed = self._bury()
            if block.state is State.FREED:
                return None
            key = block.join(tensor)
            self._live_blocks += block.handles == 1
            self._counters["blocks_deduplicated"] += block.handles > 1
        del doomed
        return Handle(self, block, key, geometry)

    def store(self, block: Block) -> None:
        """Queue a new block to be written, if the queue has room; otherwise keep it, or wait for room.

        Raises:
            StoreError: An earlier write failed, and the config says raise.
        """
        with self._lock:
            doomed = self._bury()
            self._check_stores()
            if self._wait_when_full:
                self._wait(lambda: self._has_room(block, doomed) or self._unwritten == 0)
            if self._wait_when_full or self._has_room(block, doomed):
                block.move(State.QUEUED)
                self._stores.append(block)
                self._unwritten += 1
                self._queued_bytes += block.span.nbytes
                self._work.notify()
            else:
                self._counters["blocks_kept"] += 1
        del doomed
        self._sweep()

    def settle(self, written: deque[Block]) -> None:
        """Let go of the memory of blocks whose write has ended. See [Note: Who may let go of memory].

        Args:
            written: The calling thread's own.
        """
        if written:
            with self._lock:
                doomed = self._settle(written)
            del doomed
            self._sweep()

    def synchronize(self, written: deque[Block]) -> None:
        """Wait until no store is queued or running, and settle.

        Raises:
            StoreError: A write failed, and the config says raise.
        """
        with self._lock:
            self._wait(lambda: self._unwritten == 0)
            doomed = self._settle(written)
            self._check_stores()
        del doomed
        self._sweep()

    def _has_room(self, block: Block, doomed: list[object]) -> bool:
        doomed += self._settle(block.written)
        # A block larger than the queue passes through it alone.
        return self._queued_bytes == 0 or self._queued_bytes + block.span.nbytes <= self._queue_limit

    def _settle(self, written: deque[Block]) -> list[object]:
        doomed: list[object] = []
        while written:
            block = written.popleft()
            if block.state is not State.WRITTEN:
                continue
            if block.wanted or not block.unchanged():
                block.move(State.KEPT)
                self._give_back(block)
            else:
                block.move(State.SPILLED)
                doomed += block.release_original()
            self._queued_bytes -= block.span.nbytes
        return doomed

    # Backward.

    def fetch(self, handle: Handle, *, in_backward: bool) -> Tensor | torch.UntypedStorage:
        """What a handle stands for: the saved tensor itself if memory still has it, else the restored storage.

        Args:
            handle: From `share`.
            in_backward: Whether autograd asks, so that the order is worth learning.

        Raises:
            ActivationLostError: The block cannot be read back.
        """
        with self._lock:
            doomed = self._bury()
            self._check_workers()
            if in_backward:
                handle.block.forward.ask(handle.block.index)
            found = self._find(handle)
            if in_backward:
                self._read_ahead(handle.block.forward)
        del doomed
        self._sweep()
        return self._read_now(handle) if found is None else found

    def _find(self, handle: Handle) -> Tensor | torch.UntypedStorage | None:
        """The block from memory; None where the caller is to read it."""
        block = handle.block
        if block.state is State.READING:
            self._wait(lambda: block.state is not State.READING)
        if block.state in IN_ORIGINAL_MEMORY:
            tensor = block.saved[handle.key]
            self._mark_read(handle)
            self._counters["blocks_forwarded"] += block.state is not State.KEPT
            self._spare(block)
            return tensor
        storage = block.restored_storage()
        if storage is not None:
            self._counters["prefetch_hits"] += block in self._ahead
            self._mark_read(handle)
            return storage
        self._begin_reading(block)
        self._counters["prefetch_misses"] += 1
        return None

    def _mark_read(self, handle: Handle) -> None:
        block = handle.block
        block.unread -= not handle.read
        handle.read = True
        self._leave_ahead(block)
        if block.unread == 0:
            block.restored = None  # the caller has it; from here on it is only watched

    def _spare(self, block: Block) -> None:
        """Neither write nor let go of what backward is about to use."""
        if block.state is State.QUEUED:
            block.move(State.KEPT)
            self._leave_queue(block)
        elif block.state is not State.KEPT and block.unread:
            block.wanted = True

    def _begin_reading(self, block: Block) -> None:
        if block.state is State.RESTORED:
            block.move(State.SPILLED)
        block.move(State.READING)

    def _read_now(self, handle: Handle) -> torch.UntypedStorage:
        """Read on the calling thread: it has nothing else to do, and no other thread has to wake up."""
        began = time.perf_counter()
        storage = self._read(handle.block)
        with self._lock:
            self._mark_read(handle)
            self._stall_seconds += time.perf_counter() - began
        return storage

    def _read(self, block: Block) -> torch.UntypedStorage:
        """Fill memory from the store. The block is READING, and then RESTORED or, on failure, SPILLED again."""
        assert block.extent is not None
        storage = None
        try:
            incoming = block.transfer.incoming(block.span)
            for offset, buffer in incoming.pieces():
                self._store.read(block.extent, buffer, offset)
            storage = incoming.storage()
        except OSError as error:
            raise ActivationLostError(
                f"an activation of {block.span.nbytes} bytes cannot be read back "
                f"({self._store.describe(block.extent)}): {error}"
            ) from error
        finally:
            with self._lock:
                if storage is None:
                    block.move(State.SPILLED)
                    self._leave_ahead(block)
                else:
                    block.move(State.RESTORED)
                    block.hold_restored(storage)
                    self._counters["bytes_read"] += block.span.nbytes
                doomed = self._free(block) if block.handles == 0 else []
                self._done.notify_all()
            del doomed
        return storage

    # Reading ahead.

    def _read_ahead(self, forward: Pass) -> None:
        """Queue reads in the expected order, as far as the budget goes."""
        while (block := forward.next()) is not None:
            if block.state in IN_STORE_QUEUE:
                self._counters["blocks_forwarded"] += block.state is State.QUEUED
                self._spare(block)
            elif block.on_disk_only():
                if not self._has_room_ahead(block):
                    return
                self._reads.append(block)
                self._ahead[block] = None
                self._ahead_bytes += block.span.nbytes
                self._work.notify()
            forward.advance()

    def _has_room_ahead(self, block: Block) -> bool:
        """Whether a block fits the prefetch budget, if need be after wrong guesses have been dropped."""
        if self._fits_ahead(block):
            return True
        for other in list(self._ahead):
            if other.state is not State.READING and (
                other.forward is not block.forward or other.forward.passed(other.index)
            ):
                other.restored = None
                self._leave_ahead(other)
        return self._fits_ahead(block)

    def _fits_ahead(self, block: Block) -> bool:
        # A block larger than the budget is read ahead alone.
        fits = self._ahead_bytes + block.span.nbytes <= self._ahead_limit
        return fits or (self._ahead_bytes == 0 and self._ahead_limit > 0)

    def _leave_ahead(self, block: Block) -> None:
        if block in self._ahead:
            del self._ahead[block]
            self._ahead_bytes -= block.span.nbytes

    # Worker threads.

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                del job  # a waiting thread must not keep a block alive
                self._sweep()
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread is raised where it is waited for
            with self._lock:
                self._crash = error
                self._done.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for a read, else a store; None when closing."""
        with self._lock:
            while not self._closing:
                while self._reads:
                    block = self._reads.popleft()
                    if block in self._ahead and block.on_disk_only():
                        self._begin_reading(block)
                        return partial(self._read_for_later, block)
                while self._stores:
                    block = self._stores.popleft()
                    if block.state is State.QUEUED:
                        block.move(State.WRITING)
                        return partial(self._write, block)
                if self._idle:
                    return self._sweep
                self._work.wait()
        return None

    def _read_for_later(self, block: Block) -> None:
        try:
            self._read(block)
        except (ActivationLostError, MemoryError):
            # Backward reads again on its own thread, and raises what it meets.
            return

    def _write(self, block: Block) -> None:
        extent = error = None
        source = block.source  # held here: the block lets go of it should its last handle die
        assert source is not None
        try:
            extent = self._store.allocate(block.span.nbytes)
            for offset, buffer in block.transfer.outgoing(source, block.span, block.mark):
                self._store.write(extent, buffer, offset)
        except StoreError as failure:
            error = failure
        with self._lock:
            block.extent = extent
            self._unwritten -= 1
            if error is None:
                self._counters["blocks_offloaded"] += 1
                self._counters["bytes_written"] += block.span.nbytes
                block.move(State.WRITTEN)
                block.written.append(block)
            else:
                block.move(State.KEPT)
                self._give_back(block)
                self._queued_bytes -= block.span.nbytes
                self._counters["store_failures"] += 1
                first = self._counters["store_failures"] == 1
                self._store_error = self._store_error or error
            doomed = self._free(block) if block.handles == 0 else []
            self._done.notify_all()
        del doomed
        if error is not None and first and not self._raise_store_errors:
            warnings.warn(
                f"ssdtrain keeps activations in memory that it could not write: {error}. Further failures are "
                "only counted, in stats.store_failures.",
                RuntimeWarning,
                stacklevel=1,
            )

    # The ends of blocks.

    def release(self, block: Block, key: int, *, read: bool) -> None:
        """A handle has died. See [Note: Dying handles]."""
        if os.getpid() != self._pid:
            return  # a forked child shares the file, but owns nothing in it
        self._dead.append((block, key, read))
        if self._lock.acquire(blocking=False):
            try:
                doomed = self._bury()
            finally:
                self._lock.release()
            del doomed

    def _bury(self) -> list[object]:
        """Work off the handles that have died; the caller drops what is returned after it has left the lock."""
        doomed: list[object] = []
        while self._dead:
            block, key, read = self._dead.popleft()
            doomed.append(block.leave(key, read=read))
            if block.handles == 0:
                doomed += self._free(block)
            elif block.unread == 0 and block not in self._ahead:
                doomed.append(block.restored)
                block.restored = None
        return doomed

    def _free(self, block: Block) -> list[object]:
        if block.state in {State.WRITING, State.READING}:
            return []  # freed when that has ended
        if block.state is State.QUEUED:
            self._leave_queue(block)
        elif block.state is State.WRITTEN:
            self._queued_bytes -= block.span.nbytes
        self._leave_ahead(block)
        self._give_back(block)
        block.move(State.FREED)
        self._live_blocks -= 1
        if block.forward.forget():
            self._idle.append(block.transfer)
            self._work.notify()
        return block.release_all()

    def _leave_queue(self, block: Block) -> None:
        """A store was cancelled; its entry in the queue is skipped."""
        self._unwritten -= 1
        self._queued_bytes -= block.span.nbytes
        self._done.notify_all()

    def _give_back(self, block: Block) -> None:
        if block.extent is not None:
            self._freed.append(block.extent)
            block.extent = None

    def _sweep(self) -> None:
        """Give freed extents and idle memory back. Without the lock: stores and pools have their own."""
        for extent in _drain(self._freed):
            self._store.free(extent)
        for transfer in _drain(self._idle):
            transfer.trim()

    # Waiting, watching, ending.

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for workers; the lock is free meanwhile."""
        began = time.perf_counter()
        while not until():
            self._check_workers()
            self._done.wait(_HEARTBEAT_SECONDS)
        self._stall_seconds += time.perf_counter() - began

    def _check_workers(self) -> None:
        if self._crash is not None:
            raise SSDTrainError(f"an I/O thread of ssdtrain died: {self._crash!r}") from self._crash

    def _check_stores(self) -> None:
        self._check_workers()
        if self._raise_store_errors and self._store_error is not None:
            error, self._store_error = self._store_error, None
            raise error

    def snapshot(self) -> dict[str, int | float | str]:
        """Counters, by the names in `OffloadStats`."""
        with self._lock:
            doomed = self._bury()
        del doomed
        self._sweep()
        with self._lock:
            return {
                **self._counters,
                "stall_seconds": self._stall_seconds,
                "live_blocks": self._live_blocks,
                "live_bytes_on_disk": self._store.live_bytes,
                "backend": self._store.backend,
            }

    def close(self) -> None:
        """Stop the workers, after what they are doing, and close the store. Idempotent.

        Blocks that were only queued stay in memory; blocks on disk are lost to backward.
        """
        with self._lock:
            self._closing = True
            while self._stores:
                block = self._stores.popleft()
                if block.state is State.QUEUED:
                    block.move(State.KEPT)
                    self._leave_queue(block)
            self._reads.clear()
            self._work.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()
        self._store.close()

    def close_from_finalizer(self) -> None:
        """Close, when a garbage collection asks for it: perhaps on a worker, perhaps inside the lock."""
        inside = threading.current_thread() in self._workers or not self._lock.acquire(timeout=_HEARTBEAT_SECONDS)
        if inside:
            threading.Thread(target=self.close, name="ssdtrain-close", daemon=True).start()
        else:
            self._lock.release()
            self.close()


def _drain(items: deque[_T]) -> Iterator[_T]:
    """Pop until empty, also while other threads do."""
    with suppress(IndexError):
        while True:
            yield items.popleft()
