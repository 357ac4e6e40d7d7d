"""Pipelining: 4 micro-batches on 2 stages, the offloader around each forward or around the whole step."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import cases
from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="module", params=cases.SCHEDULES)
def runs(request, tmp_path_factory):
    """Of each rank: kept, around each forward, around each step."""
    return run_ranks(cases.pipeline, tmp_path_factory.mktemp("spill"), request.param)


def test_gradients_are_equal(runs):
    for keep, *offloaded in runs:
        for run in offloaded:
            assert run.bytes_written > 0
            assert all(map(torch.equal, run.gradients, keep.gradients))


def test_activations_alive_are_at_most_half(runs):
    for keep, *offloaded in runs:
        for run in offloaded:
            assert run.peak <= keep.peak / 2


def test_backward_reads_ahead_across_micro_batches(runs):
    for _, *offloaded in runs:
        for run in offloaded:
            assert run.hits > 10 * run.misses
