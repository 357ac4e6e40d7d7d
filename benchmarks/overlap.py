"""How much of the time that copies take is hidden behind kernels, from a trace of torch.profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Activity", "Interval", "activity", "hidden_share", "union"]


class Interval(NamedTuple):
    """A span of time, in whatever unit the trace has."""

    start: float
    end: float


class Activity(NamedTuple):
    """What a device did."""

    kernels: list[Interval]
    to_host: list[Interval]
    to_device: list[Interval]


def activity(trace: dict[str, Any]) -> Activity:
    """The device's part of a trace.

    Args:
        trace: The parsed file of `torch.profiler.profile.export_chrome_trace`.
    """
    found = Activity([], [], [])
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        interval = Interval(event["ts"], event["ts"] + event["dur"])
        category, name = event.get("cat"), event["name"]
        if category == "kernel":
            found.kernels.append(interval)
        elif category == "gpu_memcpy" and "DtoH" in name:
            found.to_host.append(interval)
        elif category == "gpu_memcpy" and "HtoD" in name:
            found.to_device.append(interval)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, in order and without overlaps."""
    merged: list[Interval] = []
    for one in sorted(intervals):
        if merged and one.start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, one.end))
        else:
            merged.append(one)
    return merged


def hidden_share(copies: Iterable[Interval], kernels: Iterable[Interval]) -> float | None:
    """The share of the time during which anything is copied, in which a kernel runs as well; None without copies.

    Copies at the same time count once, and so do kernels.
    """
    copied, computed = union(copies), union(kernels)
    total = sum(one.end - one.start for one in copied)
    if total == 0:
        return None
    hidden = 0.0
    at = 0
    for copy in copied:
        while at < len(computed) and computed[at].end <= copy.start:
            at += 1
        for kernel in computed[at:]:
            if kernel.start >= copy.end:
                break
            hidden += min(copy.end, kernel.end) - max(copy.start, kernel.start)
    return hidden / total
