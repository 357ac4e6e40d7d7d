"""kvikio as the stores use it: which version, with which settings, and for how long."""

from __future__ import annotations

import importlib.util
import os
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "SETTINGS",
    "GdsRefusedError",
    "KvikioSettings",
    "compat_mode",
    "is_installed",
    "load",
    "one_line",
    "settings",
]

# Before 26.10 an error in one task of a transfer was raised while others still used the memory.
MIN_VERSION = (26, 10)


class GdsRefusedError(Exception):
    """Why device memory cannot go straight to and from the disk; one line for the user."""


@dataclass(frozen=True, kw_only=True)
class KvikioSettings:
    """What kvikio is set to while a store uses it. They hold for the whole process and are put back afterwards.

    A setting whose environment variable is set (`KVIKIO_NTHREADS`, `KVIKIO_TASK_SIZE`, ...) stays as the user set it.
    Measured with kvikio 26.10 in compatibility mode, two threads moving 16 MiB each on ext4 with two cores, cold
    reads, writes with fdatasync; not on a GPU.
    """

    num_threads: int = 4
    """kvikio: 1, which moves one part of one transfer at a time, whatever the number of callers. 4 moved 2.2 GiB/s
    out and 1.7 in, 1 moved 1.7 and 1.3, 8 no more than 4."""

    task_size: int = 4 << 20
    """As kvikio. Nothing from 1 to 16 MiB was better by more than the noise."""

    gds_threshold: int = 16 << 10
    """As kvikio. Shorter transfers take the POSIX path, in the calling thread."""

    bounce_buffer_size: int = 4 << 20
    """kvikio: 16 MiB. Pinned host memory, one for each thread, in compatibility mode; a task fills no more."""

    auto_direct_io_read: bool = True
    """kvikio: False. In compatibility mode, 1.7 GiB/s past the page cache and 0.5 through it."""

    auto_direct_io_write: bool = True
    """As kvikio. 2.2 GiB/s past the page cache and 0.6 through it."""


SETTINGS = KvikioSettings()

_VARIABLES = {"num_threads": "KVIKIO_NTHREADS"}


def is_installed() -> bool:
    """Whether there is a kvikio, without importing it."""
    return importlib.util.find_spec("kvikio") is not None


def load() -> Any:
    """Import kvikio.

    Raises:
        GdsRefusedError: It cannot be imported, or is too old.
    """
    try:
        import kvikio
        import kvikio.defaults
    except Exception as error:  # it loads shared libraries, each of which fails in its own way
        raise GdsRefusedError(f"kvikio cannot be imported ({one_line(error)})") from error
    version: str = kvikio.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise GdsRefusedError(f"kvikio {version} is too old; install {wanted} or newer")
    return kvikio


class _Shared:
    """Settings that the first of several users makes and the last one puts back, in whatever order they leave."""

    def __init__(self) -> None:
        # Guards the two below, and is held while kvikio is told, which waits for its tasks in flight but for no lock.
        self._lock = threading.Lock()
        self._users = 0
        self._scope: Any = None

    def enter(self, kvikio: Any) -> None:
        with self._lock:
            if self._users == 0:
                self._scope = kvikio.defaults.set(_wanted())
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._scope.__exit__(None, None, None)
                self._scope = None


settings = _Shared()


@contextmanager
def compat_mode(kvikio: Any, mode: Any) -> Iterator[None]:
    """Files that are opened meanwhile are opened in this mode."""
    with kvikio.defaults.set("compat_mode", mode):
        yield


def _wanted() -> dict[str, int | bool]:
    return {
        name: value
        for name, value in asdict(SETTINGS).items()
        if _VARIABLES.get(name, f"KVIKIO_{name.upper()}") not in os.environ
    }


def one_line(error: BaseException) -> str:
    """An error's text for the middle of a sentence."""
    return " ".join(str(error).split()) or type(error).__name__
