"""The accelerator's transfer over a simulated device: every wait is missed when it is not there."""

import errno
import itertools
import threading
from contextlib import contextmanager

import pytest
import torch

from ssdtrain.device.accelerator import AcceleratorTransfer
from ssdtrain.errors import ActivationLostError, StoreError
from ssdtrain.memory.staging import StagingRing, host_tensor
from ssdtrain.saved import Span
from ssdtrain.storage import PAGE, DeviceStore, DirectStore, HostBuffer, HostStore
from ssdtrain.storage.bounce import page_aligned
from ssdtrain.testing import Fault, FaultyStore, GatedStore, OffloadOver, SimulatedDevice, WrapperStore
from tests.device.kernels import chain, expected, gradient, offloader, on_device, sin

OUT, IN = "side 1", "side 2"
STREAMS = ("compute", OUT, IN)
LATE = [late for count in range(4) for late in itertools.combinations(STREAMS, count)]


class BorrowedStore(WrapperStore):
    """Host memory that the device copies into and out of; tells the device when the host counts on it."""

    def __init__(self, device):
        super().__init__(HostStore())
        self._device = device
        self._buffers = {}

    @contextmanager
    def borrow(self, extent, *, write):
        buffer = self._buffers.setdefault(extent.offset, page_aligned(extent.length))
        lent = HostBuffer(buffer.address, extent.nbytes, buffer)
        yield lent
        self._device.host_access(lent, writes=not write)


class DiskOfDevice(WrapperStore, DeviceStore):
    """I/O straight out of and into device memory, which knows no streams. `refuse` makes it fail from then on."""

    refuse = False

    def __init__(self, inner, device):
        super().__init__(inner)
        self._device = device

    def device_store(self, extent):
        return self

    def write_device(self, extent, buffer, offset=0):
        self._move(extent, buffer, offset, self.inner.write, writes=False)

    def read_device(self, extent, buffer, offset=0):
        self._move(extent, buffer, offset, self.inner.read, writes=True)

    def _move(self, extent, buffer, offset, move, *, writes):
        if self.refuse:
            raise StoreError(errno.EIO, "refused", "here")
        self._device.host_access(HostBuffer(*buffer[:2], buffer.owner), writes=writes)
        # In pieces that can be read through staging buffers, too.
        for begin in range(0, buffer.nbytes, PAGE):
            nbytes = min(PAGE, buffer.nbytes - begin)
            move(extent, HostBuffer(buffer.address + begin, nbytes, buffer.owner), offset + begin)


@pytest.fixture(params=["direct", "host", "borrowed", "device"])
def any_store(request, tmp_path):
    """A store of each way of moving, made for a device."""
    makers = {
        "direct": lambda device: DirectStore(tmp_path),
        "host": lambda device: HostStore(),
        "borrowed": BorrowedStore,
        "device": lambda device: DiskOfDevice(DirectStore(tmp_path), device),
    }
    return makers[request.param]


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(70, 131)


