"""Offloaders over real files, with budgets that tiny models reach."""

import pytest
import torch

import ssdtrain


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread():
    """The models here are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_offload(tmp_path):
    """Makes offloaders that take tensors of any size, and read some of them ahead."""
    made = []

    def make(model, **options):
        options = {"prefetch_bytes": "64KiB"} | options
        offload = ssdtrain.OffloadActivations(
            model, spill_dir=tmp_path, min_tensor_bytes=1, min_free_bytes=0, **options
        )
        made.append(offload)
        return offload

    yield make
    for offload in made:
        offload.close()


@pytest.fixture
def make_tight_offload(make_offload):
    """With room for a few tensors in the queue, for which forward waits, and for one that is read ahead."""

    def make(model):
        return make_offload(model, store_queue_bytes="16KiB", on_full_queue="wait", prefetch_bytes="4KiB")

    return make
