"""A pipeline of two or more stages (1F1B), with the activations of every micro-batch on SSD.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py [--spill-dir DIR] [--steps N] [--keep]

`--keep` trains without offloading: the losses are the same to the last digit.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ssdtrain

parser = argparse.ArgumentParser(description="A pipeline with its activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if on_gpu:
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(rank)  # each rank has layers of its own
width, micro_batches = options.width, 2 * ranks
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stage = PipelineStage(model, rank, ranks, device)
schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)

# One for each rank: the model is this rank's stage.
offload = ssdtrain.OffloadActivations(model, spill_dir=options.spill_dir)
data = torch.Generator().manual_seed(0)  # the first rank has the input, the last one the target

for step in range(options.steps):
    batch = torch.randn(1024 * micro_batches, width, generator=data).to(device)
    losses: list[torch.Tensor] = []
    with nullcontext() if options.keep else offload:  # around forward and backward of all micro-batches
        if rank == 0:
            schedule.step(batch)
        elif rank == ranks - 1:
            schedule.step(target=batch.flip(1), losses=losses)
        else:
            schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"step {step + 1}: loss {torch.stack(losses).mean().item()!r}")

stats = offload.stats
print(
    f"rank {rank}: {stats.blocks_offloaded} blocks offloaded, {stats.bytes_written / 1e6:.1f} MB written\n",
    end="",
    flush=True,
)
offload.close()
dist.destroy_process_group()
