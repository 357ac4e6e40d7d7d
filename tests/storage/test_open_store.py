"""Which store a config gives."""

import errno
import os
import sys

import pytest
import torch

import ssdtrain
from ssdtrain import storage
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError, StoreError
from ssdtrain.storage import DirectStore, HostStore, StripeStore, TieredStore, VerifyingStore, open_store
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.testing.suite import content, filled, read_back, same

from .helpers import open_descriptors

MIB = 1 << 20


@pytest.fixture
def two(tmp_path):
    """Two directories."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    return directories


@pytest.fixture
def opened():
    """`open_store` with the options as arguments; closes what it opened."""
    stores = []

    def open_with(**options):
        stores.append(open_store(OffloadConfig(**options)))
        return stores[-1]

    yield open_with
    for store in stores:
        store.close()


@pytest.fixture
def refuse_direct(monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)


def refused_at(store, nbytes):
    with pytest.raises(StoreError) as caught:
        store.allocate(nbytes)
    return caught.value


def test_one_directory_gives_one_file(opened, tmp_path):
    store = opened(spill_dir=tmp_path)
    assert isinstance(store, DirectStore)
    assert (store.backend, store.members) == ("direct", 1)


def test_several_directories_are_striped(opened, two):
    store = opened(spill_dir=two)
    assert isinstance(store, StripeStore)
    assert (store.backend, store.members) == ("direct", 2)


def test_host_needs_no_directory(opened):
    assert isinstance(opened(backend="host", spill_dir="/nowhere"), HostStore)


def test_the_environment_names_directories(opened, two, monkeypatch):
    monkeypatch.setenv("SSDTRAIN_SPILL_DIR", ":".join(map(str, two)))
    assert opened().members == 2


def test_an_error_says_that_the_environment_named_the_directory(opened, monkeypatch):
    monkeypatch.setenv("SSDTRAIN_SPILL_DIR", "/nowhere/spill")
    with pytest.raises(ConfigError, match=r"from \$SSDTRAIN_SPILL_DIR\) does not exist"):
        opened()


def test_verify_is_put_around(opened, two):
    pytest.importorskip("xxhash")
    store = opened(spill_dir=two, verify=True)
    assert isinstance(store, VerifyingStore)
    assert store.members == 2


@pytest.mark.usefixtures("refuse_direct")
def test_auto_takes_what_there_is(opened, tmp_path):
    assert opened(spill_dir=tmp_path, backend="auto").backend == "buffered"


@pytest.mark.usefixtures("refuse_direct")
def test_direct_is_an_error_where_it_is_refused(opened, tmp_path):
    with pytest.raises(ConfigError, match="refuses O_DIRECT"):
        opened(spill_dir=tmp_path, backend="direct")


def test_the_quota_is_shared_by_the_directories(opened, two):
    store = opened(spill_dir=two, max_spill_bytes=4 * MIB)
    assert [store.allocate(MIB).member for _ in range(4)] == [0, 1, 0, 1]
    assert "max_spill_bytes allows 2097152 bytes here" in str(refused_at(store, MIB))


def test_the_quota_holds_in_host_memory(opened):
    store = opened(backend="host", max_spill_bytes="1MiB")
    store.allocate(MIB)
    assert refused_at(store, 1).errno == errno.ENOSPC


def test_host_memory_bytes_are_the_quota_too(opened):
    store = opened(backend="host", host_memory_bytes="1MiB")
    assert isinstance(store, HostStore)
    store.allocate(MIB)
    assert "host_memory_bytes" in str(refused_at(store, 1))


class Pinned:
    """As where there is an accelerator."""

    pinned = True

    def __init__(self):
        self.made = []

    def allocate(self, nbytes):
        self.made.append(nbytes)
        return page_aligned(nbytes)


@pytest.fixture
def pinned(monkeypatch):
    memory = Pinned()
    monkeypatch.setattr("ssdtrain.memory.pinned.PinnedMemory", lambda: memory)
    return memory


def test_host_memory_is_put_before_the_disk(opened, two, pinned):
    store = opened(spill_dir=two, host_memory_bytes="3MiB")
    assert isinstance(store, TieredStore)
    assert (store.backend, store.members) == ("host+direct", 2)
    store.allocate(MIB)
    assert pinned.made == [2 * MIB]


def test_host_memory_alone_is_pinned_too(opened, pinned):
    opened(backend="host").allocate(MIB)
    assert len(pinned.made) == 1


def test_verify_is_put_around_host_memory(opened, tmp_path, pinned):
    pytest.importorskip("xxhash")
    store = opened(spill_dir=tmp_path, host_memory_bytes="3MiB", verify=True)
    assert isinstance(store, VerifyingStore)
    assert store.backend == "host+direct"


def test_host_memory_without_an_accelerator_warns_and_works(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="there is no accelerator.*Set it to 0"):
        store = opened(spill_dir=tmp_path, host_memory_bytes="3MiB")
    source = filled(MIB, seed=1)
    extent = store.allocate(MIB)
    store.write(extent, source)
    assert same(read_back(store, extent, MIB), content(source))


def test_the_warning_names_the_users_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="no accelerator") as warned:
        ssdtrain.OffloadActivations(spill_dir=tmp_path, min_free_bytes=0, host_memory_bytes="3MiB").close()
    assert warned[0].filename == __file__


def test_a_warning_that_is_an_error_leaves_no_descriptor(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    before = open_descriptors()
    with pytest.raises(RuntimeWarning):
        opened(spill_dir=tmp_path, host_memory_bytes="3MiB")
    assert open_descriptors() == before


def test_min_free_bytes_reach_the_store(opened, tmp_path):
    assert "min_free_bytes" in str(refused_at(opened(spill_dir=tmp_path, min_free_bytes="1024TiB"), MIB))


def test_the_first_directory_is_closed_when_the_second_fails(opened, two, monkeypatch):
    first = DirectStore(two[0])
    monkeypatch.setattr(storage, "DirectStore", lambda directory, **_options: {two[0]: first}[directory])
    with pytest.raises(KeyError):
        opened(spill_dir=two)
    with pytest.raises(StoreError, match="closed"):
        first.allocate(1)


def test_a_second_directory_that_fails_leaves_no_descriptor(opened, two):
    before = open_descriptors()
    with pytest.raises(ConfigError, match="does not exist"):
        opened(spill_dir=[two[0], two[1] / "missing"])
    assert open_descriptors() == before


def test_the_store_is_closed_when_verify_cannot_be(opened, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    before = open_descriptors()
    with pytest.raises(ConfigError, match="xxhash"):
        opened(spill_dir=tmp_path, verify=True)
    assert open_descriptors() == before


@pytest.mark.parametrize("other", ["same", "dotted", "linked"])
def test_a_directory_named_twice_is_refused(opened, tmp_path, other):
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    second = {"same": "one", "dotted": "one/../one", "linked": "link"}[other]
    with pytest.raises(ConfigError, match="are one directory"):
        opened(spill_dir=[tmp_path / "one", tmp_path / second])


def test_a_missing_directory_named_twice_is_refused_too(opened, tmp_path):
    with pytest.raises(ConfigError, match="spill_dir"):
        opened(spill_dir=[tmp_path / "missing", tmp_path / "missing"])
