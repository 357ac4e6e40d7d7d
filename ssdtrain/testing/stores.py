"""Stores that are slow, that overtake, that wait for a test, that remember what was asked, or that move no bytes."""

from __future__ import annotations

import errno
import random
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import PAGE, Extent, HostBuffer, SpillStore
from ssdtrain.testing.wrapper import WrapperStore

if TYPE_CHECKING:
    from typing import Literal

__all__ = ["GatedStore", "NullStore", "Operation", "RecordingStore", "ReorderingStore", "SlowStore"]


class SlowStore(WrapperStore):
    """A device of a given bandwidth and latency in front of a fast store.

    The bandwidth is shared by all threads, as a disk's is; latencies of different threads overlap.

    Args:
        inner: The store that keeps the bytes.
        bandwidth: Bytes a second for reads and writes together; None: as fast as `inner`.
        latency: Seconds that every read and write takes besides.
    """

    def __init__(self, inner: SpillStore, *, bandwidth: float | None = None, latency: float = 0.0) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth
        self._latency = latency
        # Guards `_busy_until`, when the device will have moved all bytes that it was given so far.
        self._device_lock = threading.Lock()
        self._busy_until = 0.0

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write, then take as long as the device would."""
        done_at = self._done_at(buffer.nbytes)
        super().write(extent, buffer, offset)
        _sleep_until(done_at)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Read, then take as long as the device would."""
        done_at = self._done_at(buffer.nbytes)
        super().read(extent, buffer, offset)
        _sleep_until(done_at)

    def _done_at(self, nbytes: int) -> float:
        seconds = nbytes / self._bandwidth if self._bandwidth else 0.0
        with self._device_lock:
            self._busy_until = max(self._busy_until, time.monotonic()) + seconds
            return self._busy_until + self._latency


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class ReorderingStore(WrapperStore):
    """Lets later reads and writes end before earlier ones, where several threads ask at once.

    Args:
        inner: The store that keeps the bytes.
        probability: How often an operation waits to be overtaken, from 0 to 1.
        patience: Seconds after which it goes on if nobody comes.
        seed: Of the random choices.
    """

    def __init__(
        self, inner: SpillStore, *, probability: float = 0.5, patience: float = 0.005, seed: int = 0
    ) -> None:
        super().__init__(inner)
        self._probability = probability
        self._patience = patience
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._changed = threading.Condition()  # guards `_random` and `_ended`
        self._ended = 0

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Perhaps wait for another operation to end, then write."""
        self._let_pass()
        super().write(extent, buffer, offset)
        self._end()

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Perhaps wait for another operation to end, then read."""
        self._let_pass()
        super().read(extent, buffer, offset)
        self._end()

    def _let_pass(self) -> None:
        with self._changed:
            if self._random.random() < self._probability:
                ended = self._ended
                self._changed.wait_for(lambda: self._ended > ended, self._patience)

    def _end(self) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class _Gate:
    """Where operations of one kind wait. Open lets all pass; closed lets as many pass as were released."""

    def __init__(self, is_open: bool) -> None:
        self._changed = threading.Condition()
        self._open = is_open
        self._released = 0
        self._waiting = 0

    def pass_through(self, timeout: float) -> bool:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                passed = self._changed.wait_for(lambda: self._open or self._released > 0, timeout)
            finally:
                self._waiting -= 1
            if passed and not self._open:
                self._released -= 1
            return passed

    def set(self, is_open: bool) -> None:
        with self._changed:
            self._open = is_open
            self._released = 0
            self._changed.notify_all()

    def release(self, count: int) -> None:
        with self._changed:
            self._released += count
            self._changed.notify_all()

    def wait_for(self, count: int, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting >= count, timeout)


