"""The contract of the offloader, through the accelerator's transfer, with each stream of copies late in turn."""

import pytest

from ssdtrain.storage import DirectStore, HostStore
from ssdtrain.testing import SimulatedDevice
from ssdtrain.testing.engine_suite import EngineSuite
from tests.device.kernels import offloader

OUT, IN = "side 1", "side 2"


class OnSimulatedDevice(EngineSuite):
    """What torch computes on CPU tensors runs at once, so that the stream of compute is never late here."""

    late: tuple[str, ...] = ()

    @pytest.fixture
    def offload(self, tmp_path):
        offload = offloader(SimulatedDevice(self.late), DirectStore(tmp_path))
        yield offload
        offload.close()


class TestNothingIsLate(OnSimulatedDevice):
    pass


class TestCopiesOutAreLate(OnSimulatedDevice):
    late = (OUT,)


class TestCopiesInAreLate(OnSimulatedDevice):
    late = (IN,)


class TestAllCopiesAreLate(OnSimulatedDevice):
    late = (OUT, IN)


class TestIntoHostMemory(OnSimulatedDevice):
    late = (OUT, IN)

    @pytest.fixture
    def offload(self):
        offload = offloader(SimulatedDevice(self.late), HostStore())
        yield offload
        offload.close()


class TestWithOneStagingBuffer(OnSimulatedDevice):
    late = (OUT, IN)

    @pytest.fixture
    def offload(self, tmp_path):
        offload = offloader(SimulatedDevice(self.late), DirectStore(tmp_path), buffers=1)
        yield offload
        offload.close()
