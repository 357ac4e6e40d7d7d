"""Offloaders over real files and over stores that a test controls."""

import pytest
import torch

import ssdtrain
import ssdtrain.workers
from ssdtrain.storage import HostStore
from ssdtrain.testing import FaultyStore, GatedStore, OffloadOver, RecordingStore


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread():
    """The models here are too small for more, and other processes may want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_batches(monkeypatch):
    """The blocks here are small, and tests wait for the write of a single one."""
    monkeypatch.setattr(ssdtrain.workers, "WAKE_BATCH_BYTES", 1)


@pytest.fixture
def make_offload(tmp_path):
    """Makes offloaders that take tensors of any size; `store=` goes below instead of files in `tmp_path`."""
    made = []

    def make(model=None, *, store=None, **options):
        options = {"spill_dir": tmp_path, "min_tensor_bytes": 1, "min_free_bytes": 0} | options
        if store is None:
            offload = ssdtrain.OffloadActivations(model, **options)
        else:
            offload = OffloadOver(store, model, **options)
        made.append((offload, store))
        return offload

    yield make
    for offload, store in made:
        if isinstance(store, GatedStore):
            store.open("read")
            store.open("write")
        offload.close()


@pytest.fixture
def offload(make_offload):
    """An offloader of everything, into files."""
    return make_offload()


@pytest.fixture
def gated():
    """A store in host memory whose writes wait; reads pass."""
    return GatedStore(HostStore(), hold=("write",), timeout=30)


@pytest.fixture
def recording():
    """A store in host memory that remembers what it was asked."""
    return RecordingStore(HostStore())


@pytest.fixture
def faulty():
    """A store in host memory whose `faults` a test sets."""
    return FaultyStore(HostStore())
