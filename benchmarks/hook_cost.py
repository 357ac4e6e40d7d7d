"""What packing and unpacking cost the compute thread, with a store that does nothing.

    .venv/bin/python benchmarks/hook_cost.py [--live N ...] [--repeat N] [--json FILE]

Autograd saves tensors of 4 KiB and asks for them again, as in training, with N blocks alive at the end of the forward
pass; every one goes to the store and comes back. Nothing is computed in between, so that the I/O threads want the
interpreter all the time, which is their worst case. Medians over the calls of several repeats; no-op hooks, measured
in the same way in the same run, show what autograd and the clock cost by themselves.

- pack, unpack: how long the hook keeps the compute thread, median of the calls.
- whole: what a tensor adds to the time of forward and backward, with what the I/O threads take of the interpreter and
  the end of the handle. Median of the repeats, less the no-op hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import ssdtrain
from ssdtrain.testing import NullStore, OffloadOver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Of float32: 4 KiB, so that memory plays no part.
ELEMENTS = 1024


class Save(torch.autograd.Function):
    """Has a tensor saved in the forward pass, and asks for it in the backward pass. Computes nothing."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, tensor: Tensor) -> Tensor:
        """Save the tensor."""
        ctx.save_for_backward(tensor)
        return carry.view_as(carry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Ask for the tensor, and let go of it at once."""
        assert len(ctx.saved_tensors) == 1
        return gradient, None


class Cost(NamedTuple):
    """Seconds a tensor, medians."""

    pack: float
    unpack: float
    whole: float


class NoHooks(saved_tensors_hooks):
    """Returns what it is given."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda packed: packed)

    def synchronize(self) -> None:
        """Nothing is ever queued."""


Hooks = ssdtrain.OffloadActivations | NoHooks


def offloader(**options: Any) -> ssdtrain.OffloadActivations:
    """An offloader whose disk takes no time."""
    return OffloadOver(NullStore(), **options)


def timed(hook: Callable[[Any], Any], seconds: list[float]) -> Callable[[Any], Any]:
    """The hook, and how long each call took."""

    def call(argument: Any) -> Any:
        began = time.perf_counter()
        result = hook(argument)
        seconds.append(time.perf_counter() - began)
        return result

    return call


def run(hooks: Hooks, tensors: list[Tensor]) -> Cost:
    """One forward and backward that saves each tensor."""
    packs: list[float] = []
    unpacks: list[float] = []
    with timed_hooks(hooks, packs, unpacks):
        carry = torch.zeros(1, requires_grad=True)
        began = time.perf_counter()
        for tensor in tensors:
            carry = Save.apply(carry, tensor)  # type: ignore[no-untyped-call]
        whole = time.perf_counter() - began
    # Blocks that are still in the queue would be forwarded.
    hooks.synchronize()
    began = time.perf_counter()
    carry.backward()  # type: ignore[no-untyped-call]
    whole += time.perf_counter() - began
    return Cost(statistics.median(packs), statistics.median(unpacks), whole / len(tensors))


@contextmanager
def timed_hooks(hooks: Hooks, packs: list[float], unpacks: list[float]) -> Iterator[None]:
    """Enter the hooks with a clock around each."""
    pack, unpack = hooks.pack_hook, hooks.unpack_hook
    hooks.pack_hook, hooks.unpack_hook = timed(pack, packs), timed(unpack, unpacks)
    try:
        with hooks:
            yield
    finally:
        hooks.pack_hook, hooks.unpack_hook = pack, unpack


def measure(live: int, repeat: int) -> dict[str, Cost]:
    """Costs by kind of saved tensor, with so many alive."""
    weights: list[Tensor] = [
        torch.nn.Parameter(torch.randn(ELEMENTS), requires_grad=False) for _ in range(live)
    ]
    activations = [torch.randn(ELEMENTS) for _ in range(live)]
    # A queue with room for all: what is kept because the queue is full costs less.
    offload = offloader(min_tensor_bytes=1, store_queue_bytes="1GiB", prefetch_bytes="64MiB")
    small = offloader(min_tensor_bytes="1MiB")
    kinds: dict[str, tuple[Hooks, list[Tensor]]] = {
        "no-op hooks": (NoHooks(), activations),
        "offloaded": (offload, activations),
        "exempt: small": (small, activations),
        "exempt: weight": (offload, weights),
    }
    # Short graphs more often, so that the median is over as many calls.
    times = repeat * max(1000 // live, 1)
    costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for number in range(times + 1):
        for kind, (hooks, tensors) in kinds.items():
            cost = run(hooks, tensors)
            if number:  # the first warms up
                costs[kind].append(cost)
    offload.close()
    small.close()
    medians = {kind: Cost(*map(statistics.median, zip(*some, strict=True))) for kind, some in costs.items()}
    base = medians["no-op hooks"].whole
    return {
        kind: cost if kind == "no-op hooks" else cost._replace(whole=cost.whole - base)
        for kind, cost in medians.items()
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--live", nargs="+", type=int, default=[10, 1000, 10000], help="live blocks (%(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=9, help="measured repeats (%(default)s)")
    parser.add_argument(
        "--at-most", type=float, metavar="US", help="exit with 1 if pack + unpack is above it anywhere"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    options = parser.parse_args(arguments)
    if options.repeat < 1 or min(options.live) < 1:
        parser.error("--repeat and --live: expected at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    options = parse(arguments)
    rows: list[dict[str, Any]] = []
    print("  live  saved tensor     pack us  unpack us  pack + unpack us  whole us")
    for live in options.live:
        for kind, cost in measure(live, options.repeat).items():
            micros = {name: seconds * 1e6 for name, seconds in cost._asdict().items()}
            both = micros["pack"] + micros["unpack"]
            rows.append({"live": live, "kind": kind, **micros, "pack_and_unpack": both})
            print(
                f"{live:6}  {kind:15}  {micros['pack']:7.1f}  {micros['unpack']:9.1f}  {both:16.1f}  "
                f"{micros['whole']:8.1f}",
                flush=True,
            )
    load = os.getloadavg()[0]
    print(f"{options.repeat} repeats, load average {load:.2f}")
    if options.json is not None:
        document = {"unit": "microseconds", "repeat": options.repeat, "load_average": load, "results": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.at_most is not None and any(row["pack_and_unpack"] > options.at_most for row in rows):
        print(f"above {options.at_most:g} us: see the table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
