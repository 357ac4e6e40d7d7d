"""`parallel: ddp | fsdp`: the same training loop in every rank that torchrun starts."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ssdtrain.launch.config import Parallel

__all__ = ["Ranks", "check_parallel", "first_rank_first", "join", "mean_over_ranks", "ranks_started", "wrap"]


class Ranks(NamedTuple):
    """Which process this is, of how many."""

    rank: int
    ranks: int


def ranks_started() -> Ranks | None:
    """What torchrun has told this process; None without it."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return Ranks(int(rank), int(ranks)) if rank.isdecimal() and ranks.isdecimal() else None


def check_parallel(parallel: Parallel, *, compare: bool) -> None:
    """Refuse what cannot be meant.

    Raises:
        ConfigError: Ranks were asked for and none were started, or the other way round.
    """
    started = ranks_started()
    if parallel != "none" and compare:
        raise ConfigError(
            f"parallel: --compare runs one process after the other, and {parallel} needs several at once; "
            "run each --mode under torchrun"
        )
    # Schedulers set some of torchrun's variables as well; a process group needs all of them.
    can_meet = "MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT", "").isdecimal()
    if parallel != "none" and (started is None or not can_meet):
        raise ConfigError(
            f"parallel: {parallel} is for ranks that torchrun starts, and it did not start this process; "
            "use torchrun --nproc-per-node N -m ssdtrain train ..., or parallel: none"
        )
    if parallel == "none" and started is not None and started.ranks > 1:
        raise ConfigError(
            f"parallel: none in one of {started.ranks} ranks would train the same model {started.ranks} times; "
            "choose ddp or fsdp"
        )


@contextlib.contextmanager
def join(parallel: Parallel) -> Iterator[Ranks]:
    """The process group, as long as the run lasts; one rank without any group for "none".

    What was wrapped in it must be gone before: DDP's reducer would let go of the group with the GIL held, and gloo's
    destructor waits for a thread that may be waiting for the GIL.
    """
    if parallel == "none":
        yield Ranks(0, 1)
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        gc.collect()  # wrapped models are parts of cycles
        distributed.destroy_process_group()


def wrap(model: nn.Module, parallel: Parallel) -> nn.Module:
    """The model as torch's DDP, or with its layers sharded by FSDP2."""
    from torch import nn

    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer)
        fully_shard(model)
    return model


@contextlib.contextmanager
def first_rank_first(ranks: Ranks) -> Iterator[None]:
    """The first rank does the work inside, the others then find it done."""
    from torch import distributed

    if ranks.rank > 0:
        distributed.barrier()
    yield
    if ranks.rank == 0 and ranks.ranks > 1:
        distributed.barrier()


def mean_over_ranks(value: float, ranks: Ranks) -> float:
    """The same number in every rank."""
    if ranks.ranks == 1:
        return value
    import torch

    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item() / ranks.ranks
