"""Every option of offloading: its unit, its default and what is checked about it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ssdtrain.errors import ConfigError

__all__ = ["BACKENDS", "DEFAULT_SPILL_DIR", "OffloadConfig", "in_bytes", "parse_size"]

BACKENDS = ("auto", "gds", "direct", "host")
ON_STORE_ERROR = ("keep", "raise")
ON_FULL_QUEUE = ("keep", "wait")
SIZES = ("min_tensor_bytes", "host_memory_bytes", "min_free_bytes", "prefetch_bytes", "store_queue_bytes")

# By the Filesystem Hierarchy Standard, files in /var/tmp outlive a reboot: a disk, where /tmp may be RAM.
DEFAULT_SPILL_DIR = "/var/tmp"  # noqa: S108 - spill files have no name, so nobody can squat on one

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MAX_BYTES = 1 << 60

Paths = str | Path | Sequence[str | Path]


def parse_size(value: int | str, name: str) -> int:
    """Turn "12GiB", "512 MiB", "1.5GB" or a plain number into bytes.

    Args:
        value: Bytes, or a number with a unit: KiB, MiB, GiB, TiB (powers of 1024; also K, M, G, T) or
            KB, MB, GB, TB (powers of 1000).
        name: The option's name, for the error.

    Raises:
        ConfigError: For anything else, for negative sizes and for more than 2**60 bytes.
    """
    expected = "expected bytes as an int, or a string such as '12GiB'"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}: {expected}, got {value!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            units = "KiB, MiB, GiB, TiB, KB, MB, GB, TB"
            raise ConfigError(f"{name}: {expected} (units: {units}), got {value!r}")
        value = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if not 0 <= value <= _MAX_BYTES:
        raise ConfigError(f"{name}: expected a size from 0 to 2**60 bytes, got {value}")
    return value


def in_bytes(size: int | str) -> int:
    """A size that a config has parsed; its declared type is that of the config's argument."""
    assert isinstance(size, int)
    return size


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How activations are offloaded. Every size takes an int of bytes or a string such as "12GiB".

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    spill_dir: Paths | None = None
    """One directory on an SSD, or several, over which blocks are spread so that their bandwidths add up.
    None: `$SSDTRAIN_SPILL_DIR` (several separated by ":"), else /var/tmp.
    Under torchrun the ranks of a machine divide the list among them; see docs/distributed.md."""

    backend: str = "auto"
    """"auto": GPUDirect Storage where there is a GPU, kvikio, and a trial succeeds; else O_DIRECT where the directory
    allows it, else buffered I/O that drops its page cache. "gds": GPUDirect Storage or an error. "direct": O_DIRECT
    or an error. "host": plain host memory, no disk; for tests and for devices."""

    min_tensor_bytes: int | str = "1MiB"
    """Storages smaller than this stay in memory."""

    max_spill_bytes: int | str | None = None
    """Most bytes on disk at one time, shared evenly by the ranks of the machine, and by each rank's directories;
    None: bounded by the disk alone."""

    host_memory_bytes: int | str = 0
    """Host memory, pinned, that blocks of an accelerator stay in before the SSD; 0: none. With backend "host", most
    bytes of it."""

    min_free_bytes: int | str = "1GiB"
    """Free bytes that are left to other users of each spill directory's file system."""

    prefetch_bytes: int | str = "256MiB"
    """Most bytes that are read ahead of backward; a larger block passes alone. 0: every block is read when it is
    asked for."""

    store_queue_bytes: int | str = "256MiB"
    """Most bytes that wait for the disk, those being written included; a larger block passes alone."""

    on_full_queue: str = "keep"
    """When `store_queue_bytes` is reached: "keep" the block in memory, or let the forward pass "wait"."""

    io_threads: int = 2
    """Threads that read and write, for each spill directory."""

    verify: bool = False
    """Checksum every block (XXH3, 64 bits) when it is written, and compare when it is read. Blocks of a GPU then go
    through host memory."""

    on_store_error: str = "keep"
    """When a write fails: "keep" the block in memory and warn once, or "raise" at the next saved tensor."""

    def __post_init__(self) -> None:
        for name in SIZES:
            object.__setattr__(self, name, parse_size(getattr(self, name), name))
        if self.max_spill_bytes is not None:
            object.__setattr__(self, "max_spill_bytes", parse_size(self.max_spill_bytes, "max_spill_bytes"))
        for name, allowed in (
            ("backend", BACKENDS),
            ("on_store_error", ON_STORE_ERROR),
            ("on_full_queue", ON_FULL_QUEUE),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}: expected one of {', '.join(allowed)}; got {getattr(self, name)!r}"
                )
        if (
            self.backend == "host"
            and self.host_memory_bytes
            and self.max_spill_bytes not in (None, self.host_memory_bytes)
        ):
            raise ConfigError(
                f"host_memory_bytes: with backend='host' it is the quota, as max_spill_bytes is; got "
                f"{self.host_memory_bytes} and {self.max_spill_bytes}, give one of them"
            )
        threads = self.io_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 64:
            raise ConfigError(f"io_threads: expected a whole number from 1 to 64, got {threads!r}")
        if not isinstance(self.verify, bool):
            raise ConfigError(f"verify: expected true or false, got {self.verify!r}")
        if self.verify and self.backend == "gds":
            raise ConfigError(
                'verify: checksums are made in host memory, which backend="gds" goes around; use backend="direct"'
            )
        object.__setattr__(self, "spill_dir", _paths(self.spill_dir))

    @property
    def directories(self) -> tuple[Path, ...]:
        """The spill directories, after the environment and the default have been looked at."""
        if self.spill_dir is not None:
            assert isinstance(self.spill_dir, tuple)
            return self.spill_dir
        from_environment = os.environ.get("SSDTRAIN_SPILL_DIR", "").split(":")
        named = tuple(Path(name).expanduser() for name in from_environment if name)
        return named or (Path(DEFAULT_SPILL_DIR),)

    @classmethod
    def of(cls, config: OffloadConfig | None, options: dict[str, Any]) -> OffloadConfig:
        """`config` with `options` on top of it.

        Raises:
            ConfigError: An option does not exist; the text lists those that do.
        """
        if config is not None and not isinstance(config, cls):
            raise ConfigError(
                f"config: expected an OffloadConfig, got {config!r}; options go by name, such as spill_dir=..."
            )
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                meant = f", did you mean {near[0]}?" if near else "; the options are " + ", ".join(names)
                raise ConfigError(f"{name}: no such option{meant}")
        return replace(config or cls(), **options)


def _paths(value: Any) -> tuple[Path, ...] | None:
    if value is None:
        return None
    several = [value] if isinstance(value, str | os.PathLike) else value
    if (
        not isinstance(several, Sequence)
        or not several
        or not all(isinstance(one, str | os.PathLike) and os.fspath(one) for one in several)
    ):
        raise ConfigError(f"spill_dir: expected a directory or a list of directories, got {value!r}")
    return tuple(Path(one).expanduser() for one in several)
