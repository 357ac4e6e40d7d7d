"""Two training steps with and without offloading, compared bit by bit."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from core.helpers import assert_nothing_left, assert_same_bits

STEPS = 2  # the second one reads ahead in the order of the first
DROPOUT = 0.1


def train(build, make_offload=None, *, autocast=False, settle=True):
    """What some steps of SGD compute, and the offloader, if there was one.

    Args:
        build: Returns a model in training mode, and a function that gives its loss for a new batch; called after
            seeding.
        make_offload: Makes an offloader for the model; None: plain torch.
        autocast: Whether the forward passes run under autocast to bfloat16.
        settle: Whether everything that can go to the disk is there before backward begins.
    """
    torch.manual_seed(0)
    model, loss_of_new_batch = build()
    offload = None if make_offload is None else make_offload(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    results = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with offload or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of_new_batch()
        if offload is not None and settle:
            offload.synchronize()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *(weight.grad for weight in model.parameters())]
    return [*results, *model.buffers(), torch.get_rng_state()], offload


def assert_trains_the_same(build, make_offload, *, autocast=False, settle=True):
    """Losses, all gradients, buffers and the random state are those of plain torch, and the disk was really used."""
    wanted, _ = train(build, autocast=autocast)
    got, offload = train(build, make_offload, autocast=autocast, settle=settle)
    assert_same_bits(got, wanted)
    assert_nothing_left(offload)
    if settle:
        stats = offload.stats
        assert stats.bytes_written > 0
        assert stats.bytes_read > 0
