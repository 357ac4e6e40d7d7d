from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from ssdtrain.launch.cli import main
from ssdtrain.launch.compare import _join, check_equal
from ssdtrain.launch.errors import RunError
from ssdtrain.launch.report import result_table
from ssdtrain.launch.train import RunResult

RESULT = RunResult(
    mode="keep",
    losses=[3.0, 2.0, 1.0],
    step_seconds=[2.0, 4.0],
    median_step_seconds=3.0,
    peak_above_static_bytes=1000,
    bytes_written_per_step=0,
    bytes_read_per_step=0,
    stall_seconds_per_step=0.0,
    prefetch_hits=0,
    prefetch_misses=0,
    warmup_step_seconds=[5.0],
    static_bytes=500,
    peak_bytes=1500,
    peak_source="VmHWM",
    most_bytes_on_disk=0,
    blocks_kept=0,
    store_failures=0,
    backend="",
    parameters=10,
    tokens_per_step=64,
)


def result(mode: str, **changes) -> RunResult:
    return dataclasses.replace(RESULT, mode=mode, **changes)


def render(runs) -> str:
    from rich.console import Console

    console = Console(width=110)
    with console.capture() as capture:
        console.print(result_table(runs))
    return capture.get()


def test_compare_runs_every_mode_and_ends_with_one_table(tiny, tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "ssdtrain", "train", str(tiny), "--compare", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "keep and offload: all 4 losses are equal to the last digit"
    assert done.stdout.count("final loss") == 1

    runs = {run["mode"]: run for run in json.loads(path.read_text())["runs"]}
    assert list(runs) == ["keep", "recompute", "offload"]
    assert runs["keep"]["losses"] == runs["offload"]["losses"]
    assert repr(runs["keep"]["losses"][-1]) in done.stdout
    assert runs["offload"]["bytes_written_per_step"] > 0
    for run in runs.values():
        # The static part is that of the keep run for all of them.
        assert run["peak_above_static_bytes"] == max(run["peak_bytes"] - runs["keep"]["static_bytes"], 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "tiny.yaml"]


def test_failure_of_one_run_is_the_failure_of_the_comparison(tiny, capfd):
    options = ["--compare", "--train.learning_rate", "1e30", "--train.steps", "20"]
    assert main(["train", str(tiny), *options]) == 1
    cause, summary = capfd.readouterr().err.splitlines()
    assert "lower train.learning_rate" in cause
    assert summary == "ssdtrain: error: the keep run failed with exit code 1; its error is above"


def test_different_losses_are_an_error():
    runs = [result("keep"), result("offload", losses=[3.0, 2.0000000000000004, 1.0])]
    with pytest.raises(
        RunError, match=r"WRONG: keep and offload differ from step 2 on: 2.0 against 2.0000000000000004"
    ):
        check_equal(runs)


def test_different_losses_end_with_exit_code_1(tiny, capsys, monkeypatch):
    runs = [result("keep"), result("recompute"), result("offload", losses=[3.0, 2.0, 1.5])]
    monkeypatch.setattr("ssdtrain.launch.compare.compare", lambda *_: runs)
    assert main(["train", str(tiny), "--compare"]) == 1
    out, err = capsys.readouterr()
    assert "final loss" in out
    assert "WRONG: keep and offload differ from step 3 on" in err


def test_rounds_are_joined():
    rounds = [
        result("offload", bytes_written_per_step=10, prefetch_hits=3),
        result(
            "offload", step_seconds=[1.0, 1.5], peak_bytes=1700, bytes_written_per_step=20, prefetch_hits=4
        ),
    ]
    joined = _join(rounds, 400)
    assert joined.step_seconds == [2.0, 4.0, 1.0, 1.5]
    assert joined.median_step_seconds == 1.75
    assert joined.peak_above_static_bytes == 1600 - 400
    assert joined.bytes_written_per_step == 15
    assert joined.prefetch_hits == 7
    assert joined.losses == [3.0, 2.0, 1.0]


def test_rounds_with_different_losses_are_an_error():
    with pytest.raises(RunError, match="losses of keep in round 2"):
        _join([result("keep"), result("keep", losses=[3.0, 2.0, 1.1])], 0)


def test_rounds_alternate_the_order(tiny, monkeypatch):
    order = []

    def fake_run(mode, *_):
        order.append(mode)
        return result(mode)

    monkeypatch.setattr("ssdtrain.launch.compare._run", fake_run)
    assert main(["train", str(tiny), "--compare", "--rounds", "2"]) == 0
    assert order == ["keep", "recompute", "offload", "offload", "recompute", "keep"]


def test_table_has_ratios_to_keep():
    text = render([result("keep"), result("offload", median_step_seconds=3.15, peak_above_static_bytes=190)])
    assert "1.050" in text
    assert "0.190" in text


def test_table_of_one_run_has_no_ratios():
    assert "to keep" not in render([result("keep")])


def test_table_says_when_the_peak_is_not_of_the_measured_steps_alone():
    assert "cannot reset" in " ".join(render([result("keep", peak_source="ru_maxrss")]).split())
