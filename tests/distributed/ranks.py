"""Runs a function in several processes that can talk to each other, and never hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import traceback
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS = 90

# torch and this package are imported once, and each rank is forked from there.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.pipelining", "tests.distributed.cases"])


def run_ranks(function: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2) -> list[Any]:
    """What `function(folder, *arguments)` returns in each rank of a gloo group; an error of any rank is raised."""
    made = [
        _CONTEXT.Process(target=_rank, args=(function, folder, rank, ranks, arguments))
        for rank in range(ranks)
    ]
    for process in made:
        process.start()
    for process in made:
        process.join(SECONDS + 10)
        if process.is_alive():
            process.kill()
            process.join()
    results = [_result(folder, rank, process.exitcode) for rank, process in enumerate(made)]
    failures = [text for ok, text in results if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _result(folder: Path, rank: int, exit_code: int | None) -> tuple[bool, Any]:
    path = folder / f"result-{rank}"
    if not path.exists():
        return False, f"rank {rank} ended with {exit_code} and without a result"
    result = pickle.loads(path.read_bytes())
    path.unlink()
    return result


def _rank(function: Callable[..., Any], folder: Path, rank: int, ranks: int, arguments: tuple) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Found by a file: no port is chosen that another process could take.
    meeting = folder / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        result = True, function(folder, *arguments)
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the test raises it
        result = False, f"rank {rank}: {traceback.format_exc()}"
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    # Else the others are in a collective that will never end: leaving at once closes their connection.
    os._exit(0 if result[0] else 1)