class GatedStore(WrapperStore):
    """Reads and writes wait at a gate until the test lets them pass, so that no test needs to sleep.

    ```
    store = GatedStore(HostStore(), hold=("write",))
    ...                              # something that writes in another thread
    store.wait_for("write")          # it has arrived at the gate
    ...                              # what is to happen before the write
    store.open("write")
    ```

    Args:
        inner: The store that keeps the bytes.
        hold: The kinds whose gate is closed at first: "write", "read" or both.
        timeout: Seconds after which a wait fails, so that a broken test ends.
    """

    def __init__(
        self,
        inner: SpillStore,
        *,
        hold: tuple[Literal["write", "read"], ...] = ("write", "read"),
        timeout: float = 60.0,
    ) -> None:
        super().__init__(inner)
        self._timeout = timeout
        self._gates = {kind: _Gate(kind not in hold) for kind in ("write", "read")}

    def hold(self, kind: Literal["write", "read"]) -> None:
        """Close the gate for operations that come from now on."""
        self._gates[kind].set(False)

    def open(self, kind: Literal["write", "read"]) -> None:
        """Let all pass that wait and that will come."""
        self._gates[kind].set(True)

    def release(self, kind: Literal["write", "read"], count: int = 1) -> None:
        """Let `count` operations pass, waiting or to come, and keep the gate closed for the rest."""
        self._gates[kind].release(count)

    def wait_for(self, kind: Literal["write", "read"], count: int = 1) -> None:
        """Return when at least `count` operations wait at the gate.

        Raises:
            TimeoutError: They did not come.
        """
        if not self._gates[kind].wait_for(count, self._timeout):
            raise TimeoutError(f"no {count} operations of kind {kind!r} came within {self._timeout} s")

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Wait at the gate, then write."""
        self._pass("write", extent)
        super().write(extent, buffer, offset)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Wait at the gate, then read."""
        self._pass("read", extent)
        super().read(extent, buffer, offset)

    def close(self) -> None:
        """Open the gates, so that nobody is left waiting, and close the inner store."""
        super().close()
        for gate in self._gates.values():
            gate.set(True)

    def _pass(self, kind: str, extent: Extent) -> None:
        if not self._gates[kind].pass_through(self._timeout):
            message = f"no test opened the gate for this {kind} within {self._timeout} s"
            raise StoreError(errno.ETIMEDOUT, message, self.location(extent))


class Operation(NamedTuple):
    """One call that a `RecordingStore` passed on."""

    kind: str
    extent: Extent
    nbytes: int
    offset: int


class RecordingStore(WrapperStore):
    """Remembers every call that succeeded, in the order in which they ended.

    Args:
        inner: The store that does the work.

    Attributes:
        operations: The calls: "allocate", "write", "read" and "free".
    """

    def __init__(self, inner: SpillStore) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def of_kind(self, kind: str) -> list[Operation]:
        """The calls of one kind."""
        return [operation for operation in tuple(self.operations) if operation.kind == kind]

    def allocate(self, nbytes: int) -> Extent:
        """As the inner store, recorded."""
        extent = super().allocate(nbytes)
        self.operations.append(Operation("allocate", extent, nbytes, 0))
        return extent

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """As the inner store, recorded."""
        super().write(extent, buffer, offset)
        self.operations.append(Operation("write", extent, buffer.nbytes, offset))

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """As the inner store, recorded."""
        super().read(extent, buffer, offset)
        self.operations.append(Operation("read", extent, buffer.nbytes, offset))

    def free(self, extent: Extent) -> None:
        """As the inner store, recorded."""
        super().free(extent)
        self.operations.append(Operation("free", extent, extent.nbytes, 0))


class NullStore(SpillStore):
    """Keeps nothing and succeeds: for measuring what everything but the disk costs.

    What `read` gives is garbage, whatever the buffer held before. Never compare results over it.

    Attributes:
        bytes_written: Bytes that were to be written.
        bytes_read: Bytes that were to be read.
    """

    def __init__(self) -> None:
        self.bytes_written = 0
        self.bytes_read = 0
        self._totals_lock = threading.Lock()  # guards the two totals above and what is live
        self._live: dict[int, int] = {}
        self._next_offset = 0
        self._closed = False

    @property
    def backend(self) -> str:
        """Always "null"."""
        return "null"

    @property
    def live_bytes(self) -> int:
        """Bytes of extents that are not freed."""
        with self._totals_lock:
            return sum(tuple(self._live.values()))

    def allocate(self, nbytes: int) -> Extent:
        """Account for `nbytes`."""
        self._refuse_if_closed()
        length = -(-nbytes // PAGE) * PAGE
        with self._totals_lock:
            offset = self._next_offset
            self._next_offset += length
            self._live[offset] = length
        return Extent(nbytes, offset, length)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:  # noqa: ARG002
        """Account for the bytes."""
        self._refuse_if_closed()
        with self._totals_lock:
            self.bytes_written += buffer.nbytes

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:  # noqa: ARG002
        """Account for the bytes; the buffer stays as it is."""
        self._refuse_if_closed()
        with self._totals_lock:
            self.bytes_read += buffer.nbytes

    def free(self, extent: Extent) -> None:
        """Account for the bytes."""
        with self._totals_lock:
            self._live.pop(extent.offset, None)

    def close(self) -> None:
        """Refuse what comes later."""
        self._closed = True
        self._live.clear()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError(errno.EBADF, "the store is closed", self.backend)