class GivesBackWhatItSaved(torch.autograd.Function):
    """Its gradient is a view of the restored tensor, which so outlives its node."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.save_for_backward(x)
        y = device.like(x)
        device.launch("copy", torch.clone, [x], y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return x[:], None


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:]


def start_later_work(device, x):
    """Something for the current stream that overwrites whatever memory is free."""
    return [on_device(x, device) for _ in range(4)]


class TestGradients:
    @pytest.mark.parametrize("settle", [True, False], ids=["settled", "at once"])
    @pytest.mark.parametrize("late", LATE, ids="+".join)
    def test_are_those_of_plain_torch(self, any_store, late, settle):
        device = SimulatedDevice(late)
        offload = offloader(device, any_store(device))
        for seed in range(3):  # from the second on, the order of reads is known
            torch.manual_seed(seed)
            x = torch.randn(70, 131)
            leaf, y = chain(device, x, offload=offload)
            if settle:
                offload.synchronize()
            assert torch.equal(gradient(device, leaf, y), expected(x))
            del leaf, y
        if settle:
            assert offload.stats.blocks_offloaded == 24
            assert offload.stats.prefetch_hits > 0
        offload.close()

    @pytest.mark.parametrize("late", LATE, ids="+".join)
    def test_when_reads_fall_to_the_thread_of_backward(self, any_store, late, x):
        device = SimulatedDevice(late)
        offload = offloader(device, any_store(device), prefetch_bytes=0)
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        assert torch.equal(gradient(device, leaf, y), expected(x))
        assert offload.stats.prefetch_misses == 8
        offload.close()

    @pytest.mark.parametrize("nbytes", [4, 4092, 4096, 4100, 8192, 8196, 12288, 100_004])
    def test_sizes_about_those_of_staging_buffers(self, tmp_path, nbytes):
        device = SimulatedDevice(STREAMS)
        offload = offloader(device, DirectStore(tmp_path))
        x = torch.randn(nbytes // 4)
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        assert torch.equal(gradient(device, leaf, y), expected(x))
        offload.close()

    def test_restored_memory_is_that_of_the_stream_of_compute(self, tmp_path, x):
        """So that restoring takes no memory besides."""
        device = SimulatedDevice(STREAMS, capacity=4 * 16 * x.nbytes)
        offload = offloader(device, DirectStore(tmp_path), prefetch_bytes=4 * x.nbytes)
        for _ in range(4):
            leaf, y = chain(device, x, layers=11, offload=offload)
            offload.synchronize()
            assert torch.equal(gradient(device, leaf, y), expected(x, layers=11))
            del leaf, y
        offload.close()


class TestStreamsOfTheUser:
    def test_pack_on_another_stream(self, any_store, x):
        """The value is there when that stream has computed it."""
        device = SimulatedDevice([*STREAMS, "side 3"])
        offload = offloader(device, any_store(device))
        first = on_device(x, device).requires_grad_()
        side = [device.side() for _ in range(3)][-1]
        warm, _ = chain(device, x, layers=1, offload=offload)  # makes the streams of copies
        side = device.side()
        device.wait(side, device.record(device.current()))
        with device.on(side), offload:
            y = sin(sin(first, device), device)
        device.wait(device.current(), device.record(side))
        offload.synchronize()
        assert torch.equal(gradient(device, first, y), expected(x, layers=2))
        del warm
        offload.close()

    def test_memory_is_held_for_the_stream_that_it_was_packed_on(self, any_store, x):
        """What is let go belongs to the stream that it was allocated on, which knows nothing of the other."""
        device = SimulatedDevice(["side 1"])
        side = device.side()
        offload = offloader(device, any_store(device))
        leaf = on_device(x, device).requires_grad_()
        with offload:
            middle = sin(leaf, device)
            device.wait(side, device.record(device.current()))
            with device.on(side):
                y = sin(middle, device)
                other = device.like(x)
        offload.synchronize()
        with device.on(side):
            device.launch("a use after the copy out", torch.cos, [middle], other)
        del middle
        later = start_later_work(device, x)
        device.wait(device.current(), device.record(side))
        assert torch.equal(gradient(device, leaf, y), expected(x, layers=2))
        del later
        offload.close()

    def test_memory_is_held_for_the_stream_that_unpacks(self, any_store, x):
        device = SimulatedDevice(["side 1"])
        side = device.side()
        offload = offloader(device, any_store(device))
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        ones = on_device(torch.ones_like(x), device)
        device.wait(side, device.record(device.current()))
        with device.on(side):
            (result,) = torch.autograd.grad(y, leaf, ones)
        del y
        later = start_later_work(device, x)
        device.synchronize(device.record(side))
        assert torch.equal(result, expected(x))
        del later
        offload.close()


class TestRestoredMemory:
    """As in meta-pytorch/torchtune#1867."""

    def test_a_view_of_it_outlives_the_node_that_asked_for_it(self, any_store, x):
        device = SimulatedDevice(STREAMS)
        offload = offloader(device, any_store(device))
        leaf = on_device(x, device).requires_grad_()
        with offload:
            y = GivesBackWhatItSaved.apply(Passes.apply(leaf), device)
        offload.synchronize()
        (result,) = torch.autograd.grad(y, leaf, on_device(x, device))
        del y
        later = start_later_work(device, x + 1)
        device.finish()
        assert torch.equal(result, x)
        del later
        offload.close()


