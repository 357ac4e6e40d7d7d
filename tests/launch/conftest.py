from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ssdtrain.launch.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One tokenizer cache for all tests that do not look at the cache itself."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path, cache_dir) -> Path:
    """A config file of a model that trains in moments; blocks from 16 KiB on are offloaded."""
    config = {
        "model": {"layers": 2, "hidden_size": 64, "heads": 2, "vocab_size": 512, "sequence_length": 64},
        "data": {"files": "$PYTHON_STDLIB/a*.py", "max_bytes": "100kB", "cache_dir": str(cache_dir)},
        "train": {"steps": 4, "warmup_steps": 1, "batch_size": 4},
        "offload": {"spill_dir": str(tmp_path), "min_tensor_bytes": "16KiB", "min_free_bytes": 0},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def run_tiny(tiny, tmp_path):
    """Train in this process; returns what went into the JSON file."""

    def run(*options: str) -> dict:
        result = tmp_path / "result.json"
        assert main(["train", str(tiny), "--json", str(result), *options]) == 0
        return json.loads(result.read_text())

    return run
