"""Text files into token ids: a tokenizer trained on them, cached, and random windows as batches."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import string
import sysconfig
import tempfile
from array import array
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ssdtrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Generator, Tensor

    from ssdtrain.launch.config import DataConfig, LaunchConfig

__all__ = ["END", "MASK", "PAD", "Corpus", "batches", "find_files", "load_corpus"]

# Special tokens come first in the vocabulary: their ids do not depend on the text.
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|mask|>")
PAD, END, MASK = range(3)

# Raise it whenever the same text would give other files in the cache.
CACHE_FORMAT = 1

# Tokens that BERT has to guess; of these 80% are masked, 10% replaced and 10% left (Devlin et al. 2018).
MASKED_FRACTION = 0.15


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids of all documents, one after the other, each closed by the end token."""

    tokens: Tensor
    """int32 on a memory map: only the pages in use take memory."""
    files: int
    skipped: int
    """Files that are not UTF-8 text or could not be read."""
    from_cache: bool


def find_files(data: DataConfig) -> list[Path]:
    """The files that the globs match, sorted, each once.

    Raises:
        ConfigError: A glob matches no file.
    """
    found: set[Path] = set()
    for pattern in data.patterns:
        variables = string.Template(pattern).safe_substitute(
            os.environ | {"PYTHON_STDLIB": glob.escape(sysconfig.get_path("stdlib"))}
        )
        expanded = Path(variables).expanduser()
        matches = {Path(match) for match in glob.glob(str(expanded), recursive=True)}  # noqa: PTH207 - absolute too
        matches = {match for match in matches if match.is_file()}
        if not matches:
            meaning = f" ({expanded})" if str(expanded) != pattern else ""
            better = " (of a folder: its name and /*.txt, say)" if expanded.is_dir() else ""
            raise ConfigError(
                f"data.files: no file matches {pattern!r}{meaning}; give a glob that does{better}"
            )
        found |= {match.resolve() for match in matches}
    return sorted(found)


def load_corpus(config: LaunchConfig) -> Corpus:
    """The token ids from the cache, else from a tokenizer trained now.

    Raises:
        ConfigError: No file holds text, there is too little of it, or the cache cannot be written.
    """
    files = find_files(config.data)
    cache = config.data.cache_directory
    entry = cache / f"text-{_cache_key(config, files)}"
    from_cache = _is_whole(entry)
    if not from_cache:
        # Before the cache is touched: a mistake leaves nothing behind.
        texts, skipped = _read_texts(files, config.data.byte_limit)
        if not texts:
            raise ConfigError(f"data.files: no file that matches holds UTF-8 text ({skipped} skipped)")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            building = tempfile.TemporaryDirectory(dir=cache, prefix=".building-", ignore_cleanup_errors=True)
        except OSError as error:
            raise ConfigError(f"data.cache_dir: cannot write to {cache}: {error.strerror}") from None
        with building as folder:
            _build_entry(Path(folder) / "entry", texts, skipped, config)
            _put_in_place(Path(folder), entry)
    return _open_entry(entry, config, len(files), from_cache)


def _cache_key(config: LaunchConfig, files: Sequence[Path]) -> str:
    stats = [(path, path.stat()) for path in files]
    state = {
        "format": CACHE_FORMAT,
        "tokenizers": version("tokenizers"),
        "vocab_size": config.model.vocab_size,
        "max_bytes": config.data.max_bytes,
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
    }
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24]


def _is_whole(entry: Path) -> bool:
    """Whether a cache entry is there and every file in it is as it was written."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        digests = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))["sha256"]
        return bool(digests) and all(_digest(entry / name) == digest for name, digest in digests.items())
    return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build_entry(folder: Path, texts: Sequence[str], skipped: int, config: LaunchConfig) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.model.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    count = 0
    with (folder / "tokens.bin").open("wb") as file:
        for text in texts:
            ids = array("i", [*tokenizer.encode(text).ids, END])
            ids.tofile(file)
            count += len(ids)
    _check_length(count, config)
    manifest = {
        "tokens": count,
        "skipped": skipped,
        "sha256": {name: _digest(folder / name) for name in ("tokenizer.json", "tokens.bin")},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _read_texts(files: Sequence[Path], byte_limit: int) -> tuple[list[str], int]:
    texts, skipped, left = [], 0, byte_limit
    for path in files:
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                raw = file.read(left)
                whole = not file.read(1)
            # A file cut at the limit may end within a character: the decoder drops that one.
            text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        if "\0" in text:
            skipped += 1
        elif text:
            texts.append(text)
            left -= len(raw)
    return texts, skipped


def _put_in_place(building: Path, entry: Path) -> None:
    """Move a finished entry to its name in one step; what another process put there meanwhile is as good."""
    if _is_whole(entry):
        return
    if entry.exists():
        entry.rename(building / "damaged")
    try:
        (building / "entry").rename(entry)
    except OSError:
        if not _is_whole(entry):
            raise


def _open_entry(entry: Path, config: LaunchConfig, files: int, from_cache: bool) -> Corpus:
    import torch

    manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
    # The entry may come from a run with shorter sequences.
    count = manifest["tokens"]
    _check_length(count, config)
    tokens = torch.from_file(str(entry / "tokens.bin"), shared=False, size=count, dtype=torch.int32)
    return Corpus(tokens=tokens, files=files, skipped=manifest["skipped"], from_cache=from_cache)


def _check_length(count: int, config: LaunchConfig) -> None:
    length = config.model.sequence_length
    if count <= length:
        raise ConfigError(
            f"data.files: the text has {count} tokens, too few for a sequence of {length} "
            f"(model.sequence_length); give more text or a larger data.max_bytes"
        )


def batches(
    tokens: Tensor, config: LaunchConfig, rank: int = 0, ranks: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Endless batches of random windows, as keyword arguments of the model; the seed alone decides them.

    Args:
        tokens: To cut the windows from.
        config: Its sizes and seed.
        rank: Which share of each step's windows.
        ranks: How many shares there are.
    """
    import torch

    generator = torch.Generator().manual_seed(config.train.seed)
    length, size = config.model.sequence_length, config.train.batch_size
    while True:
        starts = torch.randint(0, len(tokens) - length, (size * ranks,), generator=generator)[rank::ranks]
        inputs = torch.stack([tokens[start : start + length] for start in starts.tolist()]).long()
        if config.model.kind == "bert":
            yield _masked(inputs, config.model.vocab_size, generator)
        else:
            # The model shifts the labels itself.
            yield {"input_ids": inputs, "labels": inputs.clone()}


def _masked(inputs: Tensor, vocab_size: int, generator: Generator) -> dict[str, Tensor]:
    import torch

    chance = torch.rand(inputs.shape, generator=generator)
    # One in every batch at least, else the loss is the mean of nothing.
    guessed = (chance < MASKED_FRACTION) | (chance == chance.min())
    labels = torch.where(guessed, inputs, -100)
    fate = torch.rand(inputs.shape, generator=generator)
    replacement = torch.randint(len(SPECIAL_TOKENS), vocab_size, inputs.shape, generator=generator)
    replacement = torch.where(fate < 0.8, MASK, replacement)
    return {"input_ids": torch.where(guessed & (fate < 0.9), replacement, inputs), "labels": labels}
