"""Every mistake that a user can make: one line on stderr that names the key, exit code 2, nothing begun."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ssdtrain.launch.cli import main

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {
    # Keys
    "misspelt option": (["--model.layres", "3"], "model.layres: no such option; did you mean model.layers?"),
    "misspelt section": (["--modle.layers", "3"], "modle: no such key; did you mean"),
    "option of offloading": (["--offload.spil_dir", "/tmp"], "did you mean offload.spill_dir?"),
    "whole section": (["--model", "x.yaml"], "model: is a section"),
    "no value": (["--model.layers"], "--model.layers: expected one argument"),
    "stray word": (["more"], "unrecognized arguments: more"),
    # Types
    "word for a number": (["--model.layers", "four"], "model.layers: expected a whole number, got four"),
    "fraction": (["--train.steps", "1.5"], "train.steps: expected a whole number, got 1.5"),
    "null": (["--train.seed", "null"], "train.seed: expected a whole number, got null"),
    "size": (["--offload.prefetch_bytes", "12 apples"], "offload.prefetch_bytes: expected bytes"),
    # Ranges
    "unknown kind": (["--model.kind", "gtp2"], "model.kind: expected one of gpt2, llama, bert, got gtp2"),
    "unknown mode": (["--mode", "forget"], "mode: expected one of keep, recompute, offload, got forget"),
    "no layers": (["--model.layers", "0"], "model.layers: expected a whole number of at least 1, got 0"),
    "heads": (["--model.heads", "7"], "model.heads: expected a divisor of model.hidden_size (64), got 7"),
    "odd heads of llama": (["--model.kind", "llama", "--model.heads", "64"], "model.heads: expected"),
    "vocabulary": (
        ["--model.vocab_size", "100"],
        "model.vocab_size: expected a whole number of at least 259",
    ),
    "dropout": (["--model.dropout", "1"], "model.dropout: expected null or a number from 0 to below 1"),
    "only warm-up": (
        ["--train.steps", "1"],
        "train.warmup_steps: expected fewer than train.steps (1), got 1",
    ),
    "learning rate": (["--train.learning_rate", "-1"], "train.learning_rate: expected a number above 0"),
    "learning rate is no number": (
        ["--train.learning_rate", ".nan"],
        "train.learning_rate: expected a number above 0",
    ),
    "weight decay": (["--train.weight_decay", "-1"], "train.weight_decay: expected 0 or more"),
    "seed": (["--train.seed", "-1"], "train.seed: expected a whole number from 0"),
    "dtype": (["--train.dtype", "float8"], "train.dtype: expected one of float32, bfloat16, got float8"),
    "negative size": (["--offload.max_spill_bytes", "-1"], "offload.max_spill_bytes: expected a size"),
    "negative size with a unit": (
        ["--offload.prefetch_bytes=-1MiB"],
        "offload.prefetch_bytes: expected a size from 0",
    ),
    "nothing may be written": (
        ["--offload.min_free_bytes", "100TiB"],
        "offload.min_free_bytes: ",
    ),
    "absurd size": (["--offload.max_spill_bytes", "9000000TiB"], "offload.max_spill_bytes: expected a size"),
    "threads": (["--offload.io_threads", "0"], "offload.io_threads: expected a whole number from 1"),
    "backend": (["--offload.backend", "tape"], "offload.backend: expected one of"),
    # Overrides of the transformers config
    "override": (
        ["--model.overrides.n_iner", "3"],
        "model.overrides.n_iner: GPT2Config has no such option; did you mean",
    ),
    "override of ours": (
        ["--model.overrides.n_layer", "3"],
        "model.overrides.n_layer: set by the other options",
    ),
    "override of a wrong type": (
        ["--model.overrides.n_inner", "x"],
        "model.overrides: GPT2Config refuses them",
    ),
    # Files
    "no data": (["--data.files", "[]"], "data.files: expected a glob of text files"),
    "empty glob": (["--data.files", "/nowhere/*.txt"], "data.files: no file matches '/nowhere/*.txt'"),
    "a folder": (["--data.files", "/etc"], "(of a folder: its name and /*.txt, say)"),
    "one empty glob": (
        ["--data.files", "['$PYTHON_STDLIB/a*.py', '/nowhere/*']"],
        "no file matches '/nowhere/*'",
    ),
    "binary": (
        ["--data.files", "/proc/self/exe"],
        "data.files: no file that matches holds UTF-8 text (1 skipped)",
    ),
    "little text": (["--data.max_bytes", "50"], "data.files: the text has"),
    "no text wanted": (["--data.max_bytes", "0"], "data.max_bytes: expected a whole number of at least 1"),
    "cache": (["--data.cache_dir", "/proc/cache"], "data.cache_dir: cannot write to /proc/cache"),
    "spill directory is missing": (
        ["--offload.spill_dir", "/nowhere"],
        "offload.spill_dir: '/nowhere' does not exist",
    ),
    "spill directory is a file": (
        ["--offload.spill_dir", "/etc/passwd"],
        "offload.spill_dir: '/etc/passwd' is not a",
    ),
    "spill directory refuses files": (["--offload.spill_dir", "/proc"], "offload.spill_dir: '/proc'"),
    "JSON": (["--json", "/nowhere/result.json"], "--json: cannot write /nowhere/result.json"),
    "JSON is a directory": (["--json", "/"], "--json: cannot write /: Is a directory"),
    # The command itself
    "rounds": (["--compare", "--rounds", "0"], "--rounds: expected at least 1"),
    "rounds of nothing": (["--rounds", "2"], "--rounds: expected at least 1, and --compare with it"),
    "rounds of a wrong type": (["--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
    "compare too": (
        ["--compare", "--offload.spill_dir", "/nowhere"],
        "offload.spill_dir: '/nowhere' does not exist",
    ),
}

FILES = {
    "nothing": ("", "expected a mapping with the keys mode, parallel, model, data, train, offload"),
    "list": ("- model", "expected a mapping with the keys"),
    "syntax": ("model: {layers: 3\n", "bad.yaml, line 2: not valid YAML"),
    "null section": ("model:\n", "model: expected a mapping of options below it"),
    "number for a section": ("model: 3\n", "model: expected a mapping of options below it"),
    "misspelt section": ("modle: {layers: 3}\n", "modle: no such key; did you mean"),
    "misspelt option": (
        "train: {batchsize: 3}\n",
        "train.batchsize: no such option; did you mean train.batch_size?",
    ),
    "wrong type": ("model: {layers: many}\n", "model.layers: expected a whole number, got many"),
    "mapping for a glob": (
        "data: {files: {a: 1}}\n",
        "data.files: expected text or a list of text, got {'a': 1}",
    ),
    "number for a key": ("3: 4\n", "3: no such key"),
    "no data": ("model: {layers: 3}\n", "data.files: expected a glob of text files"),
}


def everything_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def assert_one_line(captured, expected: str) -> None:
    assert captured.out == ""
    assert captured.err.startswith("ssdtrain: error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_bad_option(options, expected, tiny, tmp_path, cache_dir, capsys):
    before = everything_below(tmp_path), everything_below(cache_dir)
    assert main(["train", str(tiny), *options]) == 2
    assert_one_line(capsys.readouterr(), expected)
    assert (everything_below(tmp_path), everything_below(cache_dir)) == before


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_bad_config_file(text, expected, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["train", str(path)]) == 2
    assert_one_line(capsys.readouterr(), expected)


def test_config_file_that_is_a_directory(tmp_path, capsys):
    assert main(["train", str(tmp_path)]) == 2
    assert_one_line(capsys.readouterr(), f"{tmp_path}: cannot be read as a config file")


def test_config_file_that_is_not_text(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["train", str(tmp_path / "bad.yaml")]) == 2
    assert_one_line(capsys.readouterr(), "cannot be read as a config file")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "trian: no such command; the commands are: train"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["train"], "the config file is missing"),
        (["train", "--train.steps", "3"], "the config file is missing"),
    ],
)
def test_bad_command(arguments, expected, capsys):
    assert main(arguments) == 2
    assert_one_line(capsys.readouterr(), expected)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_read_only_spill_directory(tiny, tmp_path, capsys):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert main(["train", str(tiny), "--offload.spill_dir", str(locked)]) == 2
    assert_one_line(capsys.readouterr(), "is not writable by this user")
