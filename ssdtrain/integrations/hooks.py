"""Offloading around the forward passes of a module that somebody else calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ssdtrain import OffloadActivations

__all__ = ["ForwardHooks"]


class _Thread(threading.local):
    """The forward passes that this thread is in, innermost last: the context of each, None where it has none."""

    def __init__(self) -> None:
        self.entered: list[OffloadActivations | None] = []


class ForwardHooks:
    """Enters an offloader before each training forward pass of a module, and leaves it after, also if that raises.

    A pass counts as training if the module is in training mode and gradients are enabled: evaluation, prediction and
    reference models save nothing. Passes may nest, and threads may run their own.

    torch runs `always_call` hooks for every `Exception`, but not for `KeyboardInterrupt`: what that leaves entered is
    left in `remove`.
    """

    def __init__(self) -> None:
        self._offload: OffloadActivations | None = None
        self._handles: list[RemovableHandle] = []
        self._thread = _Thread()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        # A copy of the module takes its hooks along, and has to do without threads and files: its hooks do nothing.
        return type(self), ()

    def install(self, module: nn.Module, offload: OffloadActivations) -> None:
        """Begin with the next forward pass."""
        assert not self._handles, "an earlier installation has not been removed"
        self._offload = offload
        # First of all hooks, so that an error in another one finds this one entered, as `_after` expects. But inside
        # those of a training that raised and is still referred to, so that this offloader sees the saved tensors.
        inside = any(
            isinstance(getattr(hook, "__self__", None), ForwardHooks)
            for hook in module._forward_pre_hooks.values()
        )
        before = module.register_forward_pre_hook(self._before, prepend=not inside)
        after = module.register_forward_hook(self._after, prepend=inside, always_call=True)
        self._handles = [before, after]

    def remove(self) -> None:
        """End. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._offload = None
        while self._thread.entered:
            self._leave()

    # Dynamo would trace into hooks, and has no notion of a context that a hook leaves open. It calls these as they
    # are, between graphs; what a graph saves is packed when it runs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, _arguments: Any) -> None:
        entered = self._thread.entered
        # Before anything that may raise: `_after` is called then, too.
        entered.append(None)
        if self._offload is not None and module.training and torch.is_grad_enabled():
            entered[-1] = self._offload.__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        # Nothing is entered if somebody's global hook raised before `_before`.
        if self._thread.entered:
            self._leave()

    def _leave(self) -> None:
        offload = self._thread.entered.pop()
        if offload is not None:
            offload.__exit__(None, None, None)