class TestGraphsThatAreDropped:
    def test_while_copies_in_are_queued(self, any_store, x):
        """The memory is used again, and nothing lands in it later."""
        device = SimulatedDevice(STREAMS)
        offload = offloader(device, any_store(device))
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        middle = y.grad_fn.next_functions[0][0]
        ones = on_device(torch.ones_like(x), device)
        saved = y.grad_fn.saved_tensors  # one is asked for, the others are read ahead
        torch.autograd.grad(y, leaf, ones, retain_graph=True)
        del middle, saved, leaf, y
        values = start_later_work(device, x)
        device.finish()
        assert all(torch.equal(value, x) for value in values)
        offload.close()


class TestWaitingOnTheHost:
    def test_backward_waits_for_no_copy_of_what_was_read_ahead(self, tmp_path, x, monkeypatch):
        """Its stream does. Of what it reads itself, it waits for staging buffers."""
        device = SimulatedDevice(STREAMS)
        offload = offloader(device, DirectStore(tmp_path))
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        waits = []
        synchronize = device.synchronize

        def watched(event):
            waits.append(threading.current_thread())
            synchronize(event)

        ones = on_device(torch.ones_like(x), device)
        monkeypatch.setattr(device, "synchronize", watched)
        (result,) = torch.autograd.grad(y, leaf, ones)
        own = waits.count(threading.current_thread())
        monkeypatch.undo()
        device.finish()
        assert torch.equal(result, expected(x))
        pieces = -(-x.nbytes // 4096)
        assert own <= offload.stats.prefetch_misses * pieces
        assert offload.stats.prefetch_hits > 0
        del leaf, y
        offload.close()


class TestRunningAhead:
    """The device has computed nothing yet, and the store queue is full."""

    def test_the_host_waits_until_half_of_the_queue_is_computed(self, tmp_path, x):
        device = SimulatedDevice(STREAMS)
        store = GatedStore(DirectStore(tmp_path), hold=("write",))
        offload = offloader(device, store, store_queue_bytes=8 * x.nbytes, io_threads=1)
        events = []
        leaf = y = on_device(x, device).requires_grad_()
        with offload:
            for _ in range(10):
                y = sin(y, device)
                events.append(device.record(device.current()))
        reached = [device.reached(event) for event in events]
        store.open("write")
        assert reached == [True] * 4 + [False] * 6
        assert torch.equal(gradient(device, leaf, y), expected(x, layers=10))
        offload.close()

    def test_a_disk_that_is_behind_still_has_blocks_kept(self, tmp_path, x):
        device = SimulatedDevice(STREAMS)
        store = GatedStore(DirectStore(tmp_path), hold=("write",))
        offload = offloader(device, store, store_queue_bytes=4 * x.nbytes)
        leaf, y = chain(device, x, layers=40, offload=offload)
        kept = offload.stats.blocks_kept
        store.open("write")
        offload.synchronize()
        assert kept >= 36
        assert torch.equal(gradient(device, leaf, y), expected(x, layers=40))
        offload.close()


class TestFailures:
    def test_a_failed_write_ends_after_its_copies(self, tmp_path, x):
        """The memory is kept, and the staging buffers come back."""
        device = SimulatedDevice(STREAMS)
        store = FaultyStore(DirectStore(tmp_path), Fault(operation="write"))
        offload = offloader(device, store, buffers=2)
        leaf, y = chain(device, x, offload=offload)
        with pytest.warns(RuntimeWarning, match="could not write"):
            offload.synchronize()
        assert torch.equal(gradient(device, leaf, y), expected(x))
        offload.close()

    def test_a_copy_that_fails_gives_its_buffer_back(self, tmp_path, x, monkeypatch):
        """Else the next one would wait for it for ever."""
        device = SimulatedDevice()
        ring = StagingRing(page_aligned, count=1, nbytes=4096)
        transfer = AcceleratorTransfer(device, ring)
        store = DirectStore(tmp_path)
        tensor = on_device(x, device)
        storage = tensor.untyped_storage()
        span = Span(0, x.nbytes, x.nbytes, 0)

        def fail(*arguments):
            raise RuntimeError("no copy")

        with monkeypatch.context() as patch:
            patch.setattr(device, "copy", fail)
            with pytest.raises(RuntimeError, match="no copy"):
                transfer.write(store, store.allocate(x.nbytes), storage, span, transfer.mark())
        transfer.write(store, store.allocate(x.nbytes), storage, span, transfer.mark())
        store.close()

    def test_a_failed_read_leaves_nothing_that_lands_later(self, tmp_path, x):
        device = SimulatedDevice(STREAMS)
        store = FaultyStore(DirectStore(tmp_path), Fault(operation="read", index=3))
        offload = offloader(device, store, prefetch_bytes=0)
        leaf, y = chain(device, x, layers=1, offload=offload)
        offload.synchronize()
        with pytest.raises(ActivationLostError):
            gradient(device, leaf, y)
        values = start_later_work(device, x)
        device.finish()
        assert all(torch.equal(value, x) for value in values)
        offload.close()

    def test_a_device_without_memory_to_read_ahead(self, tmp_path, x):
        """Backward reads for itself, later, when there is some."""
        device = SimulatedDevice(STREAMS, capacity=4 * 10 * x.nbytes)
        offload = offloader(device, DirectStore(tmp_path))
        leaf, y = chain(device, x, layers=7, offload=offload)
        offload.synchronize()
        assert torch.equal(gradient(device, leaf, y), expected(x, layers=7))
        offload.close()

    def test_a_refusal_to_read_into_device_memory(self, tmp_path, x):
        """Staged reading is another way to the same bytes."""
        device = SimulatedDevice(STREAMS)
        store = DiskOfDevice(DirectStore(tmp_path), device)
        offload = offloader(device, store)
        leaf, y = chain(device, x, offload=offload)
        offload.synchronize()
        store.refuse = True
        assert torch.equal(gradient(device, leaf, y), expected(x))
        offload.close()


class TestSlices:
    def test_only_the_slice_is_restored(self, tmp_path):
        """In memory of its own size, at the same place modulo the allocator's alignment."""
        device = SimulatedDevice()
        offload = offloader(device, DirectStore(tmp_path))
        large = torch.randn(1 << 20)
        part = large[1001:3001].requires_grad_()
        with offload:
            y = part.sin()
        offload.synchronize()
        saved = y.grad_fn._saved_self
        assert torch.equal(saved, part)
        assert saved.untyped_storage().nbytes() < 3 * part.nbytes
        assert saved.storage_offset() == 1001 % 128
        offload.close()


class TestStaging:
    def test_no_more_buffers_than_asked_for(self):
        ring = StagingRing(page_aligned, count=2, nbytes=4096)
        one, two = ring.take(), ring.take_now()
        assert two is not None
        assert ring.take_now() is None
        ring.give(one)
        assert ring.take() is one

    def test_a_buffer_that_could_not_be_made_is_made_later(self):
        """Nobody waits for one that will never come."""
        refusals = iter([MemoryError("none")])

        def allocate(nbytes):
            for refusal in refusals:
                raise refusal
            return page_aligned(nbytes)

        ring = StagingRing(allocate, count=1, nbytes=4096)
        with pytest.raises(MemoryError):
            ring.take()
        assert ring.take().host.nbytes == 4096

    def test_a_buffer_as_a_tensor(self):
        buffer = page_aligned(4096)
        host_tensor(buffer).fill_(7)
        assert bytes(buffer.view()) == b"\x07" * 4096


class TestDevices:
    def test_several_devices_share_the_staging_buffers(self, tmp_path, x):
        devices = [SimulatedDevice(STREAMS, index=index) for index in range(2)]
        store = DirectStore(tmp_path)
        offloads = [offloader(device, store) for device in devices]
        graphs = [
            chain(device, x, offload=offload) for device, offload in zip(devices, offloads, strict=True)
        ]
        for device, offload, (leaf, y) in zip(devices, offloads, graphs, strict=True):
            offload.synchronize()
            assert torch.equal(gradient(device, leaf, y), expected(x))
        del graphs, leaf, y
        for offload in offloads:
            offload.close()

    def test_a_device_that_is_neither_cpu_nor_accelerator_is_left_alone(self, tmp_path):
        offload = OffloadOver(DirectStore(tmp_path))
        transfers = offload._session._transfers
        with pytest.warns(RuntimeWarning, match="keeps activations on 'meta' where they are.*the CPU"):
            assert transfers.of(torch.device("meta")) is None
        assert transfers.of(torch.device("meta")) is None
        offload.close()
