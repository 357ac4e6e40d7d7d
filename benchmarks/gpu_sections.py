"""The sections of scripts/gpu_check that train: gradients, costs, overlap."""

from __future__ import annotations

import gc
import json
import os
import shutil
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_models import KINDS, Size, batch_of, model_of
from gpu_training import (
    MODES,
    Costs,
    Load,
    gradients,
    holding,
    measure,
    same_bits,
    step,
    synchronize,
)
from overlap import activity, hidden_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from check_report import Report

    import ssdtrain

    # From the options of an offloader, or none, to tensors and the offloader's counters.
    _Train = Callable[..., tuple[list[torch.Tensor], ssdtrain.OffloadStats | None]]

__all__ = ["Steps", "check_gradients"]

GB = 1e9
MIB = 1 << 20

# 60 to 100 million weights.
GRADIENTS_SIZE = Size(width=768, layers=8, sequence=512, batch=4, vocabulary=32000)
SECONDS_A_TRAINING = 5.0
SECONDS_A_PROFILE = 5.0


def check_gradients(
    report: Report,
    device: torch.device,
    backends: Mapping[str, dict[str, Any]],
    *,
    until: float,
    size: Size = GRADIENTS_SIZE,
) -> None:
    """Every model with every backend against plain torch, while another stream computes.

    Args:
        report: Gets a row for each.
        device: Where.
        backends: Options of the offloader, by name.
        until: Seconds that are to be left.
        size: Of the models.
    """
    needs = until + SECONDS_A_TRAINING
    before = torch.are_deterministic_algorithms_enabled()
    # That the rest is deterministic as well is seen from a second run of plain torch.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with Load(device) as load:
            for kind in KINDS:
                for autocast in (False, True):
                    name = f"{kind} {'autocast' if autocast else 'float32'}"
                    train = partial(gradients, kind, size, device, autocast=autocast)
                    with report.failures(name):
                        _check_model(report, name, train, backends, needs)
        report.add("other stream", text=f"{load.products} matrix products meanwhile")
    finally:
        torch.use_deterministic_algorithms(before)


def _check_model(
    report: Report, name: str, train: _Train, backends: Mapping[str, dict[str, Any]], needs: float
) -> None:
    if not report.enough_time(name, needs):
        return
    wanted, _ = train()
    again, _ = train()
    if not same_bits(again, wanted):
        report.add(name, "FAIL", "plain torch gives other bits when it is run again")
        return
    del again
    for backend, options in backends.items():
        row = f"{name}, {backend}"
        if not report.enough_time(row, needs):
            continue
        with report.failures(row):
            got, stats = train(options)
            assert stats is not None
            text = (
                f"{len(wanted)} tensors; {stats.bytes_written / GB:.2f} GB written, {stats.bytes_read / GB:.2f} GB "
                f"read, as {stats.backend}"
            )
            problem = ""
            if not same_bits(got, wanted):
                problem = "other bits than plain torch: "
            elif stats.bytes_read == 0:
                problem = "nothing was read back: "
            report.add(row, "FAIL" if problem else "ok", problem + text, **stats.as_dict())


