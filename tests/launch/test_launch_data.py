from __future__ import annotations

import itertools

import pytest
import torch

from ssdtrain.launch.data import END, MASK, batches, find_files, load_corpus
from ssdtrain.launch.parse import parse_config

TEXT = "It was the best of times, it was the worst of times.\n" * 50


@pytest.fixture
def corpus_config(tmp_path):
    """The config of a small corpus with a cache of its own; options go on top."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("b.txt", "a.txt"):
        (texts / name).write_text(name + TEXT)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"data: {{files: {texts}/*.txt, cache_dir: {tmp_path}/cache}}\n"
        "model: {vocab_size: 300, sequence_length: 32}\ntrain: {batch_size: 4}\n"
    )
    return lambda *options: parse_config(path, options)


def cached_files(tmp_path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "cache").rglob("*.*")}


def first_batches(config, count: int = 3) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(batches(load_corpus(config).tokens, config), count))


class TestFiles:
    def test_are_sorted_and_taken_once(self, corpus_config, tmp_path):
        globs = f"['{tmp_path}/texts/*.txt', '{tmp_path}/**/a.*']"
        found = find_files(corpus_config("--data.files", globs).data)
        assert [path.name for path in found] == ["a.txt", "b.txt"]

    def test_environment_variables_are_expanded(self, corpus_config, tmp_path, monkeypatch):
        monkeypatch.setenv("MY_TEXTS", str(tmp_path / "texts"))
        assert len(find_files(corpus_config("--data.files", "$MY_TEXTS/a.*").data)) == 1

    def test_standard_library_is_there(self, corpus_config):
        assert [
            path.name for path in find_files(corpus_config("--data.files", "$PYTHON_STDLIB/abc.py").data)
        ] == ["abc.py"]

    def test_binary_ones_are_skipped_and_counted(self, corpus_config, tmp_path):
        (tmp_path / "texts" / "c.txt").write_bytes(b"\xff\xfe")
        (tmp_path / "texts" / "d.txt").write_bytes(b"zero\0byte")
        corpus = load_corpus(corpus_config())
        assert (corpus.files, corpus.skipped) == (4, 2)

    def test_limit_may_fall_within_a_character(self, corpus_config, tmp_path):
        (tmp_path / "texts" / "a.txt").write_text("".join(map(chr, range(0xE0, 0x17F))) * 10)
        corpus = load_corpus(corpus_config("--data.max_bytes", "1001"))
        assert corpus.skipped == 0
        assert len(corpus.tokens) > 0


class TestTokens:
    def test_documents_end_with_the_end_token(self, corpus_config):
        tokens = load_corpus(corpus_config()).tokens
        assert tokens[-1] == END
        assert (tokens == END).sum() == 2

    def test_decode_to_the_text(self, corpus_config, tmp_path):
        from tokenizers import Tokenizer

        tokens = load_corpus(corpus_config()).tokens
        (file,) = (tmp_path / "cache").rglob("tokenizer.json")
        text = Tokenizer.from_file(str(file)).decode(tokens.tolist())
        assert text == "a.txt" + TEXT + "b.txt" + TEXT

    def test_vocabulary_may_be_larger_than_the_text_yields(self, corpus_config):
        config = corpus_config("--model.vocab_size", "50000")
        assert load_corpus(config).tokens.max() < 50000


class TestCache:
    def test_second_run_trains_no_tokenizer(self, corpus_config, tmp_path):
        assert not load_corpus(corpus_config()).from_cache
        before = cached_files(tmp_path)
        assert load_corpus(corpus_config()).from_cache
        assert cached_files(tmp_path) == before

    @pytest.mark.parametrize("name", ["tokens.bin", "tokenizer.json", "manifest.json"])
    @pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
    def test_damaged_entry_is_made_anew(self, name, damage, corpus_config, tmp_path):
        tokens = load_corpus(corpus_config()).tokens.clone()
        (victim,) = (tmp_path / "cache").rglob(name)
        whole = victim.read_bytes()
        if damage == "cut":
            victim.write_bytes(whole[: len(whole) // 2])
        elif damage == "changed":
            victim.write_bytes(b"\x01" + whole[1:])
        else:
            victim.unlink()
        again = load_corpus(corpus_config())
        assert not again.from_cache
        assert torch.equal(again.tokens, tokens)
        assert len(list((tmp_path / "cache").iterdir())) == 1

    def test_changed_text_is_read_again(self, corpus_config, tmp_path):
        load_corpus(corpus_config())
        (tmp_path / "texts" / "a.txt").write_text("Other text.\n" * 80)
        assert not load_corpus(corpus_config()).from_cache

    def test_other_vocabulary_is_another_entry(self, corpus_config):
        load_corpus(corpus_config())
        assert not load_corpus(corpus_config("--model.vocab_size", "310")).from_cache
        assert load_corpus(corpus_config()).from_cache

    def test_longer_sequences_than_the_cached_text(self, corpus_config):
        load_corpus(corpus_config())
        with pytest.raises(ValueError, match="too few for a sequence of 100000"):
            load_corpus(corpus_config("--model.sequence_length", "100000"))

    def test_default_place_follows_the_environment(self, corpus_config, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert corpus_config("--data.cache_dir", "null").data.cache_directory == tmp_path / "ssdtrain"


class TestBatches:
    @pytest.mark.parametrize("kind", ["gpt2", "bert"])
    def test_seed_decides_them(self, kind, corpus_config):
        one, same, other = (
            first_batches(corpus_config("--model.kind", kind, "--train.seed", seed, "--mode", mode))
            for seed, mode in (("1", "keep"), ("1", "offload"), ("2", "keep"))
        )
        for left, right in zip(one, same, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
        assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])

    def test_differ_from_step_to_step(self, corpus_config):
        first, second, _ = first_batches(corpus_config())
        assert not torch.equal(first["input_ids"], second["input_ids"])

    def test_are_windows_of_the_text(self, corpus_config):
        config = corpus_config()
        tokens = load_corpus(config).tokens.tolist()
        windows = {tuple(tokens[start : start + 32]) for start in range(len(tokens) - 31)}
        (batch,) = first_batches(config, 1)
        assert batch["input_ids"].shape == (4, 32)
        assert all(tuple(row) in windows for row in batch["input_ids"].tolist())
        assert torch.equal(batch["labels"], batch["input_ids"])

    def test_masked_ones_hide_what_is_asked(self, corpus_config):
        config = corpus_config("--model.kind", "bert", "--train.batch_size", "200")
        (batch,) = first_batches(config, 1)
        asked = batch["labels"] != -100
        assert 0.13 < asked.float().mean() < 0.17
        assert 0.75 < (batch["input_ids"][asked] == MASK).float().mean() < 0.85
        assert not (batch["input_ids"][~asked] == MASK).any()

    def test_masked_ones_ask_something_in_the_smallest_batch(self, corpus_config):
        options = ("--model.kind", "bert", "--train.batch_size", "1", "--model.sequence_length", "2")
        for batch in first_batches(corpus_config(*options), 50):
            assert (batch["labels"] != -100).any()
