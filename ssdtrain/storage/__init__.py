"""Stores that blocks are spilled to, and `open_store`, which builds the one that a config asks for."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ssdtrain.config import in_bytes
from ssdtrain.errors import ConfigError, SSDTrainError, missing_extra
from ssdtrain.storage.base import PAGE, DeviceBuffer, DeviceStore, Edges, Extent, HostBuffer, SpillStore
from ssdtrain.storage.direct import DirectStore
from ssdtrain.storage.gds import GdsStore, gds_extra, open_gds_store
from ssdtrain.storage.host import HostStore
from ssdtrain.storage.kvikio_setup import is_installed
from ssdtrain.storage.stripe import StripeStore
from ssdtrain.storage.verify import VerifyingStore

if TYPE_CHECKING:
    from pathlib import Path

    from ssdtrain.config import OffloadConfig

__all__ = [
    "PAGE",
    "DeviceBuffer",
    "DeviceStore",
    "DirectStore",
    "Edges",
    "Extent",
    "GdsStore",
    "HostBuffer",
    "HostStore",
    "SpillStore",
    "StripeStore",
    "VerifyingStore",
    "open_store",
]


def open_store(config: OffloadConfig) -> SpillStore:
    """The store that `config` describes: directories, backend, quota, checksums.

    Raises:
        ConfigError: A directory cannot be used, or not as asked. Whatever was opened before is closed again.
    """
    store = _open_host(config) if config.backend == "host" else _open_directories(config)
    if not config.verify:
        return store
    try:
        return VerifyingStore(store)
    except ConfigError:
        store.close()
        raise


def _open_host(config: OffloadConfig) -> SpillStore:
    return HostStore(max_bytes=_quota(config))


def _open_directories(config: OffloadConfig) -> SpillStore:
    directories = config.directories
    _refuse_duplicates(directories)
    quota = _quota(config)
    limits: dict[str, Any] = {
        "max_bytes": None if quota is None else quota // len(directories),
        "min_free_bytes": in_bytes(config.min_free_bytes),
    }
    gds = _wants_gds(config)
    stores: list[SpillStore] = []
    try:
        for directory in directories:
            if gds:
                store: SpillStore = open_gds_store(directory, required=config.backend == "gds", **limits)
            else:
                store = DirectStore(directory, direct=True if config.backend == "direct" else None, **limits)
            stores.append(store)
    except BaseException:
        for store in stores:
            with suppress(SSDTrainError):
                store.close()
        raise
    return stores[0] if len(stores) == 1 else StripeStore(stores)


def _wants_gds(config: OffloadConfig) -> bool:
    """Whether to try GPUDirect Storage. Imports nothing that is not there already."""
    if config.backend == "gds":
        if not is_installed():
            raise missing_extra("kvikio", gds_extra(), 'backend="gds"')
        return True
    if config.backend != "auto" or config.verify or not is_installed():
        return False
    import torch

    return torch.cuda.is_available()


def _quota(config: OffloadConfig) -> int | None:
    return None if config.max_spill_bytes is None else in_bytes(config.max_spill_bytes)


def _refuse_duplicates(directories: tuple[Path, ...]) -> None:
    seen: dict[object, Path] = {}
    for directory in directories:
        try:
            status = directory.stat()
            identity: object = (status.st_dev, status.st_ino)
        except OSError:
            # Opening it will say what is wrong.
            identity = os.path.realpath(directory)
        if identity in seen:
            raise ConfigError(
                f"spill_dir: {os.fspath(directory)!r} and {os.fspath(seen[identity])!r} are one directory; "
                "name each once"
            )
        seen[identity] = directory
