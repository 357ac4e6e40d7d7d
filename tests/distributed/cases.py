"""What runs on every rank, under torchrun: one training with and one without the offloader, for each case.

    torchrun --standalone --nproc-per-node 2 -m tests.distributed.cases OUTPUT NAME...

Each rank writes what it saw into OUTPUT, as JSON: the test process judges.
"""

import gc
import json
import sys
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ssdtrain
from ssdtrain.storage import DirectStore
from ssdtrain.testing import GatedStore, OffloadOver

WIDTH, HIDDEN, LAYERS, BATCH = 64, 256, 4, 128


class Layer(nn.Module):
    """A feed-forward block: saves its input, and twice its hidden activation."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


# Bytes that autograd saves of activations: the inputs of up, gelu and down of each layer, and the output.
ACTIVATIONS = 4 * BATCH * (LAYERS * (WIDTH + 2 * HIDDEN) + WIDTH)


def model(layers=LAYERS, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer() for _ in range(layers)])


def offloader(module, **options):
    return ssdtrain.OffloadActivations(module, **{"min_tensor_bytes": 1, **options})


def weights(module):
    return [getattr(weight, "_local_tensor", weight).detach().clone() for weight in module.parameters()]


def train(module, offload=None, *, steps=20, accumulate=1, unsynchronised=nullcontext, settle_every=2):
    """Losses, then weights. In every so many steps, all stores have ended before backward begins."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            torch.manual_seed(1000 * step + 10 * part + dist.get_rank())
            x = torch.randn(BATCH, WIDTH)
            with unsynchronised() if part + 1 < accumulate else nullcontext():
                with offload or nullcontext():
                    loss = module(x).square().mean()
                if offload is not None and step % settle_every == 0:
                    offload.synchronize()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *weights(module)]


def same_bits(some, others):
    return len(some) == len(others) and all(
        torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )


def compared(build, **options):
    """Train twice; what the offloader did the second time."""
    plain = train(build(), **options)
    module = build()
    offload = offloader(module)
    offloaded = train(module, offload, **options)
    stats = offload.stats
    offload.close()
    return {
        "equal": same_bits(plain, offloaded),
        "written": stats.bytes_written,
        "forwarded": stats.blocks_forwarded,
        "exempt": stats.tensors_exempt,
        "live": stats.live_blocks,
    }


def sharded(*, reshard, policy=None):
    """FSDP2."""
    module = model()
    options = {} if policy is None else {"mp_policy": policy}
    for layer in module:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    return fully_shard(module, reshard_after_forward=reshard, **options)


def fsdp2(reshard):
    return compared(partial(sharded, reshard=reshard), settle_every=1) | {"gathered": gathered_bytes(reshard)}


def gathered_bytes(reshard):
    """Of gathered weights that are in memory between forward and backward, plain and with the offloader."""
    held = []
    for offloading in (False, True):
        module = sharded(reshard=reshard)
        offload = offloader(module) if offloading else None
        seen = {}

        def see(tensor, seen=seen):
            if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
                storage = tensor.untyped_storage()
                seen[storage._cdata] = weakref.ref(storage)
            return tensor

        with watching(offload, see) as context, context:
            loss = module(torch.ones(BATCH, WIDTH)).square().mean()
        storages = [ref() for ref in seen.values()]
        held.append(sum(storage.nbytes() for storage in storages if storage is not None))
        assert storages
        loss.backward()
        if offload is not None:
            offload.close()
    return held


@contextmanager
def watching(offload, see):
    """The context of a forward pass whose saved tensors are shown to `see`."""
    if offload is None:
        yield saved_tensors_hooks(see, lambda tensor: tensor)
    else:
        pack = offload.pack_hook
        offload.pack_hook = lambda tensor: pack(see(tensor))
        yield offload
        offload.pack_hook = pack


def fsdp2_while_writing(spill_dir="/var/tmp"):
    """Weights are freed and gathered again while every write is under way."""
    plain = train(sharded(reshard=True), steps=3)
    module = sharded(reshard=True)
    store = GatedStore(DirectStore(spill_dir), hold=("write",))
    offload = OffloadOver(store, module, min_tensor_bytes=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH)
        with offload:
            loss = module(x).square().mean()
        store.wait_for("write")
        if step == 0:
            loss.backward()  # the weights are gathered, used and freed; the write waits all the while
            store.open("write")
        else:
            store.open("write")
            offload.synchronize()
            loss.backward()
        store.hold("write")
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    store.open("write")
    stats = offload.stats
    offload.close()
    return {
        "equal": same_bits(plain, [*losses, *weights(module)]),
        "written": stats.bytes_written,
        "failures": stats.store_failures,
    }


