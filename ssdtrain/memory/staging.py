"""A bounded ring of pinned buffers that bytes pass through between a device and a store."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ssdtrain.storage.base import HostBuffer

__all__ = ["StagingBuffer", "StagingRing", "host_tensor"]


def host_tensor(buffer: HostBuffer) -> torch.Tensor:
    """A buffer's memory as uint8. It holds the buffer's owner only as long as the buffer lives."""
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    return torch.frombuffer(memory, dtype=torch.uint8)


class StagingBuffer:
    """One of the ring's.

    Its lifetime: it belongs to whoever took it. When it is given back, a copy out of it may still be queued on a
    stream: then `copied` is the event after that copy, and whoever takes it next waits for it, on the host before
    the host writes into it, and on the device before the device does.
    """

    __slots__ = ("copied", "host", "tensor")

    def __init__(self, host: HostBuffer) -> None:
        self.host = host
        self.tensor = host_tensor(host)
        self.copied: Any = None


class StagingRing:
    """Buffers of one size, made when they are first needed, at most `count` of them.

    Args:
        allocate: Makes page-aligned host memory of so many bytes, and may raise MemoryError.
        count: How many buffers. With one for each thread that moves blocks, none waits for ever.
        nbytes: Of each. 4 MiB: a fraction of a millisecond on the bus, and full speed for an SSD. A power of two,
            for pinned memory is rounded up to one.
    """

    def __init__(self, allocate: Callable[[int], HostBuffer], count: int, nbytes: int = 4 << 20) -> None:
        self.nbytes = nbytes
        self._allocate = allocate
        self._returned = threading.Condition()  # guards the two below
        self._idle: deque[StagingBuffer] = deque()  # the one that was returned first is likeliest to be free
        self._to_make = count

    def take(self) -> StagingBuffer:
        """A buffer; waits until there is one."""
        buffer = self._take(wait=True)
        assert buffer is not None
        return buffer

    def take_now(self) -> StagingBuffer | None:
        """A buffer if one is idle or can be made. For a thread that has one: were it to wait, all might."""
        try:
            return self._take(wait=False)
        except MemoryError:
            return None

    def give(self, buffer: StagingBuffer) -> None:
        """Give a buffer back."""
        with self._returned:
            self._idle.append(buffer)
            self._returned.notify()

    def _take(self, *, wait: bool) -> StagingBuffer | None:
        with self._returned:
            while not self._idle and not self._to_make:
                if not wait:
                    return None
                self._returned.wait()
            if self._idle:
                return self._idle.popleft()
            self._to_make -= 1
        try:
            return StagingBuffer(self._allocate(self.nbytes))
        except BaseException:
            with self._returned:
                self._to_make += 1
                self._returned.notify()
            raise
