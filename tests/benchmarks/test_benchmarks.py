"""The benchmarks run and print what they promise; how fast anything is, is not asked here."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else os.environ | {"PATH": path}
    command = [sys.executable, str(ROOT / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_engine_throughput_prints_a_row_for_each_size_and_direction(tmp_path):
    result = tmp_path / "result.json"
    sizes = ["--sizes", "64KiB", "1MiB", "--total", "4MiB", "--rounds", "2"]
    done = run("benchmarks/engine_throughput.py", "--dir", str(tmp_path), *sizes, "--json", str(result))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 + 4 + 1
    rows = json.loads(result.read_text())["results"]
    expected = [(65536, "write"), (65536, "read"), (1048576, "write"), (1048576, "read")]
    assert [(row["block_bytes"], row["direction"]) for row in rows] == expected
    assert all(row["ratio"] > 0 and len(row["ratios"]) == 2 for row in rows)
    assert list(tmp_path.iterdir()) == [result]


def test_engine_throughput_without_fio_names_the_package(tmp_path):
    done = run("benchmarks/engine_throughput.py", "--dir", str(tmp_path), path=str(tmp_path))
    assert done.returncode == 2
    assert "fio is not installed; on Debian and Ubuntu: apt install fio" in done.stderr
    assert "Traceback" not in done.stderr


def test_hook_cost_prints_a_row_for_each_kind_and_number_of_blocks(tmp_path):
    result = tmp_path / "result.json"
    done = run("benchmarks/hook_cost.py", "--live", "5", "50", "--repeat", "1", "--json", str(result))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 + 8 + 1
    rows = json.loads(result.read_text())["results"]
    kinds = ["no-op hooks", "offloaded", "exempt: small", "exempt: weight"]
    assert [(row["live"], row["kind"]) for row in rows] == [
        (live, kind) for live in (5, 50) for kind in kinds
    ]
    assert all(row["pack"] > 0 and row["unpack"] > 0 for row in rows)


def test_callback_cost_prints_what_it_costs(tmp_path):
    result = tmp_path / "result.json"
    tiny = ["--rounds", "1", "--steps", "1", "--width", "32", "--length", "32", "--json", str(result)]
    done = run("benchmarks/callback_cost.py", *tiny)
    assert done.returncode == 0, done.stderr
    assert "the callback costs" in done.stdout
    document = json.loads(result.read_text())
    assert len(document["ratios"]) == 1
    assert document["ratios"][0] > 0


@pytest.mark.parametrize(
    "options", [[], ["--random-shapes", "--faults"]], ids=["plain", "random shapes, faults"]
)
def test_soak_holds_nothing_between_steps_and_grows_nothing(tmp_path, options):
    result = tmp_path / "result.json"
    tiny = ["--steps", "40", "--layers", "3", "--dir", str(tmp_path), "--json", str(result)]
    # Memory needs more steps than these to be told from noise.
    done = run("scripts/soak", *tiny, "--rss-bound", "1GiB", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nothing grew after warm-up"
    document = json.loads(result.read_text())
    steps = document["steps"]
    assert len(steps) == 40
    assert document["stats"]["bytes_written"] > 0
    assert {step["live_blocks"] for step in steps} == {0}
    assert {step["bytes_on_disk"] for step in steps} == {0}
    assert len({step["fds"] for step in steps}) == 1
    assert len({step["threads"] for step in steps}) == 1
    assert len({step["spill_file"] for step in steps[10:]}) == 1
    assert ("--faults" in options) == (document["stats"]["store_failures"] > 0)


def test_fuzz_finds_nothing(tmp_path):
    result = tmp_path / "result.json"
    some = ["--programs", "20", "--schedules", "10", "--dir", str(tmp_path), "--json", str(result)]
    done = run("scripts/fuzz", *some)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(result.read_text())
    assert (counts["programs"], counts["schedules"]) == (20, 10)
    assert counts["faults_injected"] > 0
    assert counts["wrong"] == counts["left_behind"] == 0


def test_soak_says_what_grew():
    soak = runpy.run_path(str(ROOT / "scripts" / "soak"))
    flat = soak["Usage"](fds=5, threads=3, live_blocks=0, bytes_on_disk=0, spill_file=100, rss=1000)
    leaking = [flat._replace(fds=5 + step, rss=1000 + step) for step in range(8)]
    assert soak["growth"]([flat] * 8, rss_bound=0) == []
    assert soak["growth"](leaking, rss_bound=2) == [
        "fds grew by 4 (bound: 0)",
        "rss grew by 4 (bound: 2)",
    ]
