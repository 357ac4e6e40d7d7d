"""One training run in one mode, with everything measured that a comparison needs."""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ssdtrain.config import in_bytes
from ssdtrain.errors import ConfigError
from ssdtrain.launch.data import batches, load_corpus
from ssdtrain.launch.errors import RunError
from ssdtrain.launch.memory import PeakMemory, resident_bytes, tune_heap
from ssdtrain.launch.model import build_model, transformers_config
from ssdtrain.launch.parallel import Ranks, first_rank_first, join, mean_over_ranks, wrap
from ssdtrain.memory.heap import trim_heap
from ssdtrain.stats import OffloadStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ssdtrain import OffloadActivations
    from ssdtrain.launch.config import LaunchConfig
    from ssdtrain.launch.progress import Progress

__all__ = ["RunResult", "StepRecord", "check_spill_directories", "train"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one training step did."""

    loss: float
    seconds: float
    """Forward, backward and optimizer."""
    bytes_on_disk: int
    """On the SSD when the forward pass had ended."""
    bytes_written: int
    bytes_read: int
    stall_seconds: float
    prefetch_hits: int
    prefetch_misses: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run in numbers, as they go into the JSON file. Sizes are bytes, times seconds.

    Everything but `losses` and `warmup_step_seconds` is of the steps after warm-up. Of several ranks,
    losses and tokens are those of all; times, memory and traffic those of the first.
    """

    mode: str
    losses: list[float]
    """Of every step, warm-up included."""
    step_seconds: list[float]
    median_step_seconds: float
    peak_above_static_bytes: int
    """`peak_bytes` minus the static part: that of this run, or of the keep run in a comparison."""
    bytes_written_per_step: int
    bytes_read_per_step: int
    stall_seconds_per_step: float
    prefetch_hits: int
    prefetch_misses: int
    warmup_step_seconds: list[float]
    static_bytes: int
    """Resident after warm-up, between two steps: weights, optimizer state, libraries."""
    peak_bytes: int
    peak_source: str
    """"VmHWM", or "ru_maxrss" where the peak includes everything before the measured steps."""
    most_bytes_on_disk: int
    blocks_kept: int
    """Of all steps: blocks that stayed in memory because the store queue was full."""
    store_failures: int
    """Of all steps: blocks that stayed in memory because the disk refused them."""
    backend: str
    """The path to the disk that was really in use; empty without offloading."""
    parameters: int
    tokens_per_step: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def check_spill_directories(config: LaunchConfig) -> None:
    """Open and close the spill directories as a run would, before any other work.

    Raises:
        ConfigError: One of them cannot be used, or is RAM.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="spill_dir: .* is RAM", category=UserWarning)
        try:
            _offload(None, config).close()
        except UserWarning as warning:
            raise ConfigError(f"offload.{warning}") from warning
    leave = in_bytes(config.offload.min_free_bytes)
    for directory in config.offload.directories if config.offload.backend != "host" else ():
        free = shutil.disk_usage(directory).free
        if free <= leave:
            raise ConfigError(
                f"offload.min_free_bytes: {directory} has {free} bytes free, of which {leave} are to be left to "
                "others, so nothing can be offloaded; free some space, leave less, or name another directory"
            )


def train(config: LaunchConfig, progress: Progress) -> RunResult:
    """Train in the config's mode.

    Raises:
        ConfigError: The data, the model or the spill directory cannot be used.
        RunError: The loss is no longer finite.
    """
    tune_heap(config.mode)
    with join(config.parallel) as ranks, _reproducible(config.train.seed):
        return _train(config, progress, ranks)


def _train(config: LaunchConfig, progress: Progress, ranks: Ranks) -> RunResult:
    """The model is gone when this returns, as `join` wants it."""
    import torch

    with first_rank_first(ranks):
        corpus = load_corpus(config)
    progress.corpus(corpus)
    # The same weights in every rank, and then other dropout in each.
    model = wrap(build_model(transformers_config(config.model), config.mode), config.parallel)
    if ranks.rank > 0:
        torch.manual_seed(config.train.seed + ranks.rank)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.train.learning_rate, weight_decay=config.train.weight_decay
    )
    offload = _offload(model, config) if config.mode == "offload" else None
    trainer = _Trainer(config=config, model=model, ranks=ranks, optimizer=optimizer, offload=offload)
    progress.model(trainer.parameters)
    try:
        return trainer.run(batches(corpus.tokens, config, *ranks), progress)
    finally:
        if offload is not None:
            offload.close()


def _offload(model: nn.Module | None, config: LaunchConfig) -> OffloadActivations:
    import ssdtrain

    try:
        return ssdtrain.OffloadActivations(model, config.offload)
    except ConfigError as error:
        raise ConfigError(f"offload.{error}") from error


@contextlib.contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """The same seed gives the same bits in every mode and process."""
    import torch

    # Stubs know this module without its attributes.
    memory: Any = torch.utils.deterministic
    deterministic, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor would be measured as training time.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = fill


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    config: LaunchConfig
    model: nn.Module
    ranks: Ranks
    optimizer: Optimizer
    offload: OffloadActivations | None

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def stats(self) -> OffloadStats:
        return OffloadStats() if self.offload is None else self.offload.stats

    def run(self, data: Iterator[dict[str, Tensor]], progress: Progress) -> RunResult:
        """All steps; memory is measured from the end of warm-up on."""
        records: list[StepRecord] = []
        steps, warmup = self.config.train.steps, self.config.train.warmup_steps
        with progress.steps(steps):
            for _ in range(warmup):
                self._step_into(records, next(data), progress)
            # The optimizer's state exists, gradients are freed: what is resident now is the static part.
            gc.collect()
            trim_heap()
            static = resident_bytes()
            peak = PeakMemory()
            for _ in range(warmup, steps):
                self._step_into(records, next(data), progress)
        return self._result(records, static, peak)

    def _step_into(self, records: list[StepRecord], batch: dict[str, Tensor], progress: Progress) -> None:
        record = self._step(batch)
        records.append(record)
        if not math.isfinite(record.loss):
            raise RunError(f"the loss is {record.loss} at step {len(records)}: lower train.learning_rate")
        progress.step(len(records), record)

    def _step(self, batch: dict[str, Tensor]) -> StepRecord:
        before = self.stats
        start = time.perf_counter()
        with self.offload or contextlib.nullcontext(), self._autocast():
            # The output object holds the logits: only the loss may outlive this line.
            loss = self.model(**batch).loss
        bytes_on_disk = self.stats.live_bytes_on_disk
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        after = self.stats
        return StepRecord(
            loss=mean_over_ranks(loss.item(), self.ranks),
            seconds=seconds,
            bytes_on_disk=bytes_on_disk,
            bytes_written=after.bytes_written - before.bytes_written,
            bytes_read=after.bytes_read - before.bytes_read,
            stall_seconds=after.stall_seconds - before.stall_seconds,
            prefetch_hits=after.prefetch_hits - before.prefetch_hits,
            prefetch_misses=after.prefetch_misses - before.prefetch_misses,
        )

    def _autocast(self) -> torch.autocast:
        import torch

        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.train.dtype == "bfloat16")

    def _result(self, records: list[StepRecord], static: int, peak: PeakMemory) -> RunResult:
        first = self.config.train.warmup_steps
        warmup, measured = records[:first], records[first:]
        stats = self.stats
        seconds = [record.seconds for record in measured]
        peak_bytes = peak.bytes()
        return RunResult(
            mode=self.config.mode,
            losses=[record.loss for record in records],
            step_seconds=seconds,
            median_step_seconds=statistics.median(seconds),
            peak_above_static_bytes=max(peak_bytes - static, 0),
            bytes_written_per_step=round(statistics.mean(record.bytes_written for record in measured)),
            bytes_read_per_step=round(statistics.mean(record.bytes_read for record in measured)),
            stall_seconds_per_step=statistics.mean(record.stall_seconds for record in measured),
            prefetch_hits=sum(record.prefetch_hits for record in measured),
            prefetch_misses=sum(record.prefetch_misses for record in measured),
            warmup_step_seconds=[record.seconds for record in warmup],
            static_bytes=static,
            peak_bytes=peak_bytes,
            peak_source=peak.source,
            most_bytes_on_disk=max(record.bytes_on_disk for record in measured),
            blocks_kept=stats.blocks_kept,
            store_failures=stats.store_failures,
            backend=stats.backend,
            parameters=self.parameters,
            tokens_per_step=self.ranks.ranks
            * self.config.train.batch_size
            * self.config.model.sequence_length,
        )
