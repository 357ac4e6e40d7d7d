"""From a YAML file and `--section.key value` to a LaunchConfig; mistakes are named by their dotted key."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError
from ssdtrain.launch.config import (
    CHOICES,
    SECTIONS,
    DataConfig,
    LaunchConfig,
    Mode,
    ModelConfig,
    Parallel,
    TrainConfig,
)

if TYPE_CHECKING:
    import jsonargparse

__all__ = ["closest", "option_help", "parse_config", "print_config"]

T = TypeVar("T")


def parse_config(path: Path, overrides: Sequence[str]) -> LaunchConfig:
    """Read a config file, put the overrides on top, and check all of it.

    Args:
        path: A YAML file whose top-level keys are `mode` and the sections.
        overrides: `--section.key value` and `--section.key=value`, as they stand on the command line.

    Raises:
        ConfigError: One line that names the file or the dotted key and what was expected.
    """
    return _build(_parse(path, overrides))


def print_config(path: Path, overrides: Sequence[str]) -> str:
    """The whole config as YAML, defaults and overrides included, after the same checks."""
    namespace = _parse(path, overrides)
    _build(namespace)
    del namespace["config"]
    text: str = _parser().dump(namespace, skip_unset=False)
    return text


def option_help() -> str:
    """What can stand in a config file: every key with its type, default and meaning."""
    text: str = _parser().format_help()
    return re.sub(r"  --\w+ CONFIG .*\n", "", text[text.index("  --mode") :])


def closest(word: str, known: Iterable[str]) -> str:
    """The end of an error: which of `known` was probably meant, or all of them if a line holds them."""
    known = list(known)
    match = difflib.get_close_matches(word, known, n=1)
    if match:
        return f"; did you mean {match[0]}?"
    return f"; known are {', '.join(known)}" if len(known) <= 20 else ""


def _parser() -> jsonargparse.ArgumentParser:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog="ssdtrain train", exit_on_error=False, print_config=None)
    parser.add_argument("--config", action="config", help="")
    parser.add_argument(
        "--mode",
        type=Mode,
        default="offload",
        help="what becomes of activations between forward and backward",
    )
    parser.add_argument(
        "--parallel",
        type=Parallel,
        default="none",
        help="how the ranks that torchrun starts share the work; none: a single process",
    )
    for name, section in SECTIONS.items():
        parser.add_argument(f"--{name}", type=section)
    return parser


def _parse(path: Path, overrides: Sequence[str]) -> jsonargparse.Namespace:
    import jsonargparse

    _check_file(path)
    _check_names(overrides)
    try:
        return _parser().parse_args(["--config", str(path), *overrides])
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_one_line(str(error))) from None


def _build(namespace: jsonargparse.Namespace) -> LaunchConfig:
    return LaunchConfig(
        mode=_not_null("mode", namespace["mode"], Mode),
        parallel=_not_null("parallel", namespace["parallel"], Parallel),
        model=_section(ModelConfig, "model", namespace),
        data=_section(DataConfig, "data", namespace),
        train=_section(TrainConfig, "train", namespace),
        offload=_section(OffloadConfig, "offload", namespace),
    )


def _section(cls: type[T], name: str, namespace: Any) -> T:
    hints = typing.get_type_hints(cls)
    values = {
        key: _not_null(f"{name}.{key}", value, hints[key]) for key, value in vars(namespace[name]).items()
    }
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def _not_null(name: str, value: Any, hint: Any) -> Any:
    if value is None and types.NoneType not in typing.get_args(hint):
        raise ConfigError(f"{name}: expected {_describe(hint)}, got null")
    return value


def _check_file(path: Path) -> None:
    """Find what jsonargparse would report without a key: syntax, structure and misspelt names."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; start from one of configs/*.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config file: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        expected = ", ".join([*CHOICES, *SECTIONS])
        raise ConfigError(
            f"{path}: expected a mapping with the keys {expected}; it needs data.files at least"
        )
    for name, values in content.items():
        if name in CHOICES:
            continue
        if name in SECTIONS and not isinstance(values, dict):
            raise ConfigError(f"{name}: expected a mapping of options below it in {path}, got {values!r}")
        for key in values if isinstance(values, dict) else [""]:
            _check_option(f"{name}.{key}")


def _check_names(overrides: Sequence[str]) -> None:
    for argument in overrides:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0].removesuffix("+")
            if name not in CHOICES:
                _check_option(name)


def _check_option(dotted: str) -> None:
    section, _, name = dotted.partition(".")
    if section not in SECTIONS:
        raise ConfigError(f"{section}: no such key{closest(section, [*CHOICES, *SECTIONS])}")
    known = [f"{section}.{field.name}" for field in dataclasses.fields(SECTIONS[section])]
    if dotted not in known and not dotted.startswith("model.overrides."):
        what = "no such option" if name else f"is a section; set one option of it: --{section}.option value"
        raise ConfigError(f"{dotted}: {what}{closest(dotted, known)}")


def _one_line(message: str) -> str:
    """Rewrite jsonargparse's report as "key: expected this, got that"."""
    key = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    if key is None or value is None:
        return message
    section, _, name = key[1].partition(".")
    hint = typing.get_type_hints(SECTIONS[section]).get(name) if section in SECTIONS else CHOICES.get(section)
    got = "null" if value[1] == "None" else value[1]
    return f"{key[1]}: expected {_describe(hint)}, got {got}" if hint else message


def _describe(hint: Any) -> str:
    """A type hint in a user's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(one) for one in arguments))
    if hint is types.NoneType:
        return "null"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {_describe(arguments[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    return names.get(origin or hint, "a path" if hint is Path else str(hint))
