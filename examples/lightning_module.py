"""A LightningModule whose activations wait for backward on SSD.

    python examples/lightning_module.py [--spill-dir DIR] [--steps N] [--keep]

Needs `pip install 'ssdtrain[lightning]'`. `--keep` trains without offloading: the losses are the same to the last
digit.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from ssdtrain.integrations.lightning import SSDTrainCallback

parser = argparse.ArgumentParser(description="Lightning with activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()


class Reverse(lightning.LightningModule):
    """Learns to reverse a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """The whole step is offloaded, whatever it calls."""
        loss = nn.functional.mse_loss(self.layers(batch), batch.flip(1))
        print(f"step {number + 1}: loss {loss.item()!r}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in any module."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
width = options.width
data = torch.randn(2048 * options.steps, width)
callback = SSDTrainCallback(spill_dir=options.spill_dir)

trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[] if options.keep else [callback],
)
trainer.fit(Reverse(width), DataLoader(data, batch_size=2048))

stats = callback.stats
print(
    "offloaded nothing"
    if options.keep
    else f"offloaded {stats.blocks_offloaded} blocks: {stats.bytes_written / 1e6:.1f} MB written, "
    f"{stats.bytes_read / 1e6:.1f} MB read back, {stats.stall_seconds:.3f} s waited ({stats.backend})"
)
