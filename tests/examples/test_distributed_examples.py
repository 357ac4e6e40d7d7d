from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 100


def run_example(name: str, spill_dir: Path, *options: str) -> tuple[list[str], list[float]]:
    """The losses as printed, and the megabytes written by each rank."""
    # 256 wide: activations of 1 or 2 MiB, as large as the default min_tensor_bytes.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        str(EXAMPLES / name),
        "--spill-dir",
        str(spill_dir),
        "--steps",
        "3",
        "--width",
        "256",
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    written = re.findall(r"([\d.]+) MB written", done.stdout)
    # torchrun does not buffer: what one rank prints may follow another's before the line ends.
    return re.findall(r"loss ([\d.]+)", done.stdout), [float(megabytes) for megabytes in written]


@pytest.mark.parametrize("name", ["fsdp2.py", "pipeline.py"])
def test_both_ranks_offload_and_losses_are_the_same_to_the_last_digit(name, tmp_path):
    losses, written = run_example(name, tmp_path)
    losses_of_keep, written_by_keep = run_example(name, tmp_path, "--keep")
    assert losses == losses_of_keep
    assert len(losses) == 3
    assert len(written) == 2
    assert min(written) > 1
    assert written_by_keep == [0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["fsdp2.py", "pipeline.py"])
def test_example_is_short_enough_to_read_at_once(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 80
