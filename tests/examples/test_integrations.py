"""The examples of each way in: they offload, and train as they do without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Widths whose activations reach the default min_tensor_bytes.
EXAMPLES = {
    "hf_trainer": ["--width", "128"],
    "trl_sft": ["--width", "128"],
    "accelerate_loop": ["--width", "128"],
    "lightning_module": ["--width", "256"],
}

# Both ways in one process, since importing takes longer than training.
TWICE = """
import runpy, sys
path, *options = sys.argv[1:]
for way in ([], ["--keep"]):
    sys.argv = [path, *options, *way]
    runpy.run_path(path)
"""


@pytest.mark.parametrize("name", EXAMPLES)
def test_activations_are_written_and_losses_are_those_without(name, tmp_path):
    example = str(ROOT / "examples" / f"{name}.py")
    options = ["--spill-dir", str(tmp_path), "--steps", "2", *EXAMPLES[name]]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, example, *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said, said_of_keep = re.findall(r"^offloaded .*", done.stdout, re.MULTILINE)
    assert float(re.search(r"([\d.]+) MB written", said)[1]) > 1
    assert said_of_keep == "offloaded nothing"
    losses = re.findall(r"^step \d+: loss (\S+)", done.stdout, re.MULTILINE)
    assert len(losses) == 4
    assert losses[:2] == losses[2:]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_enough_to_read_at_once(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80
