"""DDP, FSDP2, FSDP1 and tensor parallelism: the same bits, and no weight among the bytes written."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed import cases

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def check_bits(keep, offloaded):
    assert offloaded.losses == keep.losses
    assert all(map(torch.equal, offloaded.weights, keep.weights))
    assert min(offloaded.bytes_written) > 0


def check_only_activations(offloaded, alone):
    """Every step writes what one process does, whose weights are known by their storages."""
    assert set(offloaded.bytes_written) == set(alone.bytes_written)


@pytest.mark.parametrize("way", ["buckets", "no_sync", "unused", "static_graph", "bfloat16"])
def test_ddp_trains_to_the_same_bits_and_writes_only_activations(ranks, way):
    for keep, offloaded, alone in ranks(cases.ddp, way):
        check_bits(keep, offloaded)
        check_only_activations(offloaded, alone)


@pytest.mark.parametrize("know_model", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_writes_only_activations_over_20_steps(ranks, reshard, know_model):
    for keep, offloaded, alone in ranks(cases.fsdp2, reshard, None, know_model):
        check_bits(keep, offloaded)
        check_only_activations(offloaded, alone)
        assert len(offloaded.bytes_written) == 20


def test_fsdp2_that_reshards_to_two_of_four_ranks_writes_only_activations(ranks):
    for keep, offloaded, alone in ranks(cases.fsdp2, 2, None, True, ranks=4):
        check_bits(keep, offloaded)
        check_only_activations(offloaded, alone)


def test_fsdp2_in_bfloat16_writes_no_cast_weight(ranks):
    for keep, offloaded, alone in ranks(cases.fsdp2, True, BFLOAT16, True):
        check_bits(keep, offloaded)
        in_float32 = cases.ROWS * cases.WIDTH * 4  # the loss is computed in it
        assert set(offloaded.bytes_written) == {(alone.bytes_written[0] - in_float32) // 2 + in_float32}


def test_gathered_weights_that_were_not_recognised_would_be_seen_in_the_bytes(ranks):
    for offloaded, alone in ranks(cases.fsdp2_unrecognised):
        assert max(offloaded.bytes_written) > alone.bytes_written[0]


@pytest.mark.parametrize("know_model", [True, False], ids=["model", "no model"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_writes_only_activations(ranks, use_orig_params, know_model):
    for keep, offloaded, alone in ranks(cases.fsdp1, use_orig_params, know_model):
        check_bits(keep, offloaded)
        check_only_activations(offloaded, alone)


def test_tensor_parallel_layers_offload_their_plain_tensors(ranks):
    for keep, offloaded, _ in ranks(cases.tensor_parallel):
        check_bits(keep, offloaded)
        # In each layer the half of the input of gelu; what linear layers save are DTensors. And the loss's input.
        plain = cases.ROWS * cases.WIDTH * 4
        assert set(offloaded.bytes_written) == {cases.LAYERS * plain + plain}


def test_fsdp2_over_tensor_parallel_layers_writes_no_weight(ranks):
    for keep, offloaded, _ in ranks(cases.fsdp2_over_tensor_parallel, ranks=4):
        check_bits(keep, offloaded)
        plain = cases.ROWS * cases.WIDTH * 4
        assert set(offloaded.bytes_written) == {cases.LAYERS * plain + plain}


def test_fsdp2_frees_and_refills_weights_while_writes_are_under_way(ranks):
    for plain, offloaded, failures in ranks(cases.fsdp2_while_writing):
        assert failures == 0
        assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_holds_no_more_gathered_weights_than_without_an_offloader(ranks, reshard):
    for plain, offloaded in ranks(cases.fsdp2_gathered, reshard):
        assert offloaded == plain
        assert (plain == 0) == reshard
