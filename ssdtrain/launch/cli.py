"""The `ssdtrain` command."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ssdtrain
from ssdtrain.errors import ActivationLostError, ConfigError, StoreError, missing_extra
from ssdtrain.launch.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ssdtrain.launch.config import LaunchConfig

__all__ = ["main"]

USAGE = (
    "ssdtrain train CONFIG.yaml [--section.key value ...] "
    "[--print_config] [--compare [--rounds N]] [--json FILE]"
)

DESCRIPTION = """\
Train PyTorch models whose activations do not fit in memory.

commands:
  train CONFIG.yaml     train a model from a config file; `ssdtrain train --help` lists every option
"""

TRAIN_DESCRIPTION = """\
Train a GPT-2, Llama or BERT model with random weights on text files, with its activations kept in memory,
recomputed in the backward pass (gradient checkpointing), or offloaded to SSD.

CONFIG.yaml is one of configs/*.yaml or your own. Each of its keys can be given on the command line too:
--train.batch_size 4 stands for `train: {batch_size: 4}` and wins over the file.
"""

# Package, and the module that says whether it is installed.
EXTRA = (
    ("jsonargparse", "jsonargparse"),
    ("PyYAML", "yaml"),
    ("rich", "rich"),
    ("tokenizers", "tokenizers"),
    ("transformers", "transformers"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    0: done. 1: the run failed. 2: what was asked for is not possible, nothing was begun. 130: interrupted.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
            return _command(sys.argv[1:] if arguments is None else list(arguments))
    except ConfigError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, error.exit_code)
    except (StoreError, ActivationLostError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        sys.stderr.write("ssdtrain: interrupted\n")
        return 130


def _fail(error: Exception, exit_code: int) -> int:
    sys.stderr.write(f"ssdtrain: error: {' '.join(str(error).split())}\n")
    return exit_code


def _show_warning(
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    *more: Any,
) -> None:
    """Of our own warnings a user needs the text, not the line that it came from."""
    # Not by file name: a warning is told of the line that called us.
    if str(message).startswith(("ssdtrain ", "spill_dir: ")):
        sys.stderr.write(f"ssdtrain: warning: {' '.join(str(message).split())}\n")
    else:
        show(message, category, filename, *more)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _command(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:
        return _train(arguments[1:])
    parser = _Parser(
        prog="ssdtrain",
        usage="ssdtrain [--help] [--version] COMMAND ...",
        add_help=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this and exit")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(f"{arguments[0]}: no such command; the commands are: train")
    options = parser.parse_args(arguments)
    if options.version:
        sys.stdout.write(f"ssdtrain {ssdtrain.__version__}\n")
        return 0
    parser.print_help()
    return 0


def _train(arguments: list[str]) -> int:
    for package, module in EXTRA:
        if importlib.util.find_spec(module) is None:
            raise missing_extra(package, "launch", "ssdtrain train")

    parser = _Parser(
        prog="ssdtrain train",
        usage=USAGE,
        description=TRAIN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this and exit")
    parser.add_argument("--print_config", action="store_true", help="print the whole config as YAML and exit")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run keep, recompute and offload, each in a process of its own",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="with --compare: N runs of each mode (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    parser.add_argument("--part-of-comparison", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)

    from ssdtrain.launch import parse

    if options.help:
        sys.stdout.write(f"{parser.format_help()}\nconfig file and overrides:\n{parse.option_help()}")
        return 0
    # The file comes first: after `--key value` nobody can tell a value from a file.
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the config file is missing; usage: {USAGE}")
    path, overrides = Path(rest[0]), rest[1:]
    if options.print_config:
        sys.stdout.write(parse.print_config(path, overrides))
        return 0
    if options.rounds is not None and (options.rounds < 1 or not options.compare):
        raise ConfigError(f"--rounds: expected at least 1, and --compare with it; got {options.rounds}")
    config = parse.parse_config(path, overrides)
    return _run(config, options)


def _run(config: LaunchConfig, options: argparse.Namespace) -> int:
    # Everything that can be refused is refused here, before a tokenizer or a model is made.
    from ssdtrain.launch import data, model, parallel, report, train

    parallel.check_parallel(config.parallel, compare=options.compare)
    started = parallel.ranks_started()
    reports = started is None or started.rank == 0
    if options.json is not None:
        report.check_json_path(options.json)
    data.find_files(config.data)
    _silence_transformers()
    model.transformers_config(config.model)
    if options.compare or config.mode == "offload":
        train.check_spill_directories(config)

    from ssdtrain.launch import compare
    from ssdtrain.launch.progress import Progress, make_console

    console = make_console(quiet=not reports)
    if options.compare:
        runs = compare.compare(config, options.rounds or 1, console)
    else:
        runs = [train.train(config, Progress(config, console, brief=options.part_of_comparison))]
    if options.json is not None and reports:
        report.write_json(options.json, config, runs)
    if not options.part_of_comparison:
        console.print(report.result_table(runs))
    if options.compare:
        console.print(compare.check_equal(runs))
    return 0


def _silence_transformers() -> None:
    """Its advice is about downloaded models."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
