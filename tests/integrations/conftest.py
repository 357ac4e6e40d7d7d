"""Callbacks over real files."""

import pytest
import torch
import torch._dynamo

from ssdtrain.integrations.transformers import SSDTrainCallback

from .helpers import OPTIONS


@pytest.fixture(autouse=True, scope="session")
def one_compute_thread():
    """The models here are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_callback(tmp_path):
    """Makes callbacks for `Trainer` that take tensors of any size."""

    def make(**options):
        return SSDTrainCallback(spill_dir=tmp_path, **OPTIONS | options)

    return make


@pytest.fixture
def fresh_compiler():
    """Dynamo remembers code that it could not compile, and leaves it alone from then on."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
