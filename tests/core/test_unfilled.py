"""Operations that save a buffer before they fill it: a hook that copies at pack copies what was there before.

Of torch's operators, `rrelu` in training mode is the only one whose backward reads such a buffer, its noise; the
version of the noise does not move when it is filled. The slow test below looks at all of them.
"""

import sys
import types
import unittest
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional

from ssdtrain import SSDTrainError

from .helpers import assert_same_bits, backward, bits, error_of, leaf

SIZE = 1 << 16


@pytest.fixture
def offload(make_offload):
    """Writes what is packed before the next tensor is packed, so that nothing depends on a race."""
    return make_offload(backend="host", on_full_queue="wait", store_queue_bytes=1)


@pytest.mark.parametrize("inplace", [False, True])
def test_random_leaky_relu(offload, inplace):
    def build():
        return [leaf(SIZE)], lambda x: functional.rrelu(x * 1, training=True, inplace=inplace).sin().sum()

    assert_same_bits(backward(build, offload), backward(build))


def test_random_leaky_relu_as_a_module(offload):
    def build():
        return [leaf(SIZE)], lambda x: nn.RReLU()(x * 1).sin().sum()

    assert_same_bits(backward(build, offload), backward(build))


def test_random_leaky_relu_in_evaluation(offload):
    def build():
        return [leaf(SIZE)], lambda x: functional.rrelu(x * 1, training=False).sum()

    assert_same_bits(backward(build, offload), backward(build))


def test_the_operator_called_directly_is_right_or_an_error(offload):
    def build():
        return [leaf(SIZE)], lambda x: torch.rrelu(x * 1, training=True).sum()

    got = []
    error = error_of(SSDTrainError, lambda: got.extend(backward(build, offload)))
    if error is None:
        assert_same_bits(got, backward(build))
    else:
        assert "rrelu" in str(error)


# By operator, the nodes that save such a buffer. Batch norms update their running statistics after they have saved
# them; in training mode backward does not read them.
UNFILLED = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
    "nn.functional.rrelu",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_operator_does_this(monkeypatch):
    """Every operator that torch tests, with memory that is full of NaN before it is filled."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", sys.modules.get("expecttest", stub))
    operators = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found, runs = defaultdict(set), 0
        for operator in operators:
            for run in _runs(operator):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    changed = _changed_after_pack(run)
                runs += changed is not None
                if changed:
                    found[operator.name] |= changed
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs > 5000
    assert set(found) == UNFILLED, dict(found)


def _runs(operator):
    for dtype in (torch.float64, torch.float32, torch.complex64):
        if not operator.supports_autograd or dtype not in operator.supported_dtypes("cpu"):
            continue
        try:
            samples = list(operator.sample_inputs("cpu", dtype, requires_grad=True))[:12]
        except Exception:  # noqa: BLE001 - needs what is not installed
            continue
        for sample in samples:
            yield lambda sample=sample: operator.op(sample.input, *sample.args, **sample.kwargs)
            if operator.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
                yield lambda sample=sample: operator.inplace_variant(
                    sample.input.clone(), *sample.args, **sample.kwargs
                )


def _changed_after_pack(run):
    """Shapes of saved tensors whose bytes changed and whose version did not; None if the operator does not run."""
    packed = []

    def pack(tensor):
        if tensor.layout is torch.strided and not tensor.is_quantized and type(tensor) is torch.Tensor:
            packed.append((tensor.detach(), bits(tensor).clone(), tensor._version))
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
    except Exception:  # noqa: BLE001 - a sample that is to fail
        return None
    return {
        tuple(tensor.shape)
        for tensor, before, version in packed
        if tensor._version == version and not torch.equal(bits(tensor), before)
    }
