from __future__ import annotations

from pathlib import Path

import pytest

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import StoreError
from ssdtrain.storage import open_store
from ssdtrain.storage.sharing import directories_of_rank

DISKS = [Path(name) for name in "abcd"]


@pytest.fixture
def be_rank(monkeypatch):
    def be(rank, ranks):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return be


@pytest.mark.parametrize(
    ("ranks", "disks", "shares"),
    [
        (1, 3, ["abc"]),
        (2, 4, ["ac", "bd"]),
        (2, 3, ["ac", "b"]),
        (3, 3, ["a", "b", "c"]),
        (4, 2, ["a", "b", "a", "b"]),
        (3, 1, ["a", "a", "a"]),
    ],
)
def test_directories_are_divided_by_local_rank(be_rank, ranks, disks, shares):
    for rank, share in enumerate(shares):
        be_rank(rank, ranks)
        assert directories_of_rank(DISKS[:disks]) == tuple(map(Path, share))


def test_one_process_has_all_directories(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert directories_of_rank(DISKS) == tuple(DISKS)


def test_garbage_in_the_environment_is_one_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "first")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "-2")
    assert directories_of_rank(DISKS) == tuple(DISKS)


def test_quota_is_shared_by_the_ranks_of_a_machine(be_rank, tmp_path):
    be_rank(1, 4)
    store = open_store(OffloadConfig(spill_dir=tmp_path, max_spill_bytes="64KiB", min_free_bytes=0))
    try:
        store.allocate(16 << 10)
        with pytest.raises(StoreError):
            store.allocate(4 << 10)
    finally:
        store.close()
