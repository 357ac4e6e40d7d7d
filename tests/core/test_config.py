"""Options: what they accept, and errors that name them."""

import dataclasses
import threading
from pathlib import Path

import pytest

from ssdtrain import ConfigError, OffloadActivations, OffloadConfig, SSDTrainError
from ssdtrain.config import parse_size

SIZES = (
    *("min_tensor_bytes", "host_memory_bytes", "max_spill_bytes", "min_free_bytes", "prefetch_bytes"),
    "store_queue_bytes",
)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            (0, 0),
            (4096, 4096),
            ("4096", 4096),
            ("4096B", 4096),
            ("1KiB", 1024),
            ("1k", 1024),
            ("1KB", 1000),
            ("3 MiB", 3 << 20),
            ("3M", 3 << 20),
            ("12GiB", 12 << 30),
            ("12gib", 12 << 30),
            ("1.5GB", 1_500_000_000),
            ("2TiB", 2 << 40),
            (" 7 MB ", 7_000_000),
            (1 << 60, 1 << 60),
        ],
    )
    def test_are_numbers_of_bytes_or_have_a_unit(self, text, wanted):
        assert parse_size(text, "size") == wanted

    @pytest.mark.parametrize(
        "value",
        [
            *("", "many", "12 GiBs", "-1", "1e9", "0x10", "1,5GB", "GiB", "1 2", "2000000TiB"),
            *(-1, (1 << 60) + 1, 1.5, True, None, [1], b"1", float("nan")),
            *("9" * 400, "9" * 400 + "GiB", "1" + "0" * 30),
        ],
        ids=repr,
    )
    def test_of_any_other_kind_are_refused_by_name(self, value):
        with pytest.raises(ConfigError, match="the_option"):
            parse_size(value, "the_option")

    def test_are_exact(self):
        assert parse_size(str((1 << 53) + 1), "size") == (1 << 53) + 1

    @pytest.mark.parametrize("name", SIZES)
    def test_in_a_config_are_bytes(self, name):
        assert getattr(OffloadConfig(**{name: "3MiB"}), name) == 3 << 20

    @pytest.mark.parametrize("name", SIZES)
    def test_that_are_wrong_are_named(self, name):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            OffloadConfig(**{name: "lots"})


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("backend", "disk"),
            ("backend", None),
            ("on_store_error", "ignore"),
            ("on_full_queue", "drop"),
            ("io_threads", 0),
            ("io_threads", -1),
            ("io_threads", 65),
            ("io_threads", 1.0),
            ("io_threads", True),
            ("io_threads", "2"),
            ("verify", 1),
            ("verify", "yes"),
            ("spill_dir", ""),
            ("spill_dir", []),
            ("spill_dir", 5),
            ("spill_dir", ["/tmp", 5]),
            ("spill_dir", [""]),
            ("min_tensor_bytes", None),
            ("prefetch_bytes", None),
            ("host_memory_bytes", None),
            ("host_memory_bytes", -1),
        ],
    )
    def test_a_wrong_value_is_refused_by_name(self, name, value):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            OffloadConfig(**{name: value})

    def test_two_quotas_of_host_memory_contradict_each_other(self):
        with pytest.raises(ConfigError, match=r"^host_memory_bytes: .* got 2097152 and 1048576"):
            OffloadConfig(backend="host", host_memory_bytes="2MiB", max_spill_bytes="1MiB")

    @pytest.mark.parametrize("backend", ["host", "auto"])
    def test_a_quota_given_twice_is_none_too_many(self, backend):
        OffloadConfig(backend=backend, host_memory_bytes="2MiB", max_spill_bytes=2 << 20)

    def test_host_memory_and_disk_have_quotas_of_their_own(self):
        OffloadConfig(host_memory_bytes="2MiB", max_spill_bytes="1MiB")

    def test_an_error_lists_the_valid_values(self):
        with pytest.raises(ConfigError, match=r"auto.*direct.*host"):
            OffloadConfig(backend="disk")

    def test_an_unknown_option_lists_those_that_exist(self):
        with pytest.raises(ConfigError, match=r"^spil_dir: .*spill_dir"):
            OffloadActivations(spil_dir="/tmp")

    def test_errors_are_one_line(self):
        with pytest.raises(ConfigError) as caught:
            OffloadActivations(spill_dir="/nowhere/at/all")
        assert "\n" not in str(caught.value)
        assert "/nowhere/at/all" in str(caught.value)

    def test_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            OffloadConfig().io_threads = 3

    def test_are_given_by_keyword(self):
        with pytest.raises(TypeError):
            OffloadConfig("/tmp")

    def test_options_go_on_top_of_a_config(self):
        config = OffloadConfig.of(OffloadConfig(io_threads=3, verify=True), {"io_threads": 5})
        assert (config.io_threads, config.verify) == (5, True)

    def test_every_field_is_documented(self):
        text = Path(__import__("ssdtrain.config", fromlist=["config"]).__file__).read_text()
        for field in dataclasses.fields(OffloadConfig):
            after = text.split(f"    {field.name}: ", 1)[1].splitlines()[1]
            assert after.strip().startswith('"""'), field.name


class TestDirectories:
    def test_one_or_several(self):
        assert OffloadConfig(spill_dir="/a").directories == (Path("/a"),)
        assert OffloadConfig(spill_dir=["/a", Path("/b")]).directories == (Path("/a"), Path("/b"))

    def test_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("SSDTRAIN_SPILL_DIR", "/a:/b:")
        assert OffloadConfig().directories == (Path("/a"), Path("/b"))
        assert OffloadConfig(spill_dir="/c").directories == (Path("/c"),)

    def test_of_ones_own(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/somebody")
        monkeypatch.setenv("SSDTRAIN_SPILL_DIR", "~/b")
        assert OffloadConfig(spill_dir="~/a").directories == (Path("/home/somebody/a"),)
        assert OffloadConfig().directories == (Path("/home/somebody/b"),)

    @pytest.mark.parametrize("value", [None, "", ":"])
    def test_by_default(self, monkeypatch, value):
        monkeypatch.delenv("SSDTRAIN_SPILL_DIR", raising=False)
        if value is not None:
            monkeypatch.setenv("SSDTRAIN_SPILL_DIR", value)
        assert OffloadConfig().directories == (Path("/var/tmp"),)


@pytest.mark.parametrize(
    ("arguments", "options", "advice"),
    [
        ((), {"spil_dir": "/a"}, "spil_dir: no such option, did you mean spill_dir?"),
        ((), {"colour": "red"}, "colour: no such option; the options are spill_dir, "),
        ((None, "/a"), {}, "expected an OffloadConfig, got '/a'; options go by name, such as spill_dir="),
    ],
)
def test_what_was_meant(arguments, options, advice):
    with pytest.raises(ConfigError) as caught:
        OffloadActivations(*arguments, **options)
    assert advice in str(caught.value)


def test_more_threads_than_the_system_has(tmp_path, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SSDTrainError, match=r"io_threads: 2 threads .*can't start new thread.*choose fewer"):
        OffloadActivations(spill_dir=tmp_path, min_free_bytes=0)


def test_a_config_that_cannot_be_opened_leaves_no_thread(tmp_path):
    from .helpers import io_threads, open_fds

    threads, fds = len(io_threads()), open_fds()
    with pytest.raises(ConfigError):
        OffloadActivations(spill_dir=[tmp_path, tmp_path / "missing"], min_free_bytes=0)
    assert (len(io_threads()), open_fds()) == (threads, fds)
