"""The central claim, equal bits, over every kind of store."""

import pytest
import torch
from torch import nn

from ssdtrain.storage import DirectStore, HostStore, StripeStore
from ssdtrain.testing import SlowStore

from .helpers import (
    KIB,
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    leaf,
    mlp,
    model_program,
)


def stripes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return [tmp_path / "one", tmp_path / "two"]


KINDS = {
    "direct": lambda tmp_path: {"backend": "direct"},
    "buffered": lambda tmp_path: {"store": DirectStore(tmp_path, direct=False)},
    "host": lambda tmp_path: {"backend": "host"},
    "verified": lambda tmp_path: {"verify": True},
    "several directories": lambda tmp_path: {"spill_dir": stripes(tmp_path)},
    "striped over memory": lambda tmp_path: {"store": StripeStore([HostStore(), HostStore(), HostStore()])},
    "slow": lambda tmp_path: {"store": SlowStore(HostStore(), bandwidth=200e6, latency=0.0005)},
}


@pytest.fixture(params=KINDS)
def offload(request, make_offload, tmp_path):
    if request.param == "verified":
        pytest.importorskip("xxhash")
    return make_offload(**KINDS[request.param](tmp_path))


@pytest.fixture(params=[True, False], ids=["settled", "at once"])
def settle(request):
    return request.param


def test_a_model(offload, settle):
    program = model_program(lambda: mlp(depth=4), 32, 64)
    for _ in range(3):
        assert_transparent(program, offload, settle=settle)
    assert_nothing_left(offload)


def test_a_transformer(offload, settle):
    def layer():
        return nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)

    assert_transparent(model_program(layer, 4, 16, 32), offload, settle=settle)


def test_blocks_of_odd_sizes(offload, settle):
    def build():
        sizes = (1, 63, 127, 128, 129, 1000, 1024, 1025, 5000, 70_001)
        return [leaf(size) for size in sizes], lambda *xs: sum(x.sin().exp().sum() for x in xs)

    assert_transparent(build, offload, settle=settle)


def test_blocks_larger_than_the_budgets(make_offload, settle, tmp_path):
    for kind in ("direct", "buffered", "host"):
        offload = make_offload(
            **KINDS[kind](tmp_path), store_queue_bytes=64 * KIB, prefetch_bytes=64 * KIB, on_full_queue="wait"
        )
        assert_transparent(lambda: ([leaf(300, 301)], lambda x: x.sin().exp().sum()), offload, settle=settle)


def test_retained_graphs(offload):
    def run(context):
        torch.manual_seed(0)
        x = leaf(64, 64)
        with context or torch.enable_grad():
            loss = x.sin().exp().tanh().sum()
        if context:
            context.synchronize()
        for _ in range(3):
            loss.backward(retain_graph=True)
        return x.grad

    assert_same_bits(run(offload), run(None))


def test_the_path_in_use_is_named(make_offload, tmp_path):
    names = {
        kind: make_offload(**KINDS[kind](tmp_path)).stats.backend for kind in ("direct", "buffered", "host")
    }
    assert names == {"direct": "direct", "buffered": "buffered", "host": "host"}


def test_more_passes_than_the_store_has_room_for(make_offload):
    """Room is used again."""
    offload = make_offload(max_spill_bytes="1MiB")
    program = model_program(lambda: mlp(depth=2), 32, 64)
    for _ in range(30):
        assert_same_bits(backward(program, offload), backward(program))
    stats = offload.stats
    assert stats.store_failures == 0
    assert stats.bytes_written > 1 << 20
