"""What a user imports."""

import dataclasses
import errno
import inspect

import pytest

import ssdtrain
from ssdtrain import OffloadStats

from .helpers import run_python

ERRORS = {
    ssdtrain.ConfigError: ValueError,
    ssdtrain.StoreError: OSError,
    ssdtrain.ActivationLostError: RuntimeError,
    ssdtrain.InplaceModificationError: RuntimeError,
}


def test_all_lists_what_is_exported():
    public = {
        name
        for name, value in vars(ssdtrain).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(ssdtrain.__all__) - {"__version__"} == public
    assert ssdtrain.__all__ == sorted(ssdtrain.__all__)


def test_everything_exported_is_documented():
    assert all(inspect.getdoc(getattr(ssdtrain, name)) for name in ssdtrain.__all__)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_also_what_python_has_for_them(error):
    assert issubclass(error, ssdtrain.SSDTrainError)
    assert issubclass(error, ERRORS[error])


def test_a_store_error_has_number_and_path():
    error = ssdtrain.StoreError(errno.ENOSPC, "cannot write", "/mnt")
    assert (error.errno, error.filename) == (errno.ENOSPC, "/mnt")
    assert "cannot write" in str(error)
    assert "/mnt" in str(error)


def test_import_brings_torch_and_nothing_else_of_weight():
    code = """
        import sys, torch
        before = set(sys.modules)
        import ssdtrain
        heavy = {"kvikio", "nvidia", "transformers", "jsonargparse", "yaml", "rich", "tokenizers", "xxhash", "numpy",
                 "accelerate", "trl", "lightning", "pytorch_lightning"}
        new = set(sys.modules) - before
        print(*sorted({name.split(".")[0] for name in new} & heavy))
        later = ("torch._dynamo", "ssdtrain.launch", "ssdtrain.integrations")
        print(*sorted(name for name in new if name.startswith(later)))
        print(torch.cuda.is_initialized())
    """
    assert run_python(code).stdout.split("\n")[:3] == ["", "", "False"]


def test_statistics_are_numbers():
    numbers = OffloadStats(backend="direct", bytes_read=3, stall_seconds=0.5).as_dict("offload/")
    assert all(type(value) in {int, float} for value in numbers.values())
    assert numbers["offload/bytes_read"] == 3
    assert len(numbers) == len(dataclasses.fields(OffloadStats)) - 1


def test_statistics_are_a_snapshot():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadStats().bytes_read = 1


@pytest.mark.parametrize(
    "name",
    [
        *("tensors_packed", "tensors_exempt", "blocks_offloaded", "blocks_deduplicated", "blocks_forwarded"),
        *(
            "bytes_written",
            "bytes_read",
            "prefetch_hits",
            "prefetch_misses",
            "stall_seconds",
            "store_failures",
        ),
        *("live_blocks", "live_bytes_on_disk", "backend"),
    ],
)
def test_a_counter_that_is_promised(name):
    assert hasattr(OffloadStats(), name)


def test_it_is_a_saved_tensors_hooks():
    import torch

    assert issubclass(ssdtrain.OffloadActivations, torch.autograd.graph.saved_tensors_hooks)


def test_the_context_is_the_offloader(make_offload):
    offload = make_offload()
    with offload as entered:
        assert entered is offload
    with offload:
        pass
