"""The I/O threads: they sleep until they are woken, then work until nothing is left to do.

[Note: Waking workers]
Waking a thread that sleeps costs the compute thread more than all the rest of a hook, and whatever lets go of the
interpreter after that (an operation of torch, the end of a tensor) makes it wait for the worker's Python. So small
blocks wait for company: until `COMPANY_BYTES` are queued, the forward pass ends, or a thread is about to wait.
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
COMPANY_BYTES = 4 << 20


class Workers:
    """Threads that run jobs.

    Args:
        count: How many.
        next_job: Called on a worker for something to do, which is then run; None when there is nothing.
        on_crash: Called on a worker that ends because a job raised.
        smallest_budget: The most bytes that can be queued; a fraction of them is company enough.

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
        self._company_bytes = max(1, min(COMPANY_BYTES, smallest_budget // 4))
        self._untold_bytes = 0  # queued since threads were last woken
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
        self._untold_bytes += nbytes
        return self.is_company(self._untold_bytes)

    def is_company(self, nbytes: int) -> bool:
        """Whether so many bytes are enough to wake a thread."""
        return nbytes >= self._company_bytes

    def wake(self) -> None:
        """Wake as many threads as there is company for, or one if it is not complete. Needs no lock."""
        told = self._untold_bytes
        for _ in range(min(-(-told // self._company_bytes), len(self._threads))):
            self.wake_one()
        # Last, for an interrupt may come in between; and not to 0, for another thread may have queued meanwhile.
        self._untold_bytes -= told

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

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads

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
