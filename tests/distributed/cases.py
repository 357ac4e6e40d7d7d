"""What each rank does: train a small model with and without offloading, and tell what came of it."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from ssdtrain.saved import ModelStorages
from ssdtrain.storage import DirectStore
from ssdtrain.testing import GatedStore, OffloadOver
from tests.distributed.live import LiveBytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64
ROWS = 96  # a size that no weight has
LAYERS = 3


class Run(NamedTuple):
    """One training run of one rank."""

    losses: list[float]
    weights: list[torch.Tensor]
    bytes_written: list[int]
    hits: int = 0
    misses: int = 0


class Layer(nn.Module):
    """A feed-forward layer, whose parts have the names that tensor parallelism is told of."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Unused(Layer):
    """Has a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


def layers(layer: Callable[[], nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(LAYERS)))


def offloader(model: nn.Module | None, folder: Path, **options: Any) -> ssdtrain.OffloadActivations:
    defaults = {"min_tensor_bytes": "4KiB", "min_free_bytes": 0, "on_full_queue": "wait"}
    return ssdtrain.OffloadActivations(model, spill_dir=folder, **(defaults | options))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def loop(
    wrap: Callable[[nn.Module], nn.Module],
    folder: Path,
    *,
    offloading: bool,
    steps: int = 3,
    accumulate: int = 1,
    layer: Callable[[], nn.Module] = Layer,
    in_bfloat16: bool = False,
    know_model: bool = True,
) -> Run:
    model = wrap(layers(layer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = offloader(model if know_model else None, folder) if offloading else None
    losses, written = [], []
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for number in range(accumulate):
            batch = torch.randn(ROWS, WIDTH, generator=data)
            more = number + 1 < accumulate
            with model.no_sync() if more else nullcontext():
                with offload or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
                    loss = model(batch).float().square().mean()
                if offload:
                    offload.synchronize()  # all that is offloaded is written, so that the bytes are always the same
                    written.append(offload.stats.bytes_written - sum(written))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [whole(weight) for weight in model.parameters()]
    if offload:
        offload.close()
    return Run(losses, weights, written)


def both(wrap: Callable[[nn.Module], nn.Module], folder: Path, **options: Any) -> tuple[Run, Run, Run]:
    """Without offloading, with it, and with it on one process alone."""
    alone = {name: value for name, value in options.items() if name in {"layer", "in_bfloat16"}}
    return (
        loop(wrap, folder, offloading=False, **options),
        loop(wrap, folder, offloading=True, **options),
        loop(lambda model: model, folder, offloading=True, steps=1, **alone),
    )


def fsdp2(folder: Path, reshard: bool | int, policy: MixedPrecisionPolicy | None, know_model: bool) -> Any:
    def wrap(model: nn.Sequential) -> nn.Module:
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy or MixedPrecisionPolicy())
        return fully_shard(model, reshard_after_forward=reshard, mp_policy=policy or MixedPrecisionPolicy())

    return both(wrap, folder, steps=20, know_model=know_model)


def fsdp2_unrecognised(folder: Path) -> tuple[Run, Run]:
    """The counterproof: gathered weights are taken for activations."""
    alone = loop(lambda model: model, folder, offloading=True, steps=1)
    with patch.object(ModelStorages, "owns", return_value=False):
        return loop(fully_shard, folder, offloading=True, steps=1), alone


def fsdp2_over_tensor_parallel(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def wrap(model: nn.Sequential) -> nn.Module:
        for layer in model:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    return both(wrap, folder)


def fsdp1(folder: Path, use_orig_params: bool, know_model: bool) -> Any:
    def wrap(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    return both(wrap, folder, steps=5, know_model=know_model)


def ddp(folder: Path, way: str) -> Any:
    options: dict[str, Any] = {
        "buckets": {"bucket_cap_mb": 0.03},
        "no_sync": {},
        "unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "bfloat16": {},
    }[way]
    return both(
        partial(DistributedDataParallel, **options),
        folder,
        accumulate=3 if way == "no_sync" else 1,
        layer=Unused if way == "unused" else Layer,
        in_bfloat16=way == "bfloat16",
    )


def tensor_parallel(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def wrap(model: nn.Sequential) -> nn.Module:
        for layer in model:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    return both(wrap, folder)


def one_fails(folder: Path) -> float:
    """The last rank meets a broken read in backward; the others are in a collective with it."""
    model = fully_shard(layers())
    offload = offloader(model, folder)
    with offload:
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
    offload.synchronize()
    if dist.get_rank() == dist.get_world_size() - 1:
        offload.close()  # what was on disk is lost
    loss.backward()
    return loss.item()


def dies_in(_folder: Path, folder: Path) -> None:
    """Die as the kernel kills: with blocks on disk and nothing closed."""
    offload = offloader(None, folder)
    with offload:
        loss = layers()(torch.randn(ROWS, WIDTH)).square().mean()
    offload.synchronize()
    assert offload.stats.live_bytes_on_disk > 0
    assert loss.requires_grad
    os.kill(os.getpid(), signal.SIGKILL)


def resized_under_write(folder: Path) -> tuple[int, bool]:
    """A storage is emptied and refilled with other bytes, as FSDP does, while its write is under way."""
    offload = offloader(None, folder)
    began, resized = threading.Event(), threading.Event()
    write = DirectStore.write

    def slow_write(*arguments: Any) -> None:
        began.set()
        assert resized.wait(30)
        write(*arguments)

    weight = torch.ones(ROWS, ROWS)
    x = torch.ones(ROWS, ROWS, requires_grad=True)
    memory = weight.untyped_storage()
    nbytes = memory.nbytes()
    with patch.object(DirectStore, "write", slow_write), warnings.catch_warnings(action="ignore"):
        with offload:
            y = x * weight
        assert began.wait(30)
        memory.resize_(0)
        taken = torch.full((ROWS, ROWS), 7.0)  # the memory that was freed, so that it comes back elsewhere
        memory.resize_(nbytes)
        with torch.autograd._unsafe_preserve_version_counter(weight):
            weight.fill_(1)
        resized.set()
        offload.synchronize()
        written = offload.stats.blocks_offloaded
        del taken
        y.sum().backward()
    offload.close()
    return written, torch.equal(x.grad, torch.ones(ROWS, ROWS))


SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}
MICRO_BATCHES = 4


BUDGET = 2 << 20  # of the store queue, and of reading ahead


class PipelineRun(NamedTuple):
    """One training run of one rank's stages."""

    gradients: list[torch.Tensor]
    bytes_written: int
    peak: int
    """Most bytes of activations alive in the last step, what is read ahead included."""
    hits: int
    misses: int
    """Both of the last step."""


