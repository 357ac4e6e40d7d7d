"""A small GPT-2 in transformers' Trainer, with its activations on SSD.

    python examples/hf_trainer.py [--spill-dir DIR] [--steps N] [--keep]

Needs `pip install 'ssdtrain[transformers]'`. `--keep` trains without offloading: the losses are the same to the last
digit.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from ssdtrain.integrations.transformers import SSDTrainCallback

parser = argparse.ArgumentParser(description="transformers' Trainer with activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

# The text is Python's own library, and each byte is a token.
text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: 1024 * 256].view(1024, 256)
data = [{"input_ids": row, "labels": row} for row in tokens]

torch.manual_seed(0)
shape = {"n_positions": 256, "n_embd": options.width, "n_layer": 4, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape))

with tempfile.TemporaryDirectory() as output:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data,
    )
    trainer.remove_callback(PrinterCallback)  # prints all that is logged, rounded
    # As good as callbacks=[SSDTrainCallback(...)], and reporters (TensorBoard, W&B) get the metrics as well.
    callback = None if options.keep else SSDTrainCallback.attach(trainer, spill_dir=options.spill_dir)
    trainer.train()

for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']!r}")
if callback is None:
    print("offloaded nothing")
else:
    stats = callback.stats
    print(
        f"offloaded {stats.blocks_offloaded} blocks: {stats.bytes_written / 1e6:.1f} MB written, "
        f"{stats.bytes_read / 1e6:.1f} MB read back, {stats.stall_seconds:.3f} s waited ({stats.backend})"
    )
