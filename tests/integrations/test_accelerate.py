"""A plain `with` in a loop that Accelerate has prepared."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from core.helpers import assert_nothing_left, same_bits
from torch.utils.data import DataLoader

import ssdtrain

from .helpers import OPTIONS, Tokens, gpt2, lora


@pytest.fixture(autouse=True)
def new_state():
    """Accelerate keeps the precision of the first accelerator of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(tmp_path, *, offloading, build=gpt2, checkpointing=False, **options):
    """Losses and weights of some steps, and the offloader's counters."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **options)
    model = build()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(8), batch_size=2))
    offload = ssdtrain.OffloadActivations(model, spill_dir=tmp_path, **OPTIONS)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            if offloading:
                with offload:
                    loss = model(**batch).loss
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if offloading:
        del loss
        assert_nothing_left(offload)
    offload.close()
    return losses, accelerator.unwrap_model(model).state_dict(), offload.stats


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16", "checkpointing": True},
        {"mixed_precision": "bf16", "build": lora},
    ],
    ids=["plain", "bf16", "accumulation", "bf16, checkpointing", "bf16, LoRA"],
)
def test_the_same_training(tmp_path, options):
    losses_of_keep, kept, _ = train(tmp_path, offloading=False, **options)
    losses, weights, stats = train(tmp_path, offloading=True, **options)
    assert len(losses) == 4
    assert losses == losses_of_keep
    assert [name for name in kept if not same_bits(weights[name], kept[name])] == []
    assert stats.bytes_written > 0


# Warnings of torch's own, within its compiler.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model(tmp_path):
    losses_of_keep, kept, _ = train(tmp_path, offloading=False, dynamo_backend="aot_eager")
    losses, weights, stats = train(tmp_path, offloading=True, dynamo_backend="aot_eager")
    assert losses == losses_of_keep
    assert [name for name in kept if not same_bits(weights[name], kept[name])] == []
    assert stats.bytes_written > 0
