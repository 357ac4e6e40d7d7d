"""A training loop with Accelerate, with its activations on SSD.

    python examples/accelerate_loop.py [--spill-dir DIR] [--steps N] [--keep]
    accelerate launch examples/accelerate_loop.py ...

Needs `pip install 'ssdtrain[transformers]'`. `--keep` trains without offloading: the losses are the same to the last
digit.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ssdtrain

parser = argparse.ArgumentParser(description="An Accelerate loop with its activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--mixed-precision", default="bf16", choices=["no", "bf16"])
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

# The text is Python's own library, and each byte is a token.
text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: 1024 * 256].view(1024, 256)

torch.manual_seed(0)
shape = {"n_positions": 256, "n_embd": options.width, "n_layer": 4, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accelerator = Accelerator(mixed_precision=options.mixed_precision, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(tokens, batch_size=8, shuffle=True)
)

# After prepare: its weights are the ones that stay in memory. One for the whole training.
offload = ssdtrain.OffloadActivations(model, spill_dir=options.spill_dir)

for step, batch in zip(range(options.steps), loader, strict=False):
    with accelerator.accumulate(model):
        with nullcontext() if options.keep else offload:  # around the forward pass
            loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step + 1}: loss {loss.item()!r}")

stats = offload.stats
accelerator.print(
    "offloaded nothing"
    if options.keep
    else f"offloaded {stats.blocks_offloaded} blocks: {stats.bytes_written / 1e6:.1f} MB written, "
    f"{stats.bytes_read / 1e6:.1f} MB read back, {stats.stall_seconds:.3f} s waited ({stats.backend})"
)
offload.close()
