"""The contract of the offloader, through the accelerator's transfer, with each stream of copies late in turn."""

import pytest

from ssdtrain.memory.slabs import SlabArena
from ssdtrain.storage import DirectStore, HostStore, TieredStore
from ssdtrain.storage.bounce import page_aligned
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


class TestHostMemoryBeforeTheDisk(OnSimulatedDevice):
    """Blocks are filled in host memory, and read from there, or in pieces of the staging buffers after they moved."""

    late = (OUT, IN)

    @pytest.fixture
    def offload(self, tmp_path):
        slabs = SlabArena(page_aligned, 64 << 10, slab_bytes=32 << 10)
        store = TieredStore(HostStore(max_bytes=64 << 10, slabs=slabs), DirectStore(tmp_path))
        offload = offloader(SimulatedDevice(self.late), store)
        yield offload
        offload.close()


class TestHostMemoryThatIsLeftAtOnce(TestHostMemoryBeforeTheDisk):
    @pytest.fixture
    def offload(self, tmp_path):
        store = TieredStore(HostStore(max_bytes=1 << 30), DirectStore(tmp_path))
        store._enough = 0
        offload = offloader(SimulatedDevice(self.late), store)
        yield offload
        offload.close()


class TestWithOneStagingBuffer(OnSimulatedDevice):
    late = (OUT, IN)

    @pytest.fixture
    def offload(self, tmp_path):
        offload = offloader(SimulatedDevice(self.late), DirectStore(tmp_path), buffers=1)
        yield offload
        offload.close()
