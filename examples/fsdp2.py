"""FSDP2, with the activations of every rank on SSD.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py [--spill-dir DIR] [--steps N] [--keep]

`--keep` trains without offloading: the losses are the same to the last digit.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ssdtrain

parser = argparse.ArgumentParser(description="FSDP2 with its activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
if on_gpu:
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(0)  # the same weights in every rank
width = options.width
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))).to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # and other data

# One for each rank, after the model is sharded.
offload = ssdtrain.OffloadActivations(model, spill_dir=options.spill_dir)

for step in range(options.steps):
    batch = torch.randn(2048, width, device=device)
    with nullcontext() if options.keep else offload:  # around the forward pass
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item()!r}")

stats = offload.stats
print(
    f"rank {rank}: {stats.blocks_offloaded} blocks offloaded, {stats.bytes_written / 1e6:.1f} MB written\n",
    end="",
    flush=True,
)
offload.close()
dist.destroy_process_group()
