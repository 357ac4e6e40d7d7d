"""The contract of `OffloadActivations`, over every store and with budgets of every kind."""

import gc
import time

import pytest
import torch

import ssdtrain
from ssdtrain.storage import DirectStore, HostStore, StripeStore, TieredStore, VerifyingStore
from ssdtrain.testing import Fault, FaultyStore, OffloadOver, ReorderingStore, SlowStore
from ssdtrain.testing.engine_suite import EngineSuite

KIB = 1 << 10


class Suite(EngineSuite):
    """Over a store, with options."""

    __test__ = False
    options = {}  # noqa: RUF012 - a constant

    def open_store(self, directory):
        return DirectStore(directory)

    @pytest.fixture
    def offload(self, tmp_path):
        offload = OffloadOver(self.open_store(tmp_path), min_tensor_bytes=1, **self.options)
        yield offload
        offload.close()


class TestDirect(Suite):
    __test__ = True

    @pytest.fixture
    def offload(self, tmp_path):
        offload = ssdtrain.OffloadActivations(spill_dir=tmp_path, min_tensor_bytes=1, min_free_bytes=0)
        yield offload
        offload.close()


class TestBuffered(Suite):
    __test__ = True

    def open_store(self, directory):
        return DirectStore(directory, direct=False)


class TestStripes(Suite):
    __test__ = True

    def open_store(self, directory):
        directories = [directory / "one", directory / "two"]
        for one in directories:
            one.mkdir()
        return StripeStore([DirectStore(one) for one in directories])


class TestHost(Suite):
    __test__ = True

    def open_store(self, directory):
        return HostStore()


class TestVerified(Suite):
    __test__ = True

    def open_store(self, directory):
        return VerifyingStore(DirectStore(directory))


class TestHostMemoryBeforeTheDisk(Suite):
    __test__ = True

    def open_store(self, directory):
        return TieredStore(HostStore(max_bytes=64 * KIB), DirectStore(directory))

    @pytest.fixture(autouse=True)
    def nothing_is_left_in_host_memory(self, offload):
        yield
        gc.collect()
        # Extents go back on I/O threads, and after `close` none is counted.
        deadline = time.monotonic() + 30
        while offload.stats.live_blocks or offload._store.live_bytes or offload._store._host.live_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def test_blocks_are_in_both(self, offload):
        x = torch.randn(64, 64, requires_grad=True)
        with offload:
            loss = x.sin().sin().sin().sin().sin().sin().sum()
        offload.synchronize()
        store = offload._store
        deadline = time.monotonic() + 30
        while store._host.live_bytes > 32 * KIB:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert store._host.live_bytes == 32 * KIB
        assert offload.stats.live_bytes_on_disk == 64 * KIB
        assert offload.stats.backend == "host+direct"
        loss.backward()


class TestHostMemoryVerified(Suite):
    __test__ = True

    def open_store(self, directory):
        return VerifyingStore(TieredStore(HostStore(max_bytes=64 * KIB), DirectStore(directory)))


class TestSlowAndOutOfOrder(Suite):
    __test__ = True
    options = {"io_threads": 4}  # noqa: RUF012

    def open_store(self, directory):
        return SlowStore(ReorderingStore(HostStore()), latency=0.0005)


class TestOneThread(Suite):
    __test__ = True
    options = {"io_threads": 1}  # noqa: RUF012


class TestNothingReadAhead(Suite):
    __test__ = True
    options = {"prefetch_bytes": 0}  # noqa: RUF012


class TestSmallBudgets(Suite):
    __test__ = True
    options = {"prefetch_bytes": 20 * KIB, "store_queue_bytes": 20 * KIB, "on_full_queue": "wait"}  # noqa: RUF012


class TestSmallQueueThatKeeps(Suite):
    __test__ = True
    options = {"store_queue_bytes": 20 * KIB}  # noqa: RUF012


class TestEveryWriteFails(Suite):
    __test__ = True
    spills = False

    def open_store(self, directory):
        return FaultyStore(HostStore(), Fault(operation="write"))

    pytestmark = pytest.mark.filterwarnings("ignore:ssdtrain keeps activations in memory:RuntimeWarning")
