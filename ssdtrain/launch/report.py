"""Results as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdtrain.errors import ConfigError
from ssdtrain.launch.progress import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from ssdtrain.launch.config import LaunchConfig
    from ssdtrain.launch.train import RunResult

__all__ = ["check_json_path", "result_table", "write_json"]


def check_json_path(path: Path) -> None:
    """Find out before the work whether the result can be written.

    Raises:
        ConfigError: It cannot.
    """
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json: cannot write {path}: {error.strerror}; give a file in a folder that exists"
        ) from None
    if not existed:
        path.unlink()


def write_json(path: Path, config: LaunchConfig, runs: Sequence[RunResult], **more: Any) -> None:
    """Write the config, the machine and the runs; `more` are further top-level keys."""
    document = {
        "config": config.as_dict(),
        "machine": _machine(config),
        "runs": [run.as_dict() for run in runs],
    }
    path.write_text(json.dumps(document | more, indent=2) + "\n", encoding="utf-8")


def result_table(runs: Sequence[RunResult]) -> Table:
    """One column for each run; ratios to the keep run where there is one."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for run in runs:
        table.add_column(run.mode, justify="right")

    keep = next((run for run in runs if run.mode == "keep"), None)

    def row(name: str, value: Callable[[RunResult], str]) -> None:
        table.add_row(name, *(value(run) for run in runs))

    def ratio_row(value: Callable[[RunResult], float]) -> None:
        if keep is not None and len(runs) > 1:
            base = value(keep)
            row("  to keep", lambda run: f"{value(run) / base:.3f}" if base else "-")

    def disk_row(name: str, value: Callable[[RunResult], str]) -> None:
        # A dash says "does not apply"; a zero would be a measurement.
        row(name, lambda run: value(run) if run.mode == "offload" else "-")

    row("final loss", lambda run: repr(run.losses[-1]))
    row("step time, median", lambda run: f"{run.median_step_seconds:.3f} s")
    ratio_row(lambda run: run.median_step_seconds)
    row("tokens per second", lambda run: f"{run.tokens_per_step / run.median_step_seconds:,.0f}")
    row("peak memory above static", lambda run: format_bytes(run.peak_above_static_bytes))
    ratio_row(lambda run: run.peak_above_static_bytes)
    row("static memory", lambda run: format_bytes(run.static_bytes))
    if any(run.mode == "offload" for run in runs):
        disk_row("written to SSD per step", lambda run: format_bytes(run.bytes_written_per_step))
        disk_row("read from SSD per step", lambda run: format_bytes(run.bytes_read_per_step))
        disk_row("SSD traffic during a step", lambda run: f"{_gigabytes_per_second(run):.2f} GB/s")
        disk_row("waited for the SSD per step", lambda run: f"{run.stall_seconds_per_step:.3f} s")
        disk_row("prefetch hits / misses", lambda run: f"{run.prefetch_hits} / {run.prefetch_misses}")
        if any(run.blocks_kept or run.store_failures for run in runs):
            disk_row(
                "blocks kept: disk behind / failed", lambda run: f"{run.blocks_kept} / {run.store_failures}"
            )
        disk_row("path to the SSD", lambda run: run.backend)
    if any(run.peak_source != "VmHWM" for run in runs):
        table.caption = "peaks include what came before the measured steps: the system cannot reset them"
    return table


def _gigabytes_per_second(run: RunResult) -> float:
    return (run.bytes_written_per_step + run.bytes_read_per_step) / run.median_step_seconds / 1e9


def _machine(config: LaunchConfig) -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    import torch

    return {
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "spill_file_systems": [_file_system(path) for path in config.offload.directories],
    }


def _first_value(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """The type of the file system that holds a directory: that of the longest mount point above it."""
    resolved = directory.resolve()
    best, kind = Path(), "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, found, *_ = line.split()
        mount = Path(point)
        # Later lines hide earlier ones of the same place.
        if resolved.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, found
    return kind
