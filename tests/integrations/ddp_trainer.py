"""Run by torchrun: trains with and without the callback, and prints what a rank saw as JSON.

torchrun --nproc_per_node 2 ddp_trainer.py DIRECTORY
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from integrations.helpers import OPTIONS, gpt2, hooks_of, losses, trainer_of, weights
from ssdtrain.integrations.transformers import SSDTrainCallback

torch.set_num_threads(1)
directory = Path(sys.argv[1])


def train(*callbacks):
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(gpt2(), Path(output), *callbacks, gradient_accumulation_steps=2)
        trainer.train()
    return trainer


callback = SSDTrainCallback(spill_dir=directory, **OPTIONS)
plain, trainer = train(), train(callback)
ours, theirs = weights(trainer.model), weights(plain.model)
result = {
    "wrapper": type(trainer.model_wrapped).__name__,
    "losses": losses(trainer),
    "losses_of_keep": losses(plain),
    "same_weights": all(torch.equal(ours[name], theirs[name]) for name in theirs),
    "bytes_written": callback.stats.bytes_written,
    "hooks": hooks_of(trainer.model),
}
(directory / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
torch.distributed.destroy_process_group()
