"""Stores that blocks are spilled to, and `open_store`, which builds the one that a config asks for."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ssdtrain.config import in_bytes
from ssdtrain.errors import ConfigError, SSDTrainError, missing_extra
from ssdtrain.storage.base import PAGE, DeviceBuffer, DeviceStore, Edges, Extent, HostBuffer, SpillStore
from ssdtrain.storage.direct import DirectStore
from ssdtrain.storage.gds import GdsStore, gds_extra, open_gds_store
from ssdtrain.storage.host import HostStore
from ssdtrain.storage.kvikio_setup import is_installed
from ssdtrain.storage.sharing import directories_of_rank, local_ranks
from ssdtrain.storage.stripe import StripeStore
from ssdtrain.storage.tier import TieredStore
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
    "TieredStore",
    "VerifyingStore",
    "open_store",
]


def open_store(config: OffloadConfig) -> SpillStore:
    """The store that `config` describes: directories, backend, quota, host memory, checksums.

    Raises:
        ConfigError: A directory cannot be used, or not as asked. Whatever was opened before is closed again.
    """
    host_bytes = in_bytes(config.host_memory_bytes)
    if config.backend == "host":
        store: SpillStore = _open_host(host_bytes or _quota(config))[0]
    else:
        store = _open_directories(config)
    try:
        if host_bytes and config.backend != "host":
            store = _with_host_memory(store, host_bytes)
        return VerifyingStore(store) if config.verify else store
    except BaseException:
        store.close()
        raise


def _open_host(max_bytes: int | None) -> tuple[HostStore, bool]:
    """The store, and whether its memory is pinned."""
    # They bring torch, and import this package.
    from ssdtrain.memory.pinned import PinnedMemory
    from ssdtrain.memory.slabs import SlabArena

    memory = PinnedMemory()
    slabs = SlabArena(memory.allocate, max_bytes) if memory.pinned else None
    return HostStore(max_bytes=max_bytes, slabs=slabs), memory.pinned


def _with_host_memory(below: SpillStore, max_bytes: int) -> SpillStore:
    host, pinned = _open_host(max_bytes)
    if not pinned:
        warnings.warn(
            "host_memory_bytes: there is no accelerator, and blocks of CPU tensors are in host memory already: "
            "another copy of them there, before the SSD, gains nothing. Set it to 0",
            RuntimeWarning,
            stacklevel=5,
        )
    return TieredStore(host, below)


def _open_directories(config: OffloadConfig) -> SpillStore:
    _refuse_duplicates(config.directories)
    directories = directories_of_rank(config.directories)
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
    return None if config.max_spill_bytes is None else in_bytes(config.max_spill_bytes) // local_ranks()


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
