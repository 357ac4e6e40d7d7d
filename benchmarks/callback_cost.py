"""What the callback costs a step of transformers' Trainer when it offloads nothing.

    .venv/bin/python benchmarks/callback_cost.py [--rounds N] [--steps N] [--at-most PERCENT] [--json FILE]

Trains a GPT-2 of 4 layers with a threshold that no tensor reaches: the hooks enter and leave the offloader, every
saved tensor is looked at and left where it is, and the metrics are logged at each step. Trainings with and without it
alternate, so that whatever else the machine does meets both. A step is from the beginning of one to the
beginning of the next; the first ones of each training are left out. The ratio is the median over the rounds of that
of the two medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ssdtrain.integrations.transformers import SSDTrainCallback

# The first step makes the optimizer's state, and warms up what was trimmed.
WARM_UP = 2


class Clock(TrainerCallback):
    """Remembers when each step began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, *_arguments: Any, **_others: Any) -> None:
        """A step begins."""
        self.began.append(time.perf_counter())

    def seconds(self) -> float:
        """Of a step, median."""
        steps = [end - begin for begin, end in zip(self.began, self.began[1:], strict=False)]
        return statistics.median(steps[WARM_UP:])


def train(options: argparse.Namespace, output: str, callbacks: list[TrainerCallback]) -> float:
    """Seconds a step."""
    torch.manual_seed(0)
    shape = {"n_positions": options.length, "n_embd": options.width, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape))
    row = torch.randint(256, (options.length,))
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            max_steps=WARM_UP + options.steps + 1,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row}] * 64,
        callbacks=[clock, *callbacks],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.seconds()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="of two trainings (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a training (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="of a sequence (%(default)s)")
    parser.add_argument("--at-most", type=float, metavar="PERCENT", help="exit with 1 if it costs more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps: expected at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    options = parse(arguments)
    torch.set_num_threads(1)
    # That nothing is offloaded is what is asked for.
    warnings.filterwarnings("ignore", message="ssdtrain offloaded nothing")
    rounds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as output:
        for number in range(options.rounds + 1):
            plain = train(options, output, [])
            with_callback = train(options, output, [SSDTrainCallback(min_tensor_bytes="1TiB")])
            if number:  # the first warms up
                rounds.append((plain, with_callback))
    ratios = [ours / theirs for theirs, ours in rounds]
    percent = (statistics.median(ratios) - 1) * 100
    plain, with_callback = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"a step without the callback: {plain * 1e3:.2f} ms, with it: {with_callback * 1e3:.2f} ms")
    load = os.getloadavg()[0]
    print(f"the callback costs {percent:.2f}% of a step ({options.rounds} rounds, load average {load:.2f})")
    if options.json is not None:
        document = {"percent": percent, "ratios": ratios, "rounds": rounds, "load_average": load}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.at_most is not None and percent > options.at_most:
        print(f"above {options.at_most:g}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
