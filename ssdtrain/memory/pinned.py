"""Host memory that a device copies from and to by itself."""

from __future__ import annotations

import warnings

import torch

from ssdtrain.storage.base import PAGE, HostBuffer
from ssdtrain.storage.bounce import page_aligned

__all__ = ["PinnedMemory", "pinned_bytes"]


def pinned_bytes(nbytes: int) -> int:
    """What so many bytes take: torch's allocator of pinned memory rounds up to powers of two."""
    return 1 << max(0, nbytes - 1).bit_length()


class PinnedMemory:
    """Page-aligned host memory, pinned where that works. The first refusal warns, and the rest is pageable."""

    def __init__(self) -> None:
        self.pinned = torch.accelerator.is_available()

    def allocate(self, nbytes: int) -> HostBuffer:
        """Memory that goes back when the last reference to the buffer goes.

        Args:
            nbytes: Its length; a power of two wastes nothing.

        Raises:
            MemoryError: There is none, pinned or not.
        """
        if self.pinned:
            try:
                # Named, because under `torch.device(...)` as a context tensors are made elsewhere.
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                warnings.warn(
                    f"ssdtrain cannot pin {nbytes} bytes of host memory ({error}); it uses pageable memory, with "
                    "which copies to and from the device are slower. The limit on locked memory is `ulimit -l`",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                if tensor.data_ptr() % PAGE == 0:
                    return HostBuffer(tensor.data_ptr(), nbytes, tensor)
        try:
            return page_aligned(nbytes)
        except OSError as error:
            raise MemoryError(f"no host memory for {nbytes} bytes: {error}") from error
