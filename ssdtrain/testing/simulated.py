"""An accelerator that is late on purpose, on a machine that has none.

Nothing that is queued on a stream runs before somebody waits for it, on the streams that a test names as late; the
others run at once. Memory that was just allocated is overwritten, in the order of the stream that it belongs to, and
memory that was freed is the first to be allocated again, as in torch's caching allocator. A missing wait then shows
as wrong bits. It also shows as an `OrderError` whatever ran first: every operation knows what it is ordered after
(vector clocks, as in a race detector), and one that touches memory in conflict with an operation that it is not
ordered after names both.

Device memory is host memory here: its tensors are CPU tensors, and what torch computes with them runs at once. What
is to be late is computed through `SimulatedDevice.launch`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ssdtrain.device.accelerator import AcceleratorTransfer
from ssdtrain.device.streams import Streams
from ssdtrain.device.transfers import Transfers
from ssdtrain.memory.staging import StagingRing
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.storage.extents import ExtentAllocator
from ssdtrain.testing.wrapper import WrapperStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ssdtrain.device.base import Transfer
    from ssdtrain.storage.base import DeviceStore, Extent, HostBuffer, SpillStore

__all__ = ["HostAccessStore", "OrderError", "SimulatedDevice", "SimulatedTransfers"]

# What fresh memory holds: NaN in every floating-point type.
POISON = 0xFF

# torch's device allocators align to it.
_ALIGNMENT = 512

# Streams that have memory of their own, as in torch: what is freed goes to the stream that it was allocated on.
_MOST_POOLS = 4


class OrderError(AssertionError):
    """Two operations that touch the same memory are not ordered."""


class _Stream:
    def __init__(self, name: str, *, late: bool) -> None:
        self.name = name
        self.late = late
        self.queued: list[_Operation] = []  # all that were ever queued
        self.ran = 0  # how many of them have run
        self.after: dict[str, int] = {}  # what the next operation is ordered after: a place in each stream


class _Event(NamedTuple):
    stream: _Stream
    place: int  # in `queued`: it is reached when so many have run
    after: dict[str, int]


class _Operation(NamedTuple):
    name: str
    run: Callable[[], object]
    waits: tuple[_Event, ...]


class _Range(NamedTuple):
    begin: int
    end: int


class _Access(NamedTuple):
    memory: _Range
    name: str
    writes: bool
    stream: str
    place: int


class _Freed(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    __slots__ = ("offset",)
    offset: int


class _Pool(NamedTuple):
    """The part of the memory that belongs to one stream."""

    begin: int
    ranges: ExtentAllocator


class _Allocation(NamedTuple):
    home: _Stream
    uses: set[_Stream]
    freed: _Freed


class SimulatedDevice(Streams):
    """One device with its memory. Streams are called "compute" (the default one), "side 1", "side 2" and so on.

    Args:
        late: Names of the streams whose work runs only when somebody waits for it.
        capacity: Bytes of device memory.
        index: The device's number.
    """

    def __init__(self, late: Iterable[str] = (), *, capacity: int = 256 << 20, index: int = 0) -> None:
        self._late = frozenset(late)
        self._index = index
        self._lock = threading.RLock()  # guards all below
        self._names = 0
        self._default = _Stream("compute", late="compute" in self._late)
        self._current = threading.local()
        self._host_after: dict[str, int] = {}  # what the host is ordered after
        self._accesses: list[_Access] = []
        self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pools: dict[_Stream, _Pool] = {}
        self._allocations: dict[int, _Allocation] = {}
        self._freed: list[_Freed] = []  # their last tensor has died; a list's append needs no lock
        self._parked: list[tuple[int, _Stream, list[_Event]]] = []  # freed, and not yet to be reused

    # What `Streams` asks for.

    @property
    def index(self) -> int:
        """As it was given."""
        return self._index

    def current(self) -> _Stream:
        """Set by `on`."""
        stream: _Stream = getattr(self._current, "stream", self._default)
        return stream

    def side(self) -> _Stream:
        """The next number."""
        with self._lock:
            self._names += 1
            name = f"side {self._names}"
            return _Stream(name, late=name in self._late)

    def record(self, stream: _Stream) -> _Event:
        """Remembers what it is ordered after."""
        with self._lock:
            return _Event(stream, len(stream.queued), dict(stream.after))

    def wait(self, stream: _Stream, event: _Event) -> None:
        """Queues the wait; it runs when the stream does."""
        with self._lock:
            self._enqueue(stream, "wait", lambda: None, waits=(event,))

    def reached(self, event: _Event) -> bool:
        """Nothing runs for it."""
        with self._lock:
            reached = event.stream.ran >= event.place
            if reached:
                _join(self._host_after, event.after)
            return reached

    def synchronize(self, event: _Event) -> None:
        """Runs what is before the event."""
        with self._lock:
            self._run(event.stream, event.place)
            _join(self._host_after, event.after)

    def copy(self, to: Tensor, source: Tensor, stream: _Stream) -> None:
        """By address, as a device would: only memory that is not the device's is held for it."""
        assert to.nbytes == source.nbytes
        addresses = to.data_ptr(), source.data_ptr(), source.nbytes
        held = [tensor for tensor in (to, source) if not self._owns(tensor)]
        to[:0].zero_()  # counts as a change in place, as any copy does

        def run() -> None:
            ctypes.memmove(*addresses)
            held.clear()

        with self._lock:
            self._enqueue(stream, f"copy on {stream.name}", run, reads=[source], writes=[to])

    def empty(self, nbytes: int, stream: _Stream) -> Tensor:
        """The range that was freed last, if it is large enough for its stream; overwritten in the stream's order."""
        with self._lock:
            self._reclaim()
            pool = self._pool_of(stream)
            place = pool.ranges.allocate(nbytes)
            if place is None:
                raise torch.OutOfMemoryError(f"simulated device out of memory: {nbytes} bytes")
            offset = pool.begin + place
            array = (ctypes.c_char * nbytes).from_buffer(self._memory, offset)
            freed = _Freed(array, self._freed.append)
            freed.offset = offset
            self._allocations[offset] = _Allocation(stream, set(), freed)
            tensor = torch.frombuffer(array, dtype=torch.uint8)
            address = self._base + offset
            self._enqueue(
                stream,
                f"first write of {nbytes} fresh bytes on {stream.name}",
                lambda: ctypes.memset(address, POISON, nbytes),
                writes=[tensor],
            )
            return tensor

    def record_use(self, tensor: Tensor, stream: _Stream) -> None:
        """Nothing for memory that is not the device's."""
        with self._lock:
            offset = self._offset_of(tensor)
            if offset is not None and self._allocations[offset].home is not stream:
                self._allocations[offset].uses.add(stream)

    # What tests ask for.

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        """Make a stream current on this thread."""
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(
        self, name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor], output: Tensor
    ) -> None:
        """Queue `output.copy_(function(*inputs))` on the current stream. The host does not hold their memory.

        All are contiguous.
        """
        views = [self._raw(tensor) for tensor in (*inputs, output)]
        with self._lock:
            self._enqueue(
                self.current(),
                name,
                lambda: views[-1].copy_(function(*views[:-1])),
                reads=inputs,
                writes=[output],
            )

    def like(self, tensor: Tensor) -> Tensor:
        """Fresh memory for a tensor of the same shape and dtype, on the current stream."""
        memory = self.empty(tensor.nbytes, self.current()).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(memory, 0, tensor.shape, tensor.stride())

    def host_access(self, buffer: HostBuffer, *, writes: bool) -> None:
        """The host reads or writes memory that the device copies from or into."""
        with self._lock:
            memory = _Range(buffer.address, buffer.address + buffer.nbytes)
            self._check(_Access(memory, "the host", writes, "host", 0), self._host_after)

    def finish(self) -> None:
        """Run all that is queued on the default stream."""
        self.synchronize(self.record(self._default))

    # How it works.

    def _enqueue(
        self,
        stream: _Stream,
        name: str,
        run: Callable[[], object],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        waits: tuple[_Event, ...] = (),
    ) -> None:
        for event in waits:
            _join(stream.after, event.after)
        # What the host is ordered after when it queues the operation, the operation is ordered after.
        _join(stream.after, self._host_after)
        place = len(stream.queued)
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                access = _Access(_range_of(tensor), name, writing, stream.name, place)
                self._check(access, stream.after)
        stream.queued.append(_Operation(name, run, waits))
        stream.after[stream.name] = place + 1
        if not stream.late:
            self._run(stream, len(stream.queued))

    def _run(self, stream: _Stream, place: int) -> None:
        while stream.ran < place:
            operation = stream.queued[stream.ran]
            for event in operation.waits:
                self._run(event.stream, event.place)
            operation.run()
            stream.queued[stream.ran] = _Operation(operation.name, lambda: None, ())
            stream.ran += 1

    def _check(self, access: _Access, after: dict[str, int]) -> None:
        kept = []
        for other in self._accesses:
            apart = other.memory.end <= access.memory.begin or access.memory.end <= other.memory.begin
            ordered = after.get(other.stream, 0) > other.place or other.stream in {access.stream, "host"}
            if not apart and not ordered and (access.writes or other.writes):
                raise OrderError(f"{access.name!r} is not ordered after {other.name!r}, on the same memory")
            inside = access.memory.begin <= other.memory.begin and other.memory.end <= access.memory.end
            # One write stands for all that it is ordered after.
            if not (inside and ordered and access.writes):
                kept.append(other)
        self._accesses = [*kept, access]

    def _owns(self, tensor: Tensor) -> bool:
        return self._base <= tensor.data_ptr() < self._base + len(self._memory)

    def _offset_of(self, tensor: Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        return address - self._base if address - self._base in self._allocations else None

    def _raw(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory that does not hold it."""
        assert tensor.is_contiguous()
        if not self._owns(tensor):
            return tensor.detach()
        array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)

    def _pool_of(self, stream: _Stream) -> _Pool:
        if stream not in self._pools:
            share = len(self._memory) // _MOST_POOLS // _ALIGNMENT * _ALIGNMENT
            assert len(self._pools) < _MOST_POOLS
            pool = _Pool(share * len(self._pools), ExtentAllocator(_ALIGNMENT))
            pool.ranges.grow(share)
            self._pools[stream] = pool
        return self._pools[stream]

    def _reclaim(self) -> None:
        while self._freed:
            offset = self._freed.pop().offset
            home, uses, _ = self._allocations.pop(offset)
            self._parked.append((offset, home, [self.record(stream) for stream in uses]))
        parked = []
        for offset, home, events in self._parked:
            if all(event.stream.ran >= event.place for event in events):
                for event in events:
                    _join(self._host_after, event.after)
                pool = self._pools[home]
                pool.ranges.free(offset - pool.begin)
            else:
                parked.append((offset, home, events))
        self._parked = parked


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, place in other.items():
        clock[stream] = max(clock.get(stream, 0), place)


def _range_of(tensor: Tensor) -> _Range:
    return _Range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


class HostAccessStore(WrapperStore):
    """Tells a device what the host does with buffers: a store reads what it writes, and writes what it reads.

    What moves bytes without the host is the inner store's.

    Args:
        inner: The store that keeps the bytes.
        device: To be told.
    """

    def __init__(self, inner: SpillStore, device: SimulatedDevice) -> None:
        super().__init__(inner)
        self._device = device

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Told before and after."""
        self._device.host_access(buffer, writes=False)
        super().write(extent, buffer, offset)
        self._device.host_access(buffer, writes=False)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Told before and after."""
        self._device.host_access(buffer, writes=True)
        super().read(extent, buffer, offset)
        self._device.host_access(buffer, writes=True)

    def device_store(self, extent: Extent) -> DeviceStore | None:
        """As the inner store."""
        return self.inner.device_store(extent)

    def borrow(self, extent: Extent, *, write: bool) -> AbstractContextManager[HostBuffer | None]:
        """As the inner store."""
        return self.inner.borrow(extent, write=write)


class SimulatedTransfers(Transfers):
    """Serves CPU tensors as if they were a simulated device's.

    Args:
        device: Whose.
        buffers: How many staging buffers.
        nbytes: Of each; small, so that blocks are cut into several pieces.
    """

    def __init__(self, device: SimulatedDevice, *, buffers: int = 6, nbytes: int = 4096) -> None:
        self._transfer = AcceleratorTransfer(device, StagingRing(page_aligned, buffers, nbytes))

    def of(self, device: torch.device) -> Transfer | None:
        """The same for every device."""
        assert device.type == "cpu"
        return self._transfer
