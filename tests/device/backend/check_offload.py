"""Programs on the devices of `late`, spilled by a real offloader through torch's own streams and events."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.testing.engine_suite import EngineSuite


class OnLate(EngineSuite):
    """All tensors that the suite makes are on a device."""

    device = "late:0"

    @pytest.fixture(autouse=True)
    def _on_device(self, request):
        parameters = getattr(request.node, "callspec", None)
        if parameters and parameters.params.get("name") == "recurrence":
            pytest.skip("torch has no GRU for a device without a kernel for one")
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


@pytest.fixture(params=["direct", "host"])
def options(request, tmp_path):
    where = {"spill_dir": tmp_path} if request.param == "direct" else {}
    return {"backend": request.param, "min_tensor_bytes": 1, **where}


@pytest.fixture
def offload(options):
    opened = ssdtrain.OffloadActivations(**options)
    yield opened
    opened.close()


def leaf(*shape, device="late:0"):
    return torch.randn(shape, device=device, requires_grad=True)


class Keeps(torch.autograd.Function):
    """Saves its inputs, and shows in `seen` what it gets back."""

    seen: ClassVar = []

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return torch.stack([x.real.sum() for x in inputs]).sum()

    @staticmethod
    def backward(ctx, gradient):
        Keeps.seen[:] = ctx.saved_tensors
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def restored(offload, *tensors):
    """The tensors as backward sees them, after they were spilled."""
    with offload:
        loss = Keeps.apply(*tensors)
    offload.synchronize()
    loss.backward()
    seen, Keeps.seen = Keeps.seen, []
    return seen


def test_a_chain_is_spilled(offload):
    """With more blocks than staging buffers, in the order of reads that was learnt."""
    for _ in range(3):
        x = leaf(300, 301)
        with offload:
            y = x
            for _ in range(20):
                y = y.sin()
        offload.synchronize()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        wanted = x
        for _ in range(20):
            wanted = wanted.sin()
        assert torch.equal(gradient, torch.autograd.grad(wanted.sum(), x)[0])
        del y
    assert offload.stats.blocks_offloaded >= 60
    assert offload.stats.prefetch_hits > 0


def test_blocks_larger_than_a_staging_buffer(offload):
    x = leaf(3, 1000, 1001)  # 12 MB
    (same,) = restored(offload, x * 2)
    assert torch.equal(same, x * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_view_comes_back_as_it_was(offload, dtype):
    x = torch.randn(40, 50, device="late:1").to(dtype).requires_grad_()
    view = (x * 1).t()[3:30, ::2]
    (same,) = restored(offload, view)
    assert offload.stats.blocks_offloaded == 1
    assert same.device == torch.device("late:1")
    assert (same.dtype, same.shape, same.stride()) == (dtype, view.shape, view.stride())
    assert same.storage_offset() % 512 == view.storage_offset() % 512
    assert torch.equal(same, view)


def test_tensors_of_one_storage_share_their_block(offload):
    x = leaf(100, 100) * 1
    one, two = restored(offload, x, x.t())
    assert offload.stats.blocks_offloaded == 1
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert torch.equal(two, x.t())


def test_weights_stay(options):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("late:1")
    offload = ssdtrain.OffloadActivations(model, **options)
    x = torch.randn(16, 64, device="late:1")
    with offload:
        loss = model(x).sum()
    offload.synchronize()
    assert 0 < offload.stats.bytes_written <= 2 * x.nbytes
    loss.backward()
    offload.close()


def test_two_devices_in_one_graph(offload):
    x = leaf(100, 101, device="late:0")

    def program(y):
        for step in range(8):
            y = y.sin().to(f"late:{step % 2}").exp().tanh()
        return y.sum()

    with offload:
        loss = program(x)
    offload.synchronize()
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.device == x.device
    assert torch.equal(gradient, torch.autograd.grad(program(x), x)[0])
    assert offload.stats.blocks_offloaded > 8


def test_a_forward_pass_on_a_side_stream(offload):
    """Autograd runs backward on it too; the stream that takes the gradient waits for it."""
    x = leaf(200, 201)
    (wanted,) = torch.autograd.grad(x.sin().exp().tanh().sum(), x)
    side = torch.Stream("late:0")
    side.wait_stream(torch.accelerator.current_stream())
    with side, offload:
        loss = x.sin().exp().tanh().sum()
    offload.synchronize()
    loss.backward()
    assert torch.equal(x.grad, wanted)


class TestMemoryThatLateWorkUses:
    """It is not reused before that has run, whichever stream it runs on."""

    def reuse(self, tensor):
        """Take what is free of the tensor's size, and overwrite it."""
        return [torch.ones_like(tensor) for _ in range(40)]

    def test_what_was_packed(self, offload):
        side = torch.Stream("late:0")
        x = leaf(50, 60) * 1
        wanted, copy = x.detach().cpu(), torch.empty(50, 60).pin_memory()
        with side, offload:
            loss = Keeps.apply(x)
            copy.copy_(x.detach(), non_blocking=True)
        like = torch.zeros_like(x)
        del x
        offload.synchronize()
        held = self.reuse(like)
        side.synchronize()
        assert torch.equal(copy, wanted)
        del loss, held

    def test_what_was_unpacked(self, offload):
        side = torch.Stream("late:0")
        copy = torch.empty(50, 60).pin_memory()

        class CopiesOnTheSide(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.sum()

            @staticmethod
            def backward(ctx, gradient):
                with side:
                    (x,) = ctx.saved_tensors
                    copy.copy_(x, non_blocking=True)
                return gradient.expand(50, 60)

        x = leaf(50, 60)
        y = x * 1
        wanted, like = y.detach().cpu(), torch.zeros_like(x)
        with offload:
            loss = CopiesOnTheSide.apply(y)
        del y
        offload.synchronize()
        loss.backward()
        del loss
        held = self.reuse(like)
        side.synchronize()
        assert torch.equal(copy, wanted)
        assert torch.equal(x.grad, torch.ones_like(x))  # the first to take the memory
        del held

    def test_what_was_read_ahead_for_nobody(self, offload):
        for learnt in (False, False, True):
            x = leaf(50, 60)
            with offload:
                y, states = x, []
                for _ in range(20):
                    y = y.sin()
                    states.append(y)
            offload.synchronize()
            torch.autograd.grad(y.sum(), states[17] if learnt else x)
            del y, states
        held = self.reuse(x)
        torch.accelerator.synchronize()
        assert all(bool((tensor == 1).all()) for tensor in held)


def test_pageable_memory_will_do(options, late):
    late.late_refuse_pinning(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            offload = ssdtrain.OffloadActivations(**options)
            x = leaf(100, 101)
            with offload:
                loss = x.sin().exp().sum()
            offload.synchronize()
            (gradient,) = torch.autograd.grad(loss, x)
            offload.close()
    finally:
        late.late_refuse_pinning(False)
    assert torch.equal(gradient, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len([warning for warning in caught if "cannot pin" in str(warning.message)]) >= 1
