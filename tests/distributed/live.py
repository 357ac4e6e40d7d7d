"""Counts the bytes of activations that are alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch import nn

    import ssdtrain


class LiveBytes(TorchDispatchMode):
    """Of what forward computes inside it, and of what backward gets back; not of what backward computes.

    Args:
        model: Its weights are no activations.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def watch(self, offload: ssdtrain.OffloadActivations) -> None:
        """Count what the offloader restores, from when backward has it."""
        unpack = offload.unpack_hook

        def counted(packed: Any) -> torch.Tensor:
            tensor = unpack(packed)
            self._count(tensor)
            return tensor

        offload.unpack_hook = counted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if storage._cdata in self._weights or (known is not None and known.alive):
            return
        self._known[id(storage)] = weakref.finalize(storage, self._gone, storage.nbytes())
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes
