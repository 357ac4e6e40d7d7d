"""Which saved tensors are one block: the same live storage at the same version, and nothing else."""

import gc
from contextlib import nullcontext

import torch
from torch import nn

from .helpers import (
    KIB,
    assert_nothing_left,
    assert_same_bits,
    assert_transparent,
    backward,
    leaf,
    model_program,
)

BLOCK = 16 * KIB


def test_one_storage_is_written_once(offload):
    x = leaf(64, 64)
    with offload:
        parts = [x.sin(), x.cos(), x * x]
    offload.synchronize()
    assert offload.stats.bytes_written == BLOCK
    assert offload.stats.blocks_deduplicated == 3
    for part in parts:
        x.grad = None
        part.sum().backward()
    assert_same_bits(x.grad, x + x)


def test_equal_values_in_two_storages_are_two_blocks(offload):
    x = leaf(64, 64)
    with offload:
        y = x.sin() + x.detach().clone().requires_grad_().sin()
    offload.synchronize()
    assert offload.stats.bytes_written == 2 * BLOCK
    y.sum().backward()


def test_an_address_that_is_used_again_is_another_block(offload):
    """Every iteration makes a temporary, which may lie where the last one lay, and drops it."""

    def build():
        x = leaf(64, 64)

        def forward(x):
            total = 0
            for step in range(20):
                temporary = torch.full((64, 64), float(step))
                total = total + (x * temporary).sum()
                del temporary
                if step % 3 == 0:
                    offload.synchronize()
            return total

        return [x], forward

    assert_transparent(build, offload)
    assert offload.stats.bytes_written == 20 * BLOCK


def test_an_object_id_that_is_used_again_is_another_block(offload):
    for step in range(10):
        x = leaf(64, 64)
        factor = torch.full((64, 64), float(step))
        with offload:
            y = x * factor
        del factor
        gc.collect()
        offload.synchronize()
        y.sum().backward()
        assert_same_bits(x.grad, torch.full((64, 64), float(step)))


def test_after_an_in_place_change_it_is_another_block(offload):
    x, factor = leaf(64, 64), torch.ones(64, 64)
    with offload:
        first = (x * factor).sum()
        offload.synchronize()
        factor.add_(1)
        second = (x * factor).sum()
    offload.synchronize()
    assert offload.stats.bytes_written == 2 * BLOCK
    (first + second).backward()
    assert_same_bits(x.grad, torch.full((64, 64), 3.0))


def test_a_tensor_that_lives_over_many_steps_is_right_in_each(offload):
    """A mask, a table of positions: the same storage in every graph."""
    table, x = torch.randn(64, 64), leaf(64, 64)
    for _ in range(5):
        x.grad = None
        with offload:
            y = (x * table).sum()
        offload.synchronize()
        y.backward()
        assert_same_bits(x.grad, table)
        del y
    assert_nothing_left(offload)


def test_a_tensor_whose_data_was_swapped_is_another_block(offload):
    x, factor = leaf(64, 64), torch.ones(64, 64)
    with offload:
        first = (x * factor).sum()
        factor.data = torch.full((64, 64), 5.0)
        second = (x * factor).sum()
    offload.synchronize()
    (gradient,) = torch.autograd.grad(second, x)
    assert_same_bits(gradient, torch.full((64, 64), 5.0))
    del first


def test_a_storage_that_was_resized_is_another_block(offload):
    x, factor = leaf(64, 64), torch.ones(64, 64)
    with offload:
        first = (x * factor).sum()
        offload.synchronize()
        factor.resize_(128, 64).fill_(2.0)
        second = (leaf(128, 64) * factor).sum()
    offload.synchronize()
    first.backward()
    assert_same_bits(x.grad, torch.ones(64, 64))
    second.backward()


def test_a_result_that_is_saved_by_its_own_node_and_by_the_next_is_written_once(offload):
    x = leaf(64, 64)
    with offload:
        y = x.exp().sin()
    offload.synchronize()
    assert offload.stats.bytes_written == BLOCK
    y.sum().backward()


def test_parts_that_count_their_changes_apart_are_blocks_apart(offload):
    """Recurrent layers cut a tensor into gates with `unsafe_chunk`, and change each in place."""

    def run(context):
        torch.manual_seed(0)
        x = leaf(64, 64)
        with context or nullcontext():
            one, other = (x * 1).unsafe_chunk(2, dim=0)
            one.add_(1)
            first = one.sin()
            if context:
                context.synchronize()
            other.add_(5)  # the same number of changes as `one`, in the same storage
            second = other.sin()
            third = other[1:].cos()  # a view counts with what it is a view of
        if context:
            context.synchronize()
        (first.sum() + second.sum() + third.sum()).backward()
        return x.grad

    assert_same_bits(run(offload), run(None))
    assert offload.stats.bytes_written == BLOCK  # each half once
    assert offload.stats.blocks_deduplicated == 1


def test_an_alias_of_the_whole_that_counts_its_own_changes_is_another_block(offload):
    x, factor = leaf(64, 64), torch.ones(64, 64)
    with offload:
        alias = factor.data
        alias.mul_(2)
        first = (x * alias).sum()
        offload.synchronize()
        factor.add_(1)
        second = (x * factor).sum()
    offload.synchronize()
    (gradient,) = torch.autograd.grad(second, x)
    assert_same_bits(gradient, torch.full((64, 64), 3.0))
    del first


def test_gates_of_a_recurrent_layer_again_and_again(offload):
    """The writes of one gate run while the next is changed."""
    program = model_program(lambda: Recurrent(16, 24), 3, 9, 16)
    wanted = backward(program)
    for _ in range(60):
        assert_same_bits(backward(program, offload, settle=False), wanted)


class Recurrent(nn.Module):
    """The outputs alone of a GRU of two layers."""

    def __init__(self, width, hidden):
        super().__init__()
        self.cells = nn.GRU(width, hidden, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]
