"""`ssdtrain train` with several ranks, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ssdtrain.launch.cli import main

SECONDS = 100

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def torchrun(tiny, tmp_path):
    """Train in two ranks; returns what went into the JSON file, and standard output."""

    def run(*options: str) -> tuple[dict, str]:
        result = tmp_path / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "ssdtrain", "train", str(tiny), "--json", str(result), *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SECONDS, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(result.read_text())["runs"][0], done.stdout

    return run


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_losses_of_two_ranks_are_the_same_bits_with_offloading(torchrun, parallel):
    keep, _ = torchrun("--parallel", parallel, "--mode", "keep")
    offload, out = torchrun("--parallel", parallel)
    assert offload["losses"] == keep["losses"]
    assert offload["bytes_written_per_step"] > 0
    assert offload["tokens_per_step"] == 2 * 4 * 64
    assert out.count("step 4/4") == 1, "one rank reports"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_parallel_without_torchrun_is_refused(tiny, capsys, monkeypatch, parallel):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", str(tiny), "--parallel", parallel]) == 2
    assert f"parallel: {parallel} is for ranks that torchrun starts" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_parallel_with_a_part_of_the_variables_of_torchrun_is_refused(tiny, capsys, monkeypatch, variable):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(variable)
    assert main(["train", str(tiny), "--parallel", "ddp"]) == 2
    assert "parallel: ddp is for ranks that torchrun starts" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_of_torchrun_that_is_no_number_is_refused(tiny, capsys, monkeypatch, variable):
    for name, value in (TORCHRUN | {variable: "abc"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tiny), "--parallel", "ddp"]) == 2
    assert "parallel: ddp is for ranks that torchrun starts" in capsys.readouterr().err


def test_ranks_without_parallel_are_refused(tiny, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(tiny)]) == 2
    assert "parallel: none in one of 2 ranks" in capsys.readouterr().err


def test_comparison_of_ranks_is_refused(tiny, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(tiny), "--parallel", "ddp", "--compare"]) == 2
    assert "parallel: --compare runs one process after the other" in capsys.readouterr().err


def test_other_ways_are_refused_by_name(tiny, capsys):
    assert main(["train", str(tiny), "--parallel", "tensor"]) == 2
    assert "parallel: expected one of none, ddp, fsdp, got tensor" in capsys.readouterr().err