class Steps:
    """What steps of one model cost in every mode, and what the profiler sees of them.

    Args:
        report: Gets the rows.
        device: Where.
        spill_dir: Of the offloaders.
        size: Of the model; None: by the memory that is free.
        steps: That count, a mode and round.
    """

    def __init__(
        self,
        report: Report,
        device: torch.device,
        spill_dir: Path,
        *,
        size: Size | None = None,
        steps: int = 3,
    ) -> None:
        self._report = report
        self._device = device
        self._spill_dir = spill_dir
        self._size = size
        self._steps = steps
        self._costs = {mode: Costs() for mode in MODES}

    def costs(self, rounds: int, until: float) -> None:
        """Time and memory, in alternating order.

        Args:
            rounds: At most; as many as there is time for.
            until: Seconds that are to be left.
        """
        report = self._report
        model, ids = self._workload
        not_measured = set[str]()
        for number in range(rounds):
            # Back and forth, so that a machine that slows down or speeds up favours no mode.
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                if mode in not_measured or (number and report.left < until):
                    continue
                not_measured.add(mode)
                if number or report.enough_time(mode, until):
                    with report.failures(mode), self._holding(mode) as make_context:
                        measure(self._costs[mode], model, ids, make_context, self._steps)
                        not_measured.discard(mode)
        for mode in MODES:
            if mode not in not_measured:
                self._add_costs(mode)

    def overlap(self, trace: Path) -> None:
        """How much of the copying one step hides, in every mode that copies.

        Args:
            trace: A file for the profiler.
        """
        model, ids = self._workload
        on_gpu = self._device.type == "cuda"
        activities = [getattr(torch.profiler.ProfilerActivity, "CUDA" if on_gpu else "CPU")]
        profiler = partial(torch.profiler.profile, activities=activities, acc_events=True)
        with profiler():
            torch.ones(1, device=self._device)  # the profiler's own start is not to be in a step
        for mode in MODES[2:]:
            if not self._report.enough_time(mode, SECONDS_A_PROFILE):
                continue
            with self._report.failures(mode), self._holding(mode) as make_context:
                step(model, ids, make_context)
                with profiler() as profile:
                    step(model, ids, make_context)
                    synchronize(self._device)
                profile.export_chrome_trace(str(trace))
                seen = activity(json.loads(trace.read_text(encoding="utf-8")))
                shares = {
                    "to_host": hidden_share(seen.to_host, seen.kernels),
                    "to_device": hidden_share(seen.to_device, seen.kernels),
                }
                text = ", ".join(
                    f"{name.replace('_', ' ')} {'no copies' if share is None else f'{share:.0%} hidden'}"
                    for name, share in shares.items()
                )
                self._report.add(mode, text=text, **shares)

    @cached_property
    def _workload(self) -> tuple[Any, torch.Tensor]:
        size = self._size
        self._begin_afresh()
        if size is None:
            free, _ = torch.accelerator.get_memory_info()
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            size = Size.that_fits(device=free, host=host, disk=shutil.disk_usage(self._spill_dir).free)
        self._budget = max(256 * MIB, 2 * size.largest_activation)
        torch.manual_seed(0)
        model = model_of("llama", size, self._device, torch.bfloat16)
        text = (
            f"llama, {size.layers} layers, {size.width} wide, {size.tokens} tokens, "
            f"{sum(one.numel() for one in model.parameters()) / 1e9:.2f} billion weights in bfloat16"
        )
        self._report.add("model", text=text, width=size.width, tokens=size.tokens)
        return model, batch_of(size, self._device, 0)

    @contextmanager
    def _holding(self, mode: str) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        """A mode, beginning without what the one before has left in torch's caches."""
        model, _ = self._workload
        options: dict[str, Any] = {"spill_dir": self._spill_dir}
        options |= {"store_queue_bytes": self._budget, "prefetch_bytes": self._budget}
        if mode == "ssdtrain host":
            options["backend"] = "host"
        elif mode == "ssdtrain both":
            options["host_memory_bytes"] = max(MIB, self._costs["keep"].peak // 2)
        self._begin_afresh()
        with holding(mode, model, options) as make_context:
            yield make_context

    def _begin_afresh(self) -> None:
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def _add_costs(self, mode: str) -> None:
        keep, mine = self._costs["keep"], self._costs[mode]
        numbers: dict[str, Any] = {"seconds": mine.seconds, "median_seconds": mine.median}
        numbers |= {
            "peak_above_static": mine.peak,
            "peak_allocated": mine.allocated,
            "peak_reserved": mine.reserved,
        }
        text = f"{mine.median:.3f} s"
        if keep.seconds:
            numbers["step_to_keep"] = mine.median / keep.median
            text += f" ({numbers['step_to_keep']:.3f} of keep) over {len(mine.seconds)} steps"
        if mine.allocated:
            text += f"; peak {mine.peak / GB:.2f} GB"
            if keep.peak:
                numbers["peak_to_keep"] = mine.peak / keep.peak
                text += f" ({numbers['peak_to_keep']:.3f} of keep)"
            text += f"; reserved {mine.reserved / GB:.2f} GB of which allocated {mine.allocated / GB:.2f}"
        if mine.stats is not None:
            numbers["stats"] = mine.stats.as_dict()
            kept, moved = mine.stats.blocks_kept, mine.stats.blocks_offloaded
            text += f"; as {mine.stats.backend}, {moved} blocks offloaded, {kept} kept"
        wrong = mine.stats is not None and keep.losses and mine.losses != keep.losses
        self._report.add(
            mode, "FAIL" if wrong else "ok", ("other losses than keep: " if wrong else "") + text, **numbers
        )
