"""Host memory that cannot be pinned, on a machine where there is nothing to pin it for."""

import warnings

import pytest
import torch

from ssdtrain.memory.pinned import PinnedMemory, pinned_bytes
from ssdtrain.memory.staging import host_tensor
from ssdtrain.storage import PAGE


@pytest.fixture
def pins(monkeypatch):
    """Stands in for the accelerator's allocator of pinned memory: every size that it was asked for."""
    asked = []
    empty = torch.empty

    def pinned_empty(*size, pin_memory=False, **options):
        if pin_memory:
            asked.append(size[0])
            if pins.refuses:
                raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pins.refuses = False
    pins.asked = asked
    return pins


class TestPinning:
    def test_without_an_accelerator_nothing_is_pinned(self):
        buffer = PinnedMemory().allocate(PAGE)
        assert buffer.address % PAGE == 0
        host_tensor(buffer).fill_(1)

    def test_with_one_it_is(self, pins):
        memory = PinnedMemory()
        assert memory.allocate(1 << 20).nbytes == 1 << 20
        assert memory.pinned
        assert pins.asked == [1 << 20]

    def test_a_refusal_is_told_once_and_memory_is_pageable_from_then_on(self, pins):
        pins.refuses = True
        memory = PinnedMemory()
        with pytest.warns(RuntimeWarning, match=r"cannot pin 4096 bytes.*out of memory.*ulimit -l"):
            first = memory.allocate(PAGE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = memory.allocate(PAGE)
        assert first.address % PAGE == second.address % PAGE == 0
        assert first.address != second.address
        assert len(pins.asked) == 1


@pytest.mark.parametrize(
    ("nbytes", "takes"), [(1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), ((1 << 30) + 1, 1 << 31)]
)
def test_pinned_memory_is_rounded_up(nbytes, takes):
    assert pinned_bytes(nbytes) == takes