def pipeline(folder: Path, name: str) -> list[PipelineRun]:
    """Without offloading, with it around each forward, and with it around each step."""
    return [_pipeline(folder, name, around) for around in (None, "forward", "step")]


def _pipeline(folder: Path, name: str, around: str | None, width: int = 256, rows: int = 512) -> PipelineRun:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = 2 if name == "interleaved" else 1
    torch.manual_seed(rank)
    modules = [nn.Sequential(*(Layer(width) for _ in range(8 // chunks))) for _ in range(chunks)]
    model = nn.ModuleList(modules)
    offload = offloader(model, folder, store_queue_bytes=BUDGET, prefetch_bytes=BUDGET) if around else None
    live = LiveBytes(model)
    if offload:
        live.watch(offload)
    if offload and around == "forward":
        for module in modules:
            module.register_forward_pre_hook(lambda *_: offload.__enter__() and None)
            module.register_forward_hook(lambda *_: offload.__exit__(None, None, None), always_call=True)
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(module, rank + chunk * ranks, ranks * chunks, device)
        for chunk, module in enumerate(modules)
    ]
    schedule = SCHEDULES[name](
        stages if chunks > 1 else stages[0],
        MICRO_BATCHES,
        loss_fn=lambda out, _target: out.square().mean(),
        scale_grads=False,  # would count as activations
    )
    data = torch.Generator().manual_seed(5)
    before = ssdtrain.OffloadStats()
    for _ in range(2):
        batch = torch.randn(rows * MICRO_BATCHES, width, generator=data)
        live.peak = 0
        before = offload.stats if offload else before
        with offload if offload and around == "step" else nullcontext(), live:
            inputs = (batch,) if rank == 0 else ()
            schedule.step(*inputs, **({"target": batch} if rank == ranks - 1 else {}))
    after = offload.stats if offload else before
    if offload:
        offload.close()
    return PipelineRun(
        [weight.grad.clone() for weight in model.parameters()],
        after.bytes_written,
        live.peak + (BUDGET if offload else 0),
        after.prefetch_hits - before.prefetch_hits,
        after.prefetch_misses - before.prefetch_misses,
    )


def fsdp2_while_writing(folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Gradients without and with offloading, where no write ends before FSDP has freed and refilled its weights."""

    def gradients(offload: ssdtrain.OffloadActivations | None) -> list[torch.Tensor]:
        model = layers()
        for layer in (*model, model):
            fully_shard(layer, reshard_after_forward=True)
        with offload or nullcontext():
            loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        loss.backward()
        return [whole(weight.grad) for weight in model.parameters()]

    plain = gradients(None)
    store = GatedStore(DirectStore(folder), hold=("write",))
    offload = OffloadOver(store, min_tensor_bytes="4KiB")
    offloaded = gradients(offload)
    store.open("write")
    offload.synchronize()
    failures = offload.stats.store_failures
    offload.close()
    return plain, offloaded, failures


def fsdp2_gathered(folder: Path, reshard: bool) -> list[int]:
    """Bytes of gathered weights in memory between forward and backward, without an offloader and with one."""
    held = []
    for offloading in (False, True):
        model = layers()
        for layer in (*model, model):
            fully_shard(layer, reshard_after_forward=reshard)
        offload = offloader(model, folder) if offloading else None
        weights: dict[int, weakref.ref[torch.UntypedStorage]] = {}

        def see(tensor: torch.Tensor, weights: dict[int, Any] = weights) -> torch.Tensor:
            if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
                storage = tensor.untyped_storage()
                weights[storage._cdata] = weakref.ref(storage)
            return tensor

        if offload is None:
            context: Any = saved_tensors_hooks(see, lambda tensor: tensor)
        else:
            pack = offload.pack_hook
            context, offload.pack_hook = offload, lambda tensor, pack=pack, see=see: pack(see(tensor))
        with context:
            loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        assert weights
        held.append(sum(storage.nbytes() for ref in weights.values() if (storage := ref()) is not None))
        loss.backward()
        if offload is not None:
            offload.close()
    return held
