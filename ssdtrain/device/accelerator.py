"""Tensors of an accelerator: copied on streams of their own, through pinned memory where the store is a file.

[Note: Who waits for whom]
out: the stream of copies out waits for the event recorded at pack (`mark`), with which the saved tensor has its
value. The I/O thread waits for the copy before it writes the staging buffer to the store, and before it returns. Only
after that is the memory let go: by the thread that packed, so in the order of the stream that it was allocated on.
What else that thread computes with the tensor, on another stream, holds the memory through `record_use` (`hold`).

in: restored memory belongs to the stream that the tensor was packed on, because backward most likely uses it there;
then the allocator reuses it at once, and what is restored takes no more memory than the budgets say. For the same
reason earlier work of that stream may still use it, so the copy in waits for an event recorded after the allocation.
Whatever unpacks waits, on its stream, for the event after the last copy (`deliver`). A block that is dropped before
anybody unpacked it has its own stream wait for that event before the memory is freed (`_Copied.drop`).

Staging buffers hold the event after the last copy out of them, see `StagingBuffer`.

Host-driven I/O, which is what a `DeviceStore` does, knows no streams: the thread waits for the event itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.device.base import Arrival, Transfer
from ssdtrain.device.streams import bytes_of
from ssdtrain.errors import StoreError
from ssdtrain.memory.staging import host_tensor
from ssdtrain.storage.base import DeviceBuffer, HostBuffer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssdtrain.device.streams import Event, Stream, Streams
    from ssdtrain.memory.staging import StagingBuffer, StagingRing
    from ssdtrain.saved import Span
    from ssdtrain.storage.base import Extent, SpillStore

__all__ = ["AcceleratorTransfer"]

# Device allocators align to it; a slice is restored at the same place modulo this, for kernels that look at it.
_ALIGNMENT = 512


class _Mark(NamedTuple):
    stream: Stream
    event: Event


class _Copied(Arrival):
    """The event after the copy in.

    Args:
        streams: The device's.
        home: The stream that the memory belongs to.
        event: After the last copy.
    """

    def __init__(self, streams: Streams, home: Stream, event: Event) -> None:
        self._streams = streams
        self._home = home
        self._event = event
        self._delivered = False

    def deliver(self, restored: Tensor) -> None:
        """Have the current stream wait, and keep the memory for it."""
        current = self._streams.current()
        self._streams.wait(current, self._event)
        self._streams.record_use(restored, current)
        self._delivered = True

    def drop(self) -> None:
        """The memory is about to be freed."""
        if not self._delivered:
            self._streams.wait(self._home, self._event)


class AcceleratorTransfer(Transfer):
    """Copies on two side streams, one out and one in.

    Args:
        streams: The device's.
        staging: Shared by all devices.
    """

    def __init__(self, streams: Streams, staging: StagingRing) -> None:
        self._streams = streams
        self._staging = staging
        self._out = streams.side()
        self._in = streams.side()

    def hold(self, tensor: Tensor) -> None:
        """Through the allocator; it knows on which stream the memory was allocated."""
        self._streams.record_use(tensor, self._streams.current())

    def mark(self) -> object:
        """The current stream, and an event on it."""
        stream = self._streams.current()
        return _Mark(stream, self._streams.record(stream))

    def reached(self, mark: object) -> bool:
        """Whether the event is reached."""
        assert isinstance(mark, _Mark)
        return self._streams.reached(mark.event)

    def wait(self, mark: object) -> None:
        """Wait for the event."""
        assert isinstance(mark, _Mark)
        self._streams.synchronize(mark.event)

    def write(
        self, store: SpillStore, extent: Extent, storage: torch.UntypedStorage, span: Span, mark: object
    ) -> None:
        """Straight to the disk, into the store's own memory, or through staging buffers. On an I/O thread."""
        assert isinstance(mark, _Mark)
        source = bytes_of(storage)[span.start : span.start + span.nbytes]
        device_store = store.device_store(extent)
        if device_store is not None:
            self._streams.synchronize(mark.event)
            device_store.write_device(extent, self._device_buffer(source))
            return
        self._streams.wait(self._out, mark.event)
        with store.borrow(extent, write=True) as memory:
            if memory is not None:
                self._streams.copy(host_tensor(memory), source, self._out)
                self._streams.synchronize(self._streams.record(self._out))
                return
        self._write_staged(store, extent, source)

    def _write_staged(self, store: SpillStore, extent: Extent, source: Tensor) -> None:
        """One piece is copied while the one before it is written."""
        copying: deque[tuple[int, HostBuffer, StagingBuffer]] = deque()
        begin = 0
        try:
            while begin < len(source) or copying:
                staged = None
                if begin < len(source) and len(copying) < 2:
                    staged = self._staging.take_now() if copying else self._staging.take()
                if staged is not None:
                    piece = source[begin : begin + self._staging.nbytes]
                    # First, so that it is given back whatever happens.
                    copying.append((begin, HostBuffer(staged.host.address, len(piece), staged), staged))
                    self._copy_out(staged, piece)
                    begin += len(piece)
                else:
                    offset, written, staged = copying[0]
                    self._streams.synchronize(staged.copied)
                    store.write(extent, written, offset)
                    copying.popleft()
                    self._staging.give(staged)
        finally:
            try:
                for *_, staged in copying:
                    if staged.copied is not None:
                        self._streams.synchronize(staged.copied)
            finally:
                for *_, staged in copying:
                    self._staging.give(staged)

    def _copy_out(self, staged: StagingBuffer, piece: Tensor) -> None:
        if staged.copied is not None:
            self._streams.wait(self._out, staged.copied)
        self._streams.copy(staged.tensor[: len(piece)], piece, self._out)
        staged.copied = self._streams.record(self._out)

    def read(self, store: SpillStore, extent: Extent, span: Span, mark: object) -> tuple[Tensor, Arrival]:
        """The same ways back."""
        assert isinstance(mark, _Mark)
        origin = self.origin(span)
        whole = span.nbytes == span.storage_nbytes
        restored = self._streams.empty(
            span.storage_nbytes if whole else span.start - origin + span.nbytes, mark.stream
        )
        allocated = self._streams.record(mark.stream)
        # Another tensor on the same memory: copies into it do not count as changes of `restored`.
        target = bytes_of(restored.untyped_storage())[span.start - origin :][: span.nbytes]
        try:
            self._fill(store, extent, target, allocated)
        finally:
            copied = _Copied(self._streams, mark.stream, self._streams.record(self._in))
            weakref.finalize(restored.untyped_storage(), copied.drop).atexit = False
        return restored, copied

    def _fill(self, store: SpillStore, extent: Extent, target: Tensor, allocated: Event) -> None:
        """Have the extent's bytes in `target` when all that is queued on the stream of copies in has run."""
        device_store = store.device_store(extent)
        if device_store is not None:
            self._streams.synchronize(allocated)
            with suppress(StoreError):
                device_store.read_device(extent, self._device_buffer(target))
                return
        self._streams.wait(self._in, allocated)
        with store.borrow(extent, write=False) as memory:
            if memory is not None:
                self._streams.copy(target, host_tensor(memory), self._in)
                self._streams.synchronize(self._streams.record(self._in))
                return
        for begin in range(0, len(target), self._staging.nbytes):
            self._read_staged(store, extent, target[begin : begin + self._staging.nbytes], begin)

    def _read_staged(self, store: SpillStore, extent: Extent, piece: Tensor, offset: int) -> None:
        staged = self._staging.take()
        try:
            if staged.copied is not None:
                self._streams.synchronize(staged.copied)
            store.read(extent, HostBuffer(staged.host.address, len(piece), staged), offset)
            self._streams.copy(piece, staged.tensor[: len(piece)], self._in)
            staged.copied = self._streams.record(self._in)
        finally:
            self._staging.give(staged)

    def _device_buffer(self, memory: Tensor) -> DeviceBuffer:
        return DeviceBuffer(memory.data_ptr(), len(memory), self._streams.index, memory)

    def origin(self, span: Span) -> int:
        """Where a slice begins, aligned: no more memory is allocated than it takes."""
        return 0 if span.nbytes == span.storage_nbytes else span.start // _ALIGNMENT * _ALIGNMENT

    def passed(self, nbytes: int) -> None:
        """Nothing: torch's caching allocator reuses what is freed."""

    def trim(self) -> None:
        """Nothing, likewise."""
