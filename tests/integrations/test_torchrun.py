"""`Trainer` under torchrun: two processes, which talk over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(TESTS / "integrations" / "ddp_trainer.py"), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_model_is_in_ddp(ranks):
    assert [rank["wrapper"] for rank in ranks] == ["DistributedDataParallel"] * 2


def test_the_training_is_the_same(ranks):
    assert len(ranks[0]["losses"]) == 3
    assert all(rank["losses"] == rank["losses_of_keep"] and rank["same_weights"] for rank in ranks)


def test_each_rank_writes_and_unhooks_its_model(ranks):
    assert all(rank["bytes_written"] > 0 for rank in ranks)
    assert [rank["hooks"] for rank in ranks] == [0, 0]
