"""An offloader over a store that the caller made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssdtrain.offload import OffloadActivations

if TYPE_CHECKING:
    from torch import nn

    from ssdtrain.config import OffloadConfig
    from ssdtrain.device.transfers import Transfers
    from ssdtrain.storage.base import SpillStore

__all__ = ["OffloadOver"]


class OffloadOver(OffloadActivations):
    """`OffloadActivations` that spills into `store` instead of opening one.

    Args:
        store: Closed with the offloader.
        transfers: How tensors get to it and back; None: as for any offloader.
        model: As there.
        config: As there; `spill_dir`, `backend`, `verify` and the limits of the disk have no effect.
        **options: As there.
    """

    def __init__(
        self,
        store: SpillStore,
        model: nn.Module | None = None,
        config: OffloadConfig | None = None,
        *,
        transfers: Transfers | None = None,
        **options: Any,
    ) -> None:
        self._store = store
        self._transfers = transfers
        super().__init__(model, config, **options)

    def _open_store(self, config: OffloadConfig) -> SpillStore:  # noqa: ARG002 - it is open
        return self._store

    def _open_transfers(self, config: OffloadConfig, store: SpillStore) -> Transfers:
        return self._transfers or super()._open_transfers(config, store)
