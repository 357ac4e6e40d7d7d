from __future__ import annotations

from pathlib import Path

import pytest

from ssdtrain.launch.cli import main
from ssdtrain.launch.data import find_files
from ssdtrain.launch.model import build_model, transformers_config
from ssdtrain.launch.parse import parse_config

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_command_line_wins_over_the_file(tiny):
    config = parse_config(tiny, ["--model.layers", "5", "--offload.prefetch_bytes=12GiB", "--mode", "keep"])
    assert config.model.layers == 5
    assert config.model.hidden_size == 64
    assert config.offload.prefetch_bytes == 12 << 30
    assert config.mode == "keep"


def test_sizes_are_read_from_the_file_too(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {files: x, max_bytes: 3MiB}\noffload: {spill_dir: [/a, /b], store_queue_bytes: 1GB}\n"
    )
    config = parse_config(path, [])
    assert config.data.byte_limit == 3 << 20
    assert config.offload.store_queue_bytes == 10**9
    assert config.offload.directories == (Path("/a"), Path("/b"))


def test_numbers_in_scientific_notation(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data: {files: x}\ntrain: {learning_rate: 1e-3}\n")
    assert parse_config(path, []).train.learning_rate == 1e-3
    assert parse_config(path, ["--train.learning_rate", "2e-5"]).train.learning_rate == 2e-5


def test_several_globs_on_the_command_line(tiny):
    config = parse_config(tiny, ["--data.files", "['a/*.txt', 'b/*.txt']"])
    assert config.data.patterns == ["a/*.txt", "b/*.txt"]


def test_printed_config_can_be_fed_back(tiny, tmp_path, capsys):
    options = ["--train.steps", "7", "--offload.max_spill_bytes", "2GiB", "--model.dropout", "0.2"]
    assert main(["train", str(tiny), *options, "--print_config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parse_config(printed, []) == parse_config(tiny, options)


def test_config_of_the_json_file_can_be_fed_back(run_tiny, tiny, tmp_path):
    import json

    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(run_tiny("--mode", "keep")["config"]))
    assert parse_config(again, []) == parse_config(tiny, ["--mode", "keep"])


def test_printed_config_is_checked_first(tiny, capsys):
    assert main(["train", str(tiny), "--model.heads", "7", "--print_config"]) == 2
    assert "model.heads" in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_config(path):
    config = parse_config(path, [])
    assert find_files(config.data)
    transformers_config(config.model)


def test_shipped_configs_cover_every_architecture():
    assert {parse_config(path, []).model.kind for path in SHIPPED} == {"gpt2", "llama", "bert"}


def dropouts(kind: str, tiny, *options: str) -> set[float]:
    import torch

    model = build_model(
        transformers_config(parse_config(tiny, ["--model.kind", kind, *options]).model), "keep"
    )
    return {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


def test_dropout_is_the_architectures_own(tiny):
    assert dropouts("gpt2", tiny) == dropouts("bert", tiny) == {0.1}


def test_dropout_can_be_set(tiny):
    for kind in ("gpt2", "bert"):
        assert dropouts(kind, tiny, "--model.dropout", "0.25") == {0.25}


def test_overrides_reach_the_model(tiny):
    config = parse_config(tiny, ["--model.kind", "llama", "--model.overrides.num_key_value_heads", "1"])
    model = build_model(transformers_config(config.model), "keep")
    assert model.model.layers[0].self_attn.k_proj.out_features == 32
