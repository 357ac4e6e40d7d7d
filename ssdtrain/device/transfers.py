"""Which device is served how."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from ssdtrain.config import in_bytes
from ssdtrain.device.accelerator import AcceleratorTransfer
from ssdtrain.device.cpu import CpuTransfer
from ssdtrain.device.streams import TorchStreams
from ssdtrain.memory.heap import HeapTrimmer
from ssdtrain.memory.pinned import PinnedMemory
from ssdtrain.memory.pool import BufferPool
from ssdtrain.memory.staging import StagingRing

if TYPE_CHECKING:
    from ssdtrain.config import OffloadConfig
    from ssdtrain.device.base import Transfer

__all__ = ["Transfers"]

# Address space of the arena for restored CPU memory, in prefetch windows: what is read ahead, what backward works on,
# and as much again for the gaps between ranges of different sizes. What does not fit has mappings of its own.
_ARENA_WINDOWS = 4


class Transfers:
    """The transfer of each device, made when its first tensor is packed.

    Args:
        config: Budgets.
        threads: That move blocks: the store's, and those that run backward.

    Raises:
        ConfigError: The budgets do not fit into the address space.
    """

    def __init__(self, config: OffloadConfig, threads: int) -> None:
        self._cpu = CpuTransfer(
            BufferPool(_ARENA_WINDOWS * in_bytes(config.prefetch_bytes)),
            # What is held in vain is then no more than what waits for the disk.
            HeapTrimmer(every=in_bytes(config.store_queue_bytes)),
        )
        # Two for each thread: it copies one while it writes the other.
        self._staging = StagingRing(PinnedMemory().allocate, count=2 * threads)
        self._of_device: dict[torch.device, Transfer | None] = {}

    def of(self, device: torch.device) -> Transfer | None:
        """How a device's tensors are moved; None, after a warning, where they cannot be."""
        try:
            return self._of_device[device]
        except KeyError:
            # Two threads may both make one: each is right, and one is kept.
            return self._of_device.setdefault(device, self._make(device))

    def _make(self, device: torch.device) -> Transfer | None:
        if device.type == "cpu":
            return self._cpu
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == device.type:
            return AcceleratorTransfer(TorchStreams(device), self._staging)
        known = "the CPU" if accelerator is None else f"the CPU and {accelerator.type!r}"
        warnings.warn(
            f"ssdtrain keeps activations on {str(device)!r} where they are: it offloads tensors of {known}",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
