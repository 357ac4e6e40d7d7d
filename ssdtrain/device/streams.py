"""Streams, events and memory of an accelerator: what moving blocks needs of them, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Streams", "TorchStreams", "bytes_of"]

# Opaque: `torch.Stream` and `torch.Event`, or what a simulated device has instead.
Stream = Any
Event = Any


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A storage as uint8, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Streams(ABC):
    """One device. Every method may be called from any thread, and only `synchronize` waits."""

    @property
    @abstractmethod
    def index(self) -> int:
        """The device's number among those of its kind."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream that the calling thread computes on."""

    @abstractmethod
    def side(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that is reached when all that is queued on a stream now has run."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on a stream from now on runs after an event."""

    @abstractmethod
    def reached(self, event: Event) -> bool:
        """Whether an event is reached."""

    @abstractmethod
    def synchronize(self, event: Event) -> None:
        """Return when an event is reached."""

    @abstractmethod
    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Queue a copy between host and device, uint8. Nothing holds the memory for it."""

    @abstractmethod
    def empty(self, nbytes: int, stream: Stream) -> Tensor:
        """Memory for what is queued on a stream from now on, uint8.

        It may be memory that was freed a moment ago and that earlier work of the same stream is yet to use.

        Raises:
            torch.OutOfMemoryError: The device has no more.
        """

    @abstractmethod
    def record_use(self, tensor: Tensor, stream: Stream) -> None:
        """When a tensor's memory is freed, do not reuse it before what is queued on a stream then has run."""


class TorchStreams(Streams):
    """Those of a device that torch knows as an accelerator: CUDA, ROCm, XPU, or a backend of somebody else.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self._device = device

    @property
    def index(self) -> int:
        """The device's index."""
        return int(self._device.index)

    def current(self) -> Stream:
        """Of the calling thread."""
        return torch.accelerator.current_stream(self._device)

    def side(self) -> Stream:
        """From torch's pool of streams."""
        return torch.Stream(self._device)

    def record(self, stream: Stream) -> Event:
        """A `torch.Event`."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """On the device; the host goes on."""
        stream.wait_event(event)

    def reached(self, event: Event) -> bool:
        """Without waiting."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Without the GIL."""
        event.synchronize()

    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        """Asynchronous where the host's memory is pinned."""
        with stream:
            to.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, stream: Stream) -> Tensor:
        """From the part of torch's caching allocator that belongs to the stream."""
        with stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def record_use(self, tensor: Tensor, stream: Stream) -> None:
        """`Tensor.record_stream`: nothing where the memory belongs to that stream."""
        if tensor.is_conj() or tensor.is_neg():
            # torch hands such a view to the allocator as a copy, and corrupts the heap when that returns nothing.
            tensor = bytes_of(tensor.untyped_storage())
        tensor.record_stream(stream)
