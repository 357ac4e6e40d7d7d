"""A plain training loop whose activations wait for backward on SSD.

    python examples/plain_loop.py [--spill-dir DIR] [--steps N] [--keep]

`--keep` trains without offloading: the losses are the same to the last digit.
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn

import ssdtrain

parser = argparse.ArgumentParser(description="A plain training loop with its activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

# Made up on the spot: learn to reverse a vector.
torch.manual_seed(0)
width = options.width
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Threads and files live as long as this object: one for the whole training.
offload = ssdtrain.OffloadActivations(model, spill_dir=options.spill_dir)

for step in range(options.steps):
    batch = torch.randn(2048, width)
    with nullcontext() if options.keep else offload:  # around the forward pass
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
    loss.backward()  # outside of it, or inside
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item()!r}")

stats = offload.stats
print(
    "offloaded nothing"
    if options.keep
    else f"offloaded {stats.blocks_offloaded} blocks: {stats.bytes_written / 1e6:.1f} MB written, "
    f"{stats.bytes_read / 1e6:.1f} MB read back, {stats.stall_seconds:.3f} s waited ({stats.backend})"
)
offload.close()
