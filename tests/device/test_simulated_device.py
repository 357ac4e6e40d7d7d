"""The simulated device itself: it has to find what it is there to find."""

import pytest
import torch

from ssdtrain.memory.staging import host_tensor
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.testing import OrderError, SimulatedDevice
from tests.device.kernels import on_device

NAN = torch.tensor(float("nan"))


def is_poisoned(tensor):
    return bool(tensor.isnan().all())


@pytest.fixture
def x():
    return torch.randn(1000)


class TestLateness:
    def test_what_is_late_runs_when_it_is_waited_for(self, x):
        device = SimulatedDevice(["compute"])
        copy = on_device(x, device)
        assert not torch.equal(copy, x)
        device.finish()
        assert torch.equal(copy, x)

    def test_what_is_not_late_runs_at_once(self, x):
        assert torch.equal(on_device(x, SimulatedDevice()), x)

    def test_a_stream_that_waits_has_the_other_run(self, x):
        device = SimulatedDevice(["side 1"])
        side = device.side()
        target, source = device.like(x), on_device(x, device)
        device.wait(side, device.record(device.current()))
        device.copy(target, source, side)
        assert is_poisoned(target)
        device.wait(device.current(), device.record(side))
        assert torch.equal(target, x)

    def test_asking_runs_nothing(self, x):
        device = SimulatedDevice(["compute"])
        copy = on_device(x, device)
        event = device.record(device.current())
        assert not device.reached(event)
        device.synchronize(event)
        assert device.reached(event)
        assert torch.equal(copy, x)


class TestOrder:
    def test_a_copy_that_nobody_ordered_is_an_error(self, x):
        device = SimulatedDevice()
        source = on_device(x, device)
        target = torch.empty(1000)
        with pytest.raises(OrderError, match="'copy on side 1' is not ordered after 'upload'"):
            device.copy(target, source, device.side())

    def test_two_readers_need_no_order(self, x):
        device = SimulatedDevice()
        source = on_device(x, device)
        uploaded = device.record(device.current())
        for target in (torch.empty(1000), torch.empty(1000)):
            side = device.side()
            device.wait(side, uploaded)
            device.copy(target, source, side)

    def test_order_passes_through_other_streams(self, x):
        device = SimulatedDevice()
        source = on_device(x, device)
        first, second = device.side(), device.side()
        device.wait(first, device.record(device.current()))
        device.wait(second, device.record(first))
        device.copy(torch.empty(1000), source, second)

    def test_order_passes_through_the_host(self, x):
        device = SimulatedDevice(["compute"])
        source = on_device(x, device)
        device.finish()
        device.copy(torch.empty(1000), source, device.side())

    def test_the_host_has_to_wait_too(self, x):
        device = SimulatedDevice()
        buffer = page_aligned(4096)
        source = on_device(x, device)
        device.copy(host_tensor(buffer)[:4000], source.view(torch.uint8), device.current())
        with pytest.raises(OrderError, match="'the host'"):
            device.host_access(buffer, writes=False)
        device.finish()
        device.host_access(buffer, writes=False)


class TestMemory:
    def test_fresh_memory_has_no_value(self, x):
        assert is_poisoned(SimulatedDevice().like(x))

    def test_what_is_freed_is_used_again_at_once(self, x):
        device = SimulatedDevice()
        tensor = device.like(x)
        address = tensor.data_ptr()
        del tensor
        assert device.like(x).data_ptr() == address

    def test_a_recorded_use_delays_that_until_it_has_ended(self, x):
        device = SimulatedDevice(["side 1"])
        side = device.side()
        tensor = on_device(x, device)
        address = tensor.data_ptr()
        device.wait(side, device.record(device.current()))
        device.copy(torch.empty(1000), tensor, side)
        device.record_use(tensor, side)
        del tensor
        other = device.like(x)
        assert other.data_ptr() != address
        device.synchronize(device.record(side))
        assert device.like(x).data_ptr() == address

    def test_a_use_that_was_not_recorded_is_found(self, x):
        device = SimulatedDevice(["side 1"])
        side = device.side()
        tensor = on_device(x, device)
        device.wait(side, device.record(device.current()))
        device.copy(torch.empty(1000), tensor, side)
        del tensor
        with pytest.raises(OrderError, match=r"fresh bytes on compute.*not ordered after 'copy on side 1'"):
            device.like(x)

    def test_a_device_can_be_full(self, x):
        with pytest.raises(torch.OutOfMemoryError):
            SimulatedDevice(capacity=4096).like(x)
