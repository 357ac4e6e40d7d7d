"""`TorchStreams` and pinned memory, over torch's own streams and events of `late`."""

import threading

import pytest
import torch

from ssdtrain.device.streams import TorchStreams
from ssdtrain.memory.pinned import PinnedMemory
from ssdtrain.memory.staging import StagingRing, host_tensor
from ssdtrain.storage import PAGE

NBYTES = 4096


@pytest.fixture(params=[0, 1])
def device(request):
    """One of the two; the first is the current device."""
    return torch.device("late", request.param)


@pytest.fixture
def streams(device):
    return TorchStreams(device)


@pytest.fixture
def pinned():
    return torch.full((NBYTES,), 7, dtype=torch.uint8).pin_memory()


@pytest.fixture
def memory(device):
    return torch.zeros(NBYTES, dtype=torch.uint8, device=device)


def value(tensor):
    """Of its first byte; waits for the current stream only."""
    return int(tensor[0])


class TestStreams:
    def test_the_index_is_that_of_the_device(self, streams, device):
        assert streams.index == device.index

    def test_current_is_of_this_device_whichever_device_is_current(self, streams, device):
        assert streams.current().device == device

    def test_current_is_of_the_calling_thread(self, streams):
        side = streams.side()
        seen = []
        with side:
            thread = threading.Thread(target=lambda: seen.append(streams.current()))
            thread.start()
            thread.join()
            assert streams.current() == side
        assert seen == [streams.current()]
        assert seen != [side]

    def test_a_side_stream_is_a_new_one(self, streams, device):
        one, two = streams.side(), streams.side()
        assert len({one, two, streams.current()}) == 3
        assert one.device == two.device == device


class TestEvents:
    def test_an_event_is_reached_when_what_is_before_it_has_run(self, streams, pinned, memory):
        side = streams.side()
        streams.copy(memory, pinned, side)
        event = streams.record(side)
        assert not streams.reached(event)
        assert value(memory) == 0
        streams.synchronize(event)
        assert streams.reached(event)
        assert value(memory) == 7

    def test_what_comes_after_an_event_is_not_waited_for(self, streams, pinned, memory):
        side = streams.side()
        event = streams.record(side)
        streams.copy(memory, pinned, side)
        streams.synchronize(event)
        assert value(memory) == 0

    def test_a_stream_waits_for_an_event_of_another(self, streams, pinned, memory):
        side = streams.side()
        streams.copy(memory, pinned, side)
        event = streams.record(side)
        streams.wait(streams.current(), event)
        assert not streams.reached(event)
        assert value(memory) == 7
        assert streams.reached(event)

    def test_a_thread_that_computed_nothing_may_wait(self, streams, pinned, memory):
        side = streams.side()
        streams.copy(memory, pinned, side)
        thread = threading.Thread(target=streams.synchronize, args=[streams.record(side)])
        thread.start()
        thread.join()
        assert value(memory) == 7


class TestCopies:
    def test_into_pinned_memory_are_asynchronous(self, streams, pinned, memory):
        side = streams.side()
        streams.copy(pinned, memory, side)
        assert value(pinned) == 7
        streams.synchronize(streams.record(side))
        assert value(pinned) == 0

    def test_with_a_staging_buffer_are_too(self, streams, memory):
        """Its tensor is one of numbers and an address: torch finds out that the memory is pinned."""
        staged = StagingRing(PinnedMemory().allocate, count=1, nbytes=NBYTES).take()
        staged.tensor.fill_(5)
        side = streams.side()
        streams.copy(memory, staged.tensor, side)
        assert not streams.reached(streams.record(side))
        streams.synchronize(streams.record(side))
        assert value(memory) == 5

    def test_with_pageable_memory_have_ended(self, streams, memory):
        streams.copy(memory, torch.full((NBYTES,), 3, dtype=torch.uint8), streams.side())
        assert value(memory) == 3

    def test_the_current_stream_stays_as_it_was(self, streams, pinned, memory):
        before = streams.current()
        streams.copy(memory, pinned, streams.side())
        assert streams.current() == before


class TestMemory:
    def test_is_on_the_device(self, streams, device):
        tensor = streams.empty(NBYTES, streams.side())
        assert (tensor.device, tensor.dtype, tensor.shape) == (device, torch.uint8, (NBYTES,))

    def test_belongs_to_the_stream(self, streams):
        """What it frees, it gets again; the current stream does not."""
        side = streams.side()
        address = streams.empty(NBYTES, side).data_ptr()
        other = streams.empty(NBYTES, streams.current())
        assert other.data_ptr() != address
        assert streams.empty(NBYTES, side).data_ptr() == address

    def test_a_use_on_its_own_stream_is_none(self, streams, late):
        side = streams.side()
        tensor = streams.empty(NBYTES, side)
        streams.record_use(tensor, side)
        assert late.late_uses_of(tensor.data_ptr()) == 0

    def test_a_use_on_another_stream_delays_its_reuse(self, streams, pinned, late):
        side, home = streams.side(), streams.side()
        tensor = streams.empty(NBYTES, home)
        address = tensor.data_ptr()
        streams.copy(pinned, tensor, side)
        streams.record_use(tensor, side)
        assert late.late_uses_of(address) == 1
        del tensor
        other = streams.empty(NBYTES, home)
        assert other.data_ptr() != address
        streams.synchronize(streams.record(side))
        assert streams.empty(NBYTES, home).data_ptr() == address

    @pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag], ids=["conjugate", "negative"])
    def test_a_use_of_a_lazy_view_is_one_of_its_memory(self, streams, device, late, view):
        z = torch.randn(100, dtype=torch.complex64, device=device)
        streams.record_use(view(z), streams.side())
        assert late.late_uses_of(z.data_ptr()) == 1


class TestPinnedMemory:
    def test_is_pinned(self):
        buffer = PinnedMemory().allocate(NBYTES)
        assert host_tensor(buffer).is_pinned()
        assert buffer.address % PAGE == 0

    def test_is_host_memory_also_where_tensors_are_made_on_a_device(self):
        with torch.device("late"):
            assert host_tensor(PinnedMemory().allocate(NBYTES)).is_pinned()

    def test_one_warning_when_it_is_refused(self, late):
        memory = PinnedMemory()
        late.late_refuse_pinning(True)
        try:
            with pytest.warns(RuntimeWarning, match=r"cannot pin 4096 bytes.*no memory can be pinned"):
                buffer = memory.allocate(NBYTES)
        finally:
            late.late_refuse_pinning(False)
        assert not host_tensor(buffer).is_pinned()
        assert not host_tensor(memory.allocate(NBYTES)).is_pinned()
