"""A model whose every operation is queued on a simulated device's current stream, and is as late as that stream."""

from contextlib import nullcontext

import torch

from ssdtrain.testing import HostAccessStore, OffloadOver, SimulatedTransfers


class _Sin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device):
        y = device.like(x)
        ctx.save_for_backward(x)
        ctx.device = device
        device.launch("sin", torch.sin, [x], y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = ctx.device.like(x)
        ctx.device.launch("gradient of sin", lambda g, x: g * x.cos(), [gradient, x], result)
        return result, None


def sin(x, device):
    """Saves its input."""
    return _Sin.apply(x, device)


def on_device(tensor, device):
    """A copy in device memory, made by the current stream."""
    copy = device.like(tensor)
    device.launch("upload", lambda source: source, [tensor.detach()], copy)
    return copy


def chain(device, x, layers=8, offload=None):
    """`layers` times the sine; the leaf and the result."""
    leaf = on_device(x, device).requires_grad_()
    with offload or nullcontext():
        y = leaf
        for _ in range(layers):
            y = sin(y, device)
    return leaf, y


def gradient(device, leaf, y):
    """Of the sum, on the host, when all is done. Nothing else is waited for."""
    ones = on_device(torch.ones_like(leaf), device)
    (result,) = torch.autograd.grad(y, leaf, ones)
    del y, leaf
    device.finish()
    return result.detach().clone()


def expected(x, layers=8):
    """The same in plain torch."""
    x = x.detach().requires_grad_()
    y = x
    for _ in range(layers):
        y = y.sin()
    # Not y.sum(): the chain rule in the same order, multiplication by multiplication.
    return torch.autograd.grad(y, x, torch.ones_like(x))[0]


def offloader(device, store, *, buffers=6, **options):
    """Over a simulated device, whose staging buffers are watched."""
    options = {"min_tensor_bytes": 1, **options}
    transfers = SimulatedTransfers(device, buffers=buffers)
    return OffloadOver(HostAccessStore(store, device), transfers=transfers, **options)


__all__ = [
    "chain",
    "expected",
    "gradient",
    "offloader",
    "on_device",
    "sin",
]
