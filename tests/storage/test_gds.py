"""GPUDirect Storage: the real kvikio, on a stand-in for the driver."""

import pytest

from ssdtrain.testing.device_suite import DeviceStoreSuite
from ssdtrain.testing.suite import SpillStoreSuite, same


class TestHostMemory(SpillStoreSuite):
    """Host buffers of a store that has the file open with kvikio too."""

    @pytest.fixture
    def store(self, gds_store):
        return gds_store


class TestDeviceMemory(DeviceStoreSuite):
    @pytest.fixture
    def store(self, gds_store):
        return gds_store

    @pytest.fixture
    def memory(self, stand_in):
        return stand_in.memory

    def test_each_device_has_its_own_memory(self, store, memory):
        data = [self.random_bytes(300_001, seed=device) for device in (0, 1)]
        extents = [self.write(store, data[device], memory, device=device) for device in (0, 1)]
        assert all(
            same(self.read(store, extents[device], memory, device=1 - device), data[device])
            for device in (0, 1)
        )
