"""What the tests of the core share: comparing bits, small models, running a program with and without offloading."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from ssdtrain.testing import WrapperStore

KIB = 1 << 10
MIB = 1 << 20


def bits(tensor):
    """The values as bytes, so that a NaN is equal to itself and 0.0 is not -0.0."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one, other):
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assert_same_bits(got, wanted):
    """Two tensors, or two sequences of them."""
    if isinstance(wanted, torch.Tensor) or wanted is None:
        got, wanted = [got], [wanted]
    got, wanted = list(got), list(wanted)
    assert len(got) == len(wanted)
    different = [at for at, pair in enumerate(zip(got, wanted, strict=True)) if not same_bits(*pair)]
    assert not different, f"different bits at {different}"


def backward(build, offload=None, *, settle=True):
    """Output and gradients of a program.

    Args:
        build: Returns leaves, and a function of them that gives a scalar; called after seeding.
        offload: The context for the forward pass; None: plain torch.
        settle: Whether everything that can go to the store is there before backward begins.
    """
    torch.manual_seed(0)
    leaves, forward = build()
    with offload or nullcontext():
        loss = forward(*leaves)
    if offload is not None and settle:
        offload.synchronize()
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def assert_transparent(build, offload, *, settle=True):
    """The same bits with and without offloading, and, where it was let settle, the store was really used."""
    wanted = backward(build)
    written = offload.stats.bytes_written
    assert_same_bits(backward(build, offload, settle=settle), wanted)
    assert offload.stats.bytes_written > written or not settle


def error_of(kind, function):
    """The error that a function raises, where it may also succeed; None if it does."""
    try:
        function()
    except kind as error:
        return error.with_traceback(None)
    return None


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def mlp(width=64, depth=3, *, inplace=False):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=inplace), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


def model_program(make_model, *shape):
    """For `backward`: the mean square of a model's output; gradients of the input and of every parameter."""

    def build():
        model = make_model()
        batch = leaf(*shape)
        return [batch, *model.parameters()], lambda x, *_: model(x).square().mean()

    return build


def eventually(condition, seconds=20):
    """Whether it becomes true; for what another thread is about to finish and nobody can wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def assert_nothing_left(offload):
    """No block lives and no byte is on disk, after what is dead has been collected."""
    offload.synchronize()
    if offload.stats.live_blocks:
        gc.collect()
        offload.synchronize()
    # A worker may still be reading a block ahead that nobody wants any more, and frees it afterwards.
    assert eventually(lambda: offload.stats.live_blocks == 0)
    assert eventually(lambda: offload.stats.live_bytes_on_disk == 0)


def io_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ssdtrain-io")]


def open_fds():
    return len(list(Path("/proc/self/fd").iterdir()))


def run_python(code, *arguments, timeout=60, check=True, **environment):
    """Run a program in a process of its own; returns the CompletedProcess.

    The program finds this folder's helpers as `core.helpers`.
    """
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


class Identity(torch.autograd.Function):
    """Saves its input, shows what comes back in `seen`, and passes the gradient on."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum().abs()  # real, whatever x is

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        Identity.seen.append(x)
        return grad.expand(x.shape).to(x.dtype)


class PatientStore(WrapperStore):
    """A read by a thread of the user's waits until the I/O threads have read `ahead` blocks, which it counts."""

    def __init__(self, inner, ahead=0):
        super().__init__(inner)
        self.ahead = ahead
        self.read_ahead = 0
        self.read_by_user = 0
        self._changed = threading.Condition()

    def read(self, extent, buffer, offset=0):
        by_worker = threading.current_thread().name.startswith("ssdtrain-io")
        if not by_worker:
            with self._changed:
                assert self._changed.wait_for(lambda: self.read_ahead >= self.ahead, 30)
        super().read(extent, buffer, offset)
        with self._changed:
            self.read_ahead += by_worker
            self.read_by_user += not by_worker
            self._changed.notify_all()
