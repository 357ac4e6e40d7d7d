"""A store that fails where and how a test says."""

from __future__ import annotations

import ctypes
import errno as errno_codes
import os
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssdtrain.errors import StoreError
from ssdtrain.storage.base import Extent, HostBuffer, SpillStore
from ssdtrain.testing.wrapper import WrapperStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

__all__ = ["Fault", "FaultyStore", "InjectedDeathError"]


class InjectedDeathError(BaseException):
    """What ends the thread that meets a fault of effect "die"; nothing is to catch it but what watches threads."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and when: where all conditions that are given hold; without any, always."""

    operation: Literal["allocate", "write", "read"]
    """What fails."""

    effect: Literal["error", "short", "flip", "die"] = "error"
    """With "error", StoreError. With "short", half of the bytes are moved before that. With "flip", one bit
    is wrong and nobody says so. With "die", the thread ends, as by a bug."""

    errno: int = errno_codes.EIO
    """The number of the error."""

    index: int | None = None
    """Only the operation of this kind with this number, counted from 0."""

    when: Callable[[Extent | None, int], bool] | None = None
    """Only where this says so, of the extent (None at "allocate") and the length in bytes."""

    probability: float | None = None
    """Only this often, from 0 to 1, by the store's seed."""


class FaultyStore(WrapperStore):
    """Passes calls on, but for those that a fault hits; the first of several hits.

    Args:
        inner: The store that does the work.
        faults: What goes wrong.
        seed: Of the random choices.

    Attributes:
        faults: May be changed by the test at any time.
        injected: How many faults have happened.
    """

    def __init__(self, inner: SpillStore, *faults: Fault, seed: int = 0) -> None:
        super().__init__(inner)
        self.faults = faults
        self.injected = 0
        # Guards the counts and the random numbers.
        self._counts_lock = threading.Lock()
        self._counts = {"allocate": 0, "write": 0, "read": 0}
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret

    def allocate(self, nbytes: int) -> Extent:
        """Reserve, or fail."""
        fault = self._fault("allocate", None, nbytes)
        if fault is not None:
            raise self._error(fault, None, nbytes)
        return super().allocate(nbytes)

    def write(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Write, or fail before, half-way or in silence. The caller's memory is never changed."""
        fault = self._fault("write", extent, buffer.nbytes)
        if fault is None:
            super().write(extent, buffer, offset)
        elif fault.effect == "flip":
            super().write(extent, _with_flipped_bit(buffer), offset)
        else:
            if fault.effect == "short" and buffer.nbytes > 1:
                super().write(extent, HostBuffer(buffer.address, buffer.nbytes // 2, buffer), offset)
            raise self._error(fault, extent, buffer.nbytes)

    def read(self, extent: Extent, buffer: HostBuffer, offset: int = 0) -> None:
        """Read, or fail before, half-way or in silence."""
        fault = self._fault("read", extent, buffer.nbytes)
        if fault is None or fault.effect == "flip":
            super().read(extent, buffer, offset)
            if fault is not None:
                _flip_bit(buffer)
            return
        if fault.effect == "short":
            whole = ctypes.create_string_buffer(buffer.nbytes)
            super().read(extent, HostBuffer(ctypes.addressof(whole), buffer.nbytes, whole), offset)
            ctypes.memmove(buffer.address, whole, buffer.nbytes // 2)
        raise self._error(fault, extent, buffer.nbytes)

    def _fault(self, operation: str, extent: Extent | None, nbytes: int) -> Fault | None:
        with self._counts_lock:
            index = self._counts[operation]
            self._counts[operation] += 1
            for fault in self.faults:
                if fault.operation == operation and self._hits(fault, index, extent, nbytes):
                    self.injected += 1
                    return fault
        return None

    def _hits(self, fault: Fault, index: int, extent: Extent | None, nbytes: int) -> bool:
        return (
            (fault.index is None or fault.index == index)
            and (fault.when is None or fault.when(extent, nbytes))
            and (fault.probability is None or self._random.random() < fault.probability)
        )

    def _error(self, fault: Fault, extent: Extent | None, nbytes: int) -> StoreError | InjectedDeathError:
        where = f" at offset {extent.offset}" if extent else ""
        if fault.effect == "die":
            return InjectedDeathError(f"{fault.operation} of {nbytes} bytes{where}")
        message = f"cannot {fault.operation} {nbytes} bytes{where}: {os.strerror(fault.errno)} (injected)"
        return StoreError(fault.errno, message, self.location(extent) if extent else self.backend)


def _with_flipped_bit(buffer: HostBuffer) -> HostBuffer:
    copy = ctypes.create_string_buffer(ctypes.string_at(buffer.address, buffer.nbytes), buffer.nbytes)
    flipped = HostBuffer(ctypes.addressof(copy), buffer.nbytes, copy)
    _flip_bit(flipped)
    return flipped


def _flip_bit(buffer: HostBuffer) -> None:
    buffer.view()[buffer.nbytes // 2] ^= 0x10
