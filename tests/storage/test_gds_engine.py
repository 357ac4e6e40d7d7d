"""Whole training steps over a store of device memory, on a simulated device whose memory kvikio can read."""

import errno
import gc

import pytest
import torch

from ssdtrain.testing import SimulatedDevice
from ssdtrain.testing.engine_suite import EngineSuite
from tests.device.kernels import offloader


class Broken:
    """Kvikio's file, after something has gone wrong."""

    def pwrite(self, *_arguments):
        raise OSError(errno.EIO, "broken")

    pread = pwrite

    def close(self):
        pass


class TestThroughKvikio(EngineSuite):
    @pytest.fixture
    def offload(self, gds_store):
        offload = offloader(SimulatedDevice(("side 1", "side 2")), gds_store)
        yield offload
        offload.close()


@pytest.fixture
def step(gds_store):
    """Runs a step and gives the gradient, and what it is without offloading; `break_kvikio` before backward."""
    offload = offloader(SimulatedDevice(("side 1", "side 2")), gds_store)

    def run(*, break_kvikio=lambda: None):
        torch.manual_seed(0)
        x = torch.randn(30, 1000)
        gradients = []
        for context in (None, offload):
            leaf = x.clone().requires_grad_()
            if context is None:
                (leaf.sin().cos().exp()).sum().backward()
            else:
                with context:
                    loss = leaf.sin().cos().exp().sum()
                context.synchronize()
                gc.collect()
                break_kvikio()
                loss.backward()
            gradients.append(leaf.grad)
        return gradients

    run.offload = offload
    yield run
    offload.close()


def break_store(store):
    store._device_file.close()
    store._device_file = Broken()


def test_the_path_in_use_is_named(step):
    plain, offloaded = step()
    assert torch.equal(plain, offloaded)
    assert step.offload.stats.backend == "gds-compat"
    assert step.offload.stats.bytes_read > 100_000


def test_blocks_on_disk_outlive_kvikio(step, gds_store):
    """They are larger than a staging buffer, so that they are read in other pieces than they were written in."""
    with pytest.warns(RuntimeWarning, match="GPUDirect Storage"):
        plain, offloaded = step(break_kvikio=lambda: break_store(gds_store))
    assert torch.equal(plain, offloaded)
    assert step.offload.stats.backend == "direct"


def test_a_write_that_fails_keeps_its_block_and_later_ones_go_through_host_memory(step, gds_store):
    break_store(gds_store)
    with pytest.warns(RuntimeWarning) as caught:
        plain, offloaded = step()
    assert torch.equal(plain, offloaded)
    assert step.offload.stats.store_failures >= 1
    assert any("GPUDirect Storage" in str(warning.message) for warning in caught)
    again = step()
    assert torch.equal(*again)
    assert step.offload.stats.backend == "direct"
