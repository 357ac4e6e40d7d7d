"""Inside torch's own ways to distribute: the bits of plain torch, and nothing but activations on the disk.

Two processes run all cases (`cases.py`), each with and without the offloader; what they saw is judged here.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.cases import ACTIVATIONS, CASES

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
SECONDS = 240


def torchrun(*arguments, seconds=SECONDS, **environment):
    """Run on RANKS processes; kill them all when it takes too long."""
    command = [sys.executable, "-X", "faulthandler", "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", str(RANKS), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler shows where each process is
        output, _ = process.communicate()
        pytest.fail(f"not done after {seconds} s\n{output}")
    return process.returncode, output


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By case, what each rank saw."""
    directory = tmp_path_factory.mktemp("ranks")
    spill = tmp_path_factory.mktemp("spill")
    code, output = torchrun("-m", "tests.distributed.cases", directory, SSDTRAIN_SPILL_DIR=str(spill))
    assert code == 0, output
    ranks = [json.loads((directory / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    assert not list(spill.iterdir())
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_without_offloading(seen, name):
    for rank in seen[name]:
        assert rank["equal"]
        assert rank["written"] > 0


FSDP2 = ["fsdp2 resharded", "fsdp2 kept", "fsdp2 resharded to 2"]


class TestGatheredWeights:
    @pytest.mark.parametrize("name", FSDP2)
    def test_are_not_written(self, seen, name):
        """The bytes written in 20 steps are those of the activations."""
        for rank in seen[name]:
            assert rank["written"] == 20 * ACTIVATIONS

    @pytest.mark.parametrize("name", FSDP2)
    def test_are_not_held(self, seen, name):
        """After the forward pass there is as much of them in memory as without an offloader."""
        for rank in seen[name]:
            plain, offloaded = rank["gathered"]
            assert offloaded == plain
            assert (plain > 0) == (name == "fsdp2 kept")

    def test_are_freed_while_writes_are_under_way(self, seen):
        for rank in seen["fsdp2 while writing"]:
            assert rank["failures"] == 0
            assert rank["written"] <= 3 * ACTIVATIONS

    @pytest.mark.parametrize("name", ["fsdp1", "fsdp1 original parameters", "ddp", "ddp static graph"])
    def test_flat_and_replicated_ones_are_not_written(self, seen, name):
        for rank in seen[name]:
            assert rank["written"] <= 20 * ACTIVATIONS

    def test_of_low_precision_are_not_written(self, seen):
        """Inputs, and so activations, are of half the size."""
        for rank in seen["fsdp2 bfloat16"]:
            assert rank["written"] <= 20 * ACTIVATIONS // 2 + 20 * 4 * 128 * 64


class TestPipelines:
    @pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
    def test_activations_in_memory_are_at_most_half(self, seen, name):
        for rank in seen[name]:
            plain, offloaded = rank["peak"]
            assert offloaded <= plain / 2

    @pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
    def test_most_blocks_are_read_before_backward_asks(self, seen, name):
        """Of whichever micro-batch backward is at."""
        for rank in seen[name]:
            assert rank["hits"] > rank["misses"]


def test_one_rank_that_fails_does_not_hang_the_other(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch, ssdtrain
import torch.distributed as dist
dist.init_process_group("gloo")
offload = ssdtrain.OffloadActivations(min_tensor_bytes=1)
x = torch.randn(100, 100, requires_grad=True)
with offload:
    y = x.sin().exp()
if dist.get_rank() == 1:
    raise SystemExit(7)
y.sum().backward()
dist.barrier()
""",
        encoding="utf-8",
    )
    code, output = torchrun(program, seconds=100, SSDTRAIN_SPILL_DIR=str(tmp_path))
    assert code != 0
    assert "exitcode" in output
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
