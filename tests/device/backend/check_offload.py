"""Programs on the devices of `late`, spilled by a real offloader through torch's own streams and events."""

import pytest
import torch

import ssdtrain
from ssdtrain.testing.engine_suite import EngineSuite


class OnLate(EngineSuite):
    """All tensors that the suite makes are on a device."""

    device = "late:0"

    @pytest.fixture(autouse=True)
    def _on_device(self):
        with torch.device(self.device):
            yield


class TestIntoFiles(OnLate):
    @pytest.fixture
    def offload(self, tmp_path):
        with_files = ssdtrain.OffloadActivations(spill_dir=tmp_path, backend="direct", min_tensor_bytes=1)
        yield with_files
        with_files.close()


class TestIntoHostMemory(OnLate):
    device = "late:1"

    @pytest.fixture
    def offload(self):
        into_memory = ssdtrain.OffloadActivations(backend="host", min_tensor_bytes=1)
        yield into_memory
        into_memory.close()