def fsdp2_bfloat16():
    return compared(partial(sharded, reshard=True, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


def fsdp1(*, orig):
    def build():
        module = model()
        shard = partial(FullyShardedDataParallel, use_orig_params=orig, device_id=torch.device("cpu"))
        return shard(nn.Sequential(*[shard(layer) for layer in module]))

    return compared(build)


class Branches(nn.Module):
    """Uses one of two layers, by turns."""

    def __init__(self):
        super().__init__()
        self.layers, self.turn = model(2), 0

    def forward(self, x):
        self.turn += 1
        return self.layers[self.turn % 2](x)


def ddp(build=model, **options):
    return compared(lambda: DistributedDataParallel(build(), bucket_cap_mb=0.05, **options))


def ddp_accumulating():
    """`no_sync` is a method of the module that is trained: both trainings have one of their own."""
    made = []

    def build():
        made.append(DistributedDataParallel(model(), bucket_cap_mb=0.05))
        return made[-1]

    def unsynchronised():
        return made[-1].no_sync()

    return compared(build, accumulate=3, unsynchronised=unsynchronised)


def tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build():
        module = model()
        for layer in module:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module

    return compared(build)


# Pipelining.

MICRO_BATCHES = 4
STAGE_LAYERS = 4


class LiveBytes:
    """Bytes of activations that autograd has saved and that are in memory, and their peak."""

    def __init__(self):
        self.now = self.peak = 0
        self._seen = weakref.WeakKeyDictionary()

    def see(self, tensor):
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not is_weight and storage not in self._seen:
            self._seen[storage] = None
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return tensor

    def _gone(self, nbytes):
        self.now -= nbytes


class Watched(nn.Module):
    """A stage whose forward pass is in a context of its own."""

    def __init__(self, stage, offload, live):
        super().__init__()
        self.stage, self.live = stage, live
        if offload is None:
            self.context = saved_tensors_hooks(live.see, lambda tensor: tensor)
        else:
            pack, unpack = offload.pack_hook, offload.unpack_hook
            offload.pack_hook = lambda tensor: pack(live.see(tensor))
            offload.unpack_hook = lambda packed: live.see(unpack(packed))
            self.context = offload

    def forward(self, x):
        with self.context:
            return self.stage(x)


SCHEDULES = {
    "gpipe": lambda stages, **options: ScheduleGPipe(stages[0], MICRO_BATCHES, **options),
    "1f1b": lambda stages, **options: Schedule1F1B(stages[0], MICRO_BATCHES, **options),
    "interleaved": lambda stages, **options: ScheduleInterleaved1F1B(stages, MICRO_BATCHES, **options),
}


def pipeline(kind, offloading, batch=2048):
    """Gradients of three steps, the peak of live bytes, and the offloader's statistics."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = 2 * world if kind == "interleaved" else world
    mine = range(rank, count, world)
    modules = [model(STAGE_LAYERS, seed=index) for index in mine]
    block = 4 * (batch // MICRO_BATCHES) * HIDDEN
    offload = live = None
    if offloading:
        offload = offloader(
            nn.ModuleList(modules),
            store_queue_bytes=block,
            prefetch_bytes=block,
            on_full_queue="wait",
        )
    live = LiveBytes()
    watched = [Watched(modules[0], offload, live)]
    for module in modules[1:]:
        watched.append(Watched(module, None, live))
        watched[-1].context = watched[0].context
    stages = [
        PipelineStage(stage, index, count, torch.device("cpu"))
        for stage, index in zip(watched, mine, strict=True)
    ]
    schedule = SCHEDULES[kind](stages, loss_fn=lambda output, target: (output - target).square().mean())
    gradients = []
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
        last = {"target": target, "losses": []} if count - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **last)
        gradients += [weight.grad.clone() for module in modules for weight in module.parameters()]
        for module in modules:
            module.zero_grad()
    stats = offload.stats if offload is not None else None
    if offload is not None:
        offload.close()
    return gradients, live.peak, stats


def pipelined(kind):
    plain, peak, _ = pipeline(kind, offloading=False)
    offloaded, offloaded_peak, stats = pipeline(kind, offloading=True)
    return {
        "equal": same_bits(plain, offloaded),
        "peak": [peak, offloaded_peak],
        "written": stats.bytes_written,
        "hits": stats.prefetch_hits,
        "misses": stats.prefetch_misses,
    }


CASES = {
    "fsdp2 resharded": partial(fsdp2, True),
    "fsdp2 kept": partial(fsdp2, False),
    "fsdp2 resharded to 2": partial(fsdp2, 2),
    "fsdp2 while writing": fsdp2_while_writing,
    "fsdp2 bfloat16": fsdp2_bfloat16,
    "fsdp1": partial(fsdp1, orig=False),
    "fsdp1 original parameters": partial(fsdp1, orig=True),
    "ddp": ddp,
    "ddp accumulating": ddp_accumulating,
    "ddp unused parameters": partial(ddp, Branches, find_unused_parameters=True),
    "ddp static graph": partial(ddp, static_graph=True),
    "tensor parallel": tensor_parallel,
    "gpipe": partial(pipelined, "gpipe"),
    "1f1b": partial(pipelined, "1f1b"),
    "interleaved": partial(pipelined, "interleaved"),
}


def main(output, names):
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    results = {}
    for name in names:
        results[name] = CASES[name]()
        gc.collect()
        dist.barrier()
    Path(output, f"{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
