"""Everything that ssdtrain raises on purpose.

```
SSDTrainError
├── ConfigError                  also a ValueError: an option, a file or a machine that cannot do what was asked
├── StoreError                   also an OSError: a spill store refused to reserve, write or read
├── ActivationLostError          also a RuntimeError: a block that backward needs cannot be read back
└── InplaceModificationError     also a RuntimeError: a saved tensor was changed before backward could use it
```
"""

from __future__ import annotations

import errno as errno_codes
import os

__all__ = [
    "ActivationLostError",
    "ConfigError",
    "InplaceModificationError",
    "SSDTrainError",
    "StoreError",
    "missing_extra",
]


class SSDTrainError(Exception):
    """Base class of every error of this package."""


class ConfigError(SSDTrainError, ValueError):
    """What the user asked for is not possible; the text names the option and what to do next."""


class StoreError(SSDTrainError, OSError):
    """A spill store could not reserve, write or read.

    Args:
        errno: The operating system's error number, e.g. `errno.ENOSPC`.
        message: What was being done, with offset and length in bytes.
        path: The spill directory (spill files themselves have no name).
    """

    def __init__(self, errno: int, message: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno, message, os.fspath(path))

    @classmethod
    def from_os(cls, error: OSError, doing: str, path: str | os.PathLike[str]) -> StoreError:
        """Wrap an operating system error, keeping its number and text."""
        return cls(error.errno or errno_codes.EIO, f"{doing}: {error.strerror or error}", path)


class ActivationLostError(SSDTrainError, RuntimeError):
    """A block that backward needs cannot be read back; the text names file, offset, length and cause."""


class InplaceModificationError(SSDTrainError, RuntimeError):
    """A saved tensor was modified in place before backward used it, as torch raises without hooks."""


def missing_extra(package: str, extra: str, purpose: str) -> ConfigError:
    """The error for a feature whose optional dependency is not installed."""
    return ConfigError(f"{purpose} needs {package}, which is not installed: pip install 'ssdtrain[{extra}]'")
