"""The I/O threads: they sleep until they are woken, then work until nothing is left to do.

[Note: Waking workers]
Waking a sleeping thread costs the compute thread more than the rest of a hook does. It costs again afterwards: the
next time that the compute thread releases the GIL, the worker takes it, and the compute thread waits for its Python.
So workers are woken for a batch of blocks: when `WAKE_BATCH_BYTES` are queued, when the forward pass ends, and before
any thread waits.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ssdtrain.errors import SSDTrainError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Workers"]

# Small beside every budget, and 2 ms of work for an SSD: what is delayed by it is not late.
WAKE_BATCH_BYTES = 4 << 20


class Workers:
    """Threads that run jobs.

    Args:
        count: How many.
        next_job: Called on a worker for something to do, which is then run; None when there is nothing.
        on_crash: Called on a worker that ends because a job raised.
        smallest_budget: Bytes that can be queued at most; a batch is a fraction of them, or less.

    Raises:
        RuntimeError: No more threads are to be had.
    """

    def __init__(
        self,
        count: int,
        *,
        next_job: Callable[[], Callable[[], None] | None],
        on_crash: Callable[[], None],
        smallest_budget: int,
    ) -> None:
        self._next_job = next_job
        self._on_crash = on_crash
        self._batch_bytes = max(1, min(WAKE_BATCH_BYTES, smallest_budget // 4))
        self._unannounced_bytes = 0  # queued since threads were last woken; grows under the engine's lock
        self._stopping = False
        self._crash: BaseException | None = None
        # One item for each thread that is to look for something to do. Not a condition of the engine's lock: a thread
        # woken by one holds the lock while it waits for the interpreter, and the compute thread, which has that,
        # for the lock.
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(target=self._run, name=f"ssdtrain-io-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.stop()
            raise

    def queued(self, nbytes: int) -> bool:
        """Note that so many bytes more are to be moved; the engine's lock is held.

        Returns:
            Whether the caller is to call `wake`, as the last thing that it does.
        """
        self._unannounced_bytes += nbytes
        return self.is_batch(self._unannounced_bytes)

    def is_batch(self, nbytes: int) -> bool:
        """Whether so many bytes are enough to wake a thread."""
        return nbytes >= self._batch_bytes

    def wake(self) -> None:
        """Wake a thread for each batch, and one for what is left over. Needs no lock."""
        told = self._unannounced_bytes
        for _ in range(min(-(-told // self._batch_bytes), len(self._threads))):
            self.wake_one()
        # Last, for an interrupt may come in between; and not to 0, for another thread may have queued meanwhile.
        self._unannounced_bytes -= told

    def wake_one(self) -> None:
        """Have a thread look for something to do."""
        # A thread that is awake looks anyway: more items than threads would only wake them for nothing later.
        if self._wake_ups.qsize() < len(self._threads):
            self._wake_ups.put(None)

    def check(self) -> None:
        """Check that no job raised, which is what ends a thread; `Thread.is_alive` can be wrong after an interrupt.

        Raises:
            SSDTrainError: One did, and its thread has ended.
        """
        if self._crash is not None:
            raise SSDTrainError(f"an I/O thread of ssdtrain died: {self._crash!r}") from self._crash

    def stop(self) -> None:
        """End the threads, each after the job that it is at. Idempotent."""
        self._stopping = True
        for _ in self._threads:
            self._wake_ups.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                job = self._next_job()
                if job is None:
                    self._wake_ups.get()
                else:
                    job()
                del job  # a sleeping thread must not keep a block alive
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this thread
            self._crash = error
            self._on_crash()
