from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def run_example(spill_dir: Path, *options: str) -> tuple[list[str], int]:
    """The losses as printed, and the megabytes written."""
    # 256 wide: activations of 2 MiB, above the default min_tensor_bytes.
    command = [sys.executable, str(EXAMPLE), "--spill-dir", str(spill_dir), "--steps", "3", "--width", "256"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    written = re.search(r"([\d.]+) MB written", done.stdout)
    assert (written is None) == ("offloaded nothing" in done.stdout)
    return re.findall(r"loss (\S+)", done.stdout), float(written[1]) if written else 0.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    spill_dir = tmp_path_factory.mktemp("spill")
    yield run_example(spill_dir), run_example(spill_dir, "--keep")
    assert list(spill_dir.iterdir()) == []


def test_activations_are_written(runs):
    (_, written), (_, written_by_keep) = runs
    assert written > 1
    assert written_by_keep == 0


def test_losses_equal_those_without_offloading_to_the_last_digit(runs):
    (losses, _), (losses_of_keep, _) = runs
    assert len(losses) == 3
    assert losses == losses_of_keep


def test_example_is_short_enough_to_read_at_once():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
