"""`--compare`: the same config and seed in every mode, each run in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ssdtrain.launch.config import MODES, LaunchConfig, Mode
from ssdtrain.launch.data import load_corpus
from ssdtrain.launch.errors import RunError
from ssdtrain.launch.progress import Progress
from ssdtrain.launch.train import RunResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from rich.console import Console

__all__ = ["check_equal", "compare"]

SECONDS_TO_STOP = 10.0
"""How long an interrupted run may take to close its spill files before it is killed."""


def compare(config: LaunchConfig, rounds: int, console: Console) -> list[RunResult]:
    """Run every mode `rounds` times, in alternating order, and join the rounds.

    Raises:
        RunError: A run failed.
    """
    # Done once here, so that no run has a tokenizer's training in its memory.
    Progress(config, console).corpus(load_corpus(config))
    results: dict[Mode, list[RunResult]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="ssdtrain-compare-") as folder:
        config_file = Path(folder) / "config.yaml"
        # JSON is YAML.
        config_file.write_text(json.dumps(config.as_dict()), encoding="utf-8")
        for number in range(rounds):
            if rounds > 1:
                console.print(f"round {number + 1} of {rounds}")
            # Back and forth, so that a machine that slows down or speeds up favours no mode.
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                results[mode].append(_run(mode, config_file, Path(folder) / "result.json"))
    static = round(statistics.median(run.static_bytes for run in results["keep"]))
    return [_join(runs, static) for runs in results.values()]


def check_equal(runs: Sequence[RunResult]) -> str:
    """A sentence that says that keep and offload had the same losses, bit for bit.

    Raises:
        RunError: They had not.
    """
    by_mode = {run.mode: run.losses for run in runs}
    keep, offload = by_mode["keep"], by_mode["offload"]
    if keep == offload:
        return f"keep and offload: all {len(keep)} losses are equal to the last digit"
    step = next(number for number, pair in enumerate(zip(keep, offload, strict=True)) if pair[0] != pair[1])
    difference = f"{keep[step]!r} against {offload[step]!r}"
    raise RunError(f"WRONG: keep and offload differ from step {step + 1} on: {difference}")


def _join(rounds: Sequence[RunResult], static: int) -> RunResult:
    first = rounds[0]
    for number, run in enumerate(rounds):
        if run.losses != first.losses:
            raise RunError(f"WRONG: the losses of {run.mode} in round {number + 1} are not those of round 1")
    seconds = [second for run in rounds for second in run.step_seconds]
    peak = round(statistics.median(run.peak_bytes for run in rounds))
    return dataclasses.replace(
        first,
        step_seconds=seconds,
        median_step_seconds=statistics.median(seconds),
        peak_above_static_bytes=max(peak - static, 0),
        bytes_written_per_step=round(statistics.mean(run.bytes_written_per_step for run in rounds)),
        bytes_read_per_step=round(statistics.mean(run.bytes_read_per_step for run in rounds)),
        stall_seconds_per_step=statistics.mean(run.stall_seconds_per_step for run in rounds),
        prefetch_hits=sum(run.prefetch_hits for run in rounds),
        prefetch_misses=sum(run.prefetch_misses for run in rounds),
        warmup_step_seconds=[second for run in rounds for second in run.warmup_step_seconds],
        static_bytes=round(statistics.median(run.static_bytes for run in rounds)),
        peak_bytes=peak,
        most_bytes_on_disk=max(run.most_bytes_on_disk for run in rounds),
        blocks_kept=sum(run.blocks_kept for run in rounds),
        store_failures=sum(run.store_failures for run in rounds),
    )


def _run(mode: Mode, config_file: Path, result_file: Path) -> RunResult:
    command = [
        sys.executable,
        "-m",
        "ssdtrain",
        "train",
        str(config_file),
        "--mode",
        mode,
        "--part-of-comparison",
    ]
    command += ["--json", str(result_file)]
    sys.stdout.flush()
    # Its progress goes straight to the terminal; its warnings and errors come after it, in one piece.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 - our own module
    with _stopped_at_the_end(process):
        _, errors = process.communicate()
    sys.stderr.write(errors)
    if process.returncode:
        raise RunError(f"the {mode} run {_ending(process.returncode)}", 2 if process.returncode == 2 else 1)
    document = json.loads(result_file.read_text(encoding="utf-8"))
    result_file.unlink()
    return RunResult(**document["runs"][0])


@contextlib.contextmanager
def _stopped_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no run behind, also when this process is interrupted or told to end."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed; out of memory? A smaller train.batch_size needs less"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}; its error is above"
