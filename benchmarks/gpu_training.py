"""The ways to hold activations, the gradients with each, and what a step costs; for scripts/gpu_check."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from gpu_models import batch_of, model_of
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import ssdtrain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpu_models import Size

__all__ = [
    "MODES",
    "Costs",
    "Load",
    "gradients",
    "holding",
    "measure",
    "same_bits",
    "step",
    "synchronize",
]

MODES = ("keep", "recompute", "save_on_cpu", "TRL", "ssdtrain host", "ssdtrain SSD", "ssdtrain both")

# With deterministic backwards, unlike the memory-efficient one. Math is for float32.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Load:
    """A thread that multiplies matrices on a stream of its own, as long as the context lasts.

    Args:
        device: Where; on the CPU it does nothing.
        width: Of the matrices.
    """

    def __init__(self, device: torch.device, width: int = 2048) -> None:
        self._device = device
        self._width = width
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.products = 0

    def __enter__(self) -> Self:
        if self._device.type != "cpu":
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type != "cpu":
            self._stop.set()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            stream = torch.Stream(self._device)
            with stream:
                a = torch.randn(self._width, self._width, device=self._device, dtype=torch.bfloat16)
                while not self._stop.is_set():
                    for _ in range(8):
                        a = (a @ a).clamp_(-1, 1)
                        self.products += 1
                    # Not ahead of the device for ever.
                    stream.synchronize()
        except Exception as error:  # noqa: BLE001 - raised by the thread that leaves the context
            self._error = error


def gradients(
    kind: str,
    size: Size,
    device: torch.device,
    options: dict[str, Any] | None = None,
    *,
    autocast: bool = False,
) -> tuple[list[Tensor], ssdtrain.OffloadStats | None]:
    """Losses and gradients of two steps of SGD, and the offloader's counters.

    Args:
        kind: One of `KINDS`.
        size: Of the model.
        device: Where.
        options: Of the offloader; None: plain torch.
        autocast: Whether the forward pass runs under autocast to bfloat16.
    """
    torch.manual_seed(0)
    model = model_of(kind, size, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    offload = None if options is None else ssdtrain.OffloadActivations(model, **options)
    results: list[Tensor] = []
    with contextlib.closing(offload) if offload is not None else nullcontext(), sdpa_kernel(ATTENTION):
        # The first step reads everything back; the second races with its writes, and reads ahead.
        for number in range(2):
            ids = batch_of(size, device, number)
            with offload or nullcontext(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            if offload is not None and number == 0:
                offload.synchronize()
            loss.backward()
            results += [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()  # to None: the gradients are ours
        return results, offload.stats if offload is not None else None


def same_bits(got: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether all bits are the same, those of a NaN too."""
    return len(got) == len(wanted) and all(
        one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        for one, other in zip(got, wanted, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextmanager
def holding(
    mode: str, model: Any, options: dict[str, Any]
) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Set a mode up; what is yielded makes the context of each forward pass.

    Args:
        mode: One of `MODES`.
        model: From `model_of`.
        options: Of the offloader, if it is one of ssdtrain's.
    """
    if mode == "keep":
        yield nullcontext
    elif mode == "recompute":
        _checkpoint(model, on=True)
        try:
            yield nullcontext
        finally:
            _checkpoint(model, on=False)
    elif mode == "save_on_cpu":
        yield partial(save_on_cpu, pin_memory=True)
    elif mode == "TRL":
        from trl.models.activation_offloading import OffloadActivations as TrlOffload

        trl = TrlOffload()
        trl.update_model_params(model)
        yield lambda: trl
    else:
        with contextlib.closing(ssdtrain.OffloadActivations(model, **options)) as offload:
            yield lambda: offload


def _checkpoint(model: Any, *, on: bool) -> None:
    # Renamed in the course of transformers 5; the old names warn there.
    new = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    if on:
        getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
    else:
        getattr(model, f"{name}_disable")()


def synchronize(device: torch.device) -> None:
    """Return when the device has computed what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def step(model: Any, ids: Tensor, make_context: Callable[[], AbstractContextManager[Any]]) -> float:
    """Forward and backward; the gradients stay allocated, as zeros. Returns the loss."""
    with sdpa_kernel(ATTENTION):
        with make_context():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    value = float(loss.detach())
    model.zero_grad(set_to_none=False)
    return value


@dataclass
class Costs:
    """What the steps of one mode cost, over all rounds. Bytes are the most of any step."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    """Allocated, above what was allocated before the step."""
    allocated: int = 0
    reserved: int = 0
    losses: set[float] = field(default_factory=set)
    stats: ssdtrain.OffloadStats | None = None

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


def measure(
    costs: Costs, model: Any, ids: Tensor, make_context: Callable[[], AbstractContextManager[Any]], steps: int
) -> None:
    """One step to warm up, then some that count."""
    on_device = ids.device.type != "cpu"
    for number in range(steps + 1):
        synchronize(ids.device)
        before = 0
        if on_device:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
        began = time.perf_counter()
        loss = step(model, ids, make_context)
        synchronize(ids.device)
        seconds = time.perf_counter() - began
        if number == 0:
            continue
        costs.seconds.append(seconds)
        costs.losses.add(loss)
        if on_device:
            allocated = torch.accelerator.max_memory_allocated()
            costs.peak = max(costs.peak, allocated - before)
            costs.allocated = max(costs.allocated, allocated)
            costs.reserved = max(costs.reserved, torch.accelerator.max_memory_reserved())
    context = make_context()
    if isinstance(context, ssdtrain.OffloadActivations):
        costs.stats = context.stats
