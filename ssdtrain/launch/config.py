"""What `ssdtrain train` can be told: the sections of a config file, their defaults and their limits."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ssdtrain.config import OffloadConfig, in_bytes, parse_size
from ssdtrain.errors import ConfigError

__all__ = [
    "CHOICES",
    "MODES",
    "SECTIONS",
    "DataConfig",
    "LaunchConfig",
    "Mode",
    "ModelConfig",
    "Parallel",
    "TrainConfig",
]

Mode = Literal["keep", "recompute", "offload"]
MODES: tuple[Mode, ...] = get_args(Mode)
Parallel = Literal["none", "ddp", "fsdp"]

# The keys beside the sections.
CHOICES: dict[str, Any] = {"mode": Mode, "parallel": Parallel}

# A byte-level vocabulary holds all 256 bytes and the three special tokens of data.py.
MIN_VOCABULARY = 259


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of the transformers library with random weights."""

    kind: Literal["gpt2", "llama", "bert"] = "gpt2"
    """Architecture: "gpt2" and "llama" predict the next token, "bert" masked ones."""

    layers: int = 4
    """Transformer layers."""

    hidden_size: int = 256
    """Width of the model; the feed-forward width follows from it as the architecture's authors chose."""

    heads: int = 4
    """Attention heads; they divide `hidden_size`."""

    vocab_size: int = 4096
    """Rows of the embedding, and the most tokens that the tokenizer is trained to."""

    sequence_length: int = 256
    """Tokens in each sequence, and positions that the model knows."""

    dropout: float | None = None
    """Every dropout probability of the model. None: the architecture's own (GPT-2 and BERT 0.1, Llama 0)."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Further options of the transformers config, by its own names, e.g. `num_key_value_heads: 2`."""

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, ("gpt2", "llama", "bert"))
        for name in ("layers", "hidden_size", "heads"):
            _at_least(name, getattr(self, name), 1)
        _at_least("vocab_size", self.vocab_size, MIN_VOCABULARY)
        _at_least("sequence_length", self.sequence_length, 2)
        if self.hidden_size % self.heads:
            raise ConfigError(
                f"heads: expected a divisor of model.hidden_size ({self.hidden_size}), got {self.heads}"
            )
        # Llama's rotary embedding turns pairs of numbers.
        if self.kind == "llama" and self.hidden_size // self.heads % 2:
            raise ConfigError(
                f"heads: expected model.hidden_size / model.heads to be even for llama; "
                f"got {self.hidden_size} / {self.heads}"
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: expected null or a number from 0 to below 1, got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on."""

    files: str | list[str] = field(default_factory=list)
    """One glob of text files, or several; `**` reaches into folders. `~` and environment variables are
    expanded, and `$PYTHON_STDLIB` is the folder of Python's own library, which every machine has.
    Relative globs start at the working directory. There is no default."""

    max_bytes: int | str = "16MiB"
    """Most text that is used; files are taken in the order of their names until it is reached."""

    cache_dir: str | None = None
    """Where tokenizers and token ids are kept. None: `$XDG_CACHE_HOME/ssdtrain`, else ~/.cache/ssdtrain."""

    def __post_init__(self) -> None:
        if not self.patterns or not all(self.patterns):
            raise ConfigError(
                f"files: expected a glob of text files, such as 'texts/**/*.txt'; got {self.files!r}"
            )
        object.__setattr__(self, "max_bytes", parse_size(self.max_bytes, "max_bytes"))
        _at_least("max_bytes", self.byte_limit, 1)

    @property
    def patterns(self) -> list[str]:
        """The globs as a list."""
        return [self.files] if isinstance(self.files, str) else self.files

    @property
    def byte_limit(self) -> int:
        """`max_bytes` as a number."""
        return in_bytes(self.max_bytes)

    @property
    def cache_directory(self) -> Path:
        """The cache directory, after the environment and the default have been looked at."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssdtrain"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    steps: int = 20
    """Training steps, warm-up included."""

    warmup_steps: int = 2
    """First steps, trained like the others, that are left out of times and memory: in them the optimizer
    makes its state and offloading learns the order of the backward pass."""

    batch_size: int = 8
    """Sequences in each step, of each rank."""

    learning_rate: float = 3e-4
    """Of AdamW, constant."""

    weight_decay: float = 0.01
    """Of AdamW."""

    seed: int = 0
    """Of weights, batches and dropout. The same seed gives the same losses in every mode."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16": the forward pass runs under autocast; weights stay in float32."""

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("warmup_steps", self.warmup_steps, 1)
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps: expected fewer than train.steps ({self.steps}), got {self.warmup_steps}"
            )
        _at_least("batch_size", self.batch_size, 1)
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"learning_rate: expected a number above 0, got {self.learning_rate}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"weight_decay: expected 0 or more, got {self.weight_decay}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed: expected a whole number from 0 to below 2**63, got {self.seed}")
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """A whole config file."""

    mode: Mode
    parallel: Parallel = "none"
    """How the ranks that torchrun starts share the work: "ddp" or "fsdp" (FSDP2); "none" in a single process."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    offload: OffloadConfig

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they go into JSON and, being YAML as well, back into `ssdtrain train`."""
        plain = asdict(self)
        if plain["offload"]["spill_dir"] is not None:
            plain["offload"]["spill_dir"] = [str(path) for path in plain["offload"]["spill_dir"]]
        return plain


SECTIONS: dict[str, type[ModelConfig | DataConfig | TrainConfig | OffloadConfig]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "offload": OffloadConfig,
}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")
