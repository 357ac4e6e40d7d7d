"""The contract of `SpillStore`, for every implementation."""

import pytest

from ssdtrain.storage import DirectStore, HostStore, StripeStore, VerifyingStore
from ssdtrain.testing import GatedStore, RecordingStore, SlowStore
from ssdtrain.testing.suite import SpillStoreSuite


class TestDirectStore(SpillStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        store = DirectStore(tmp_path, direct=True)
        yield store
        store.close()


class TestBufferedStore(SpillStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        store = DirectStore(tmp_path, direct=False)
        yield store
        store.close()


class TestStripeStore(SpillStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        directories = [tmp_path / "one", tmp_path / "two"]
        for directory in directories:
            directory.mkdir()
        store = StripeStore([DirectStore(directory) for directory in directories])
        yield store
        store.close()


class TestHostStore(SpillStoreSuite):
    @pytest.fixture
    def store(self):
        store = HostStore()
        yield store
        store.close()


class TestVerifyingStore(SpillStoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        pytest.importorskip("xxhash")
        store = VerifyingStore(DirectStore(tmp_path))
        yield store
        store.close()


class TestStoresForTests(SpillStoreSuite):
    @pytest.fixture
    def store(self):
        store = SlowStore(GatedStore(RecordingStore(HostStore()), hold=()), bandwidth=100e9)
        yield store
        store.close()
