"""`OffloadActivations`: the context manager, pack and unpack."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.block import Block, Handle
from ssdtrain.config import OffloadConfig, in_bytes
from ssdtrain.device.transfers import Transfers
from ssdtrain.engine import Engine
from ssdtrain.errors import SSDTrainError
from ssdtrain.saved import (
    Geometry,
    ModelStorages,
    Span,
    check_version,
    is_plain,
    root_of,
    saved_unfilled,
)
from ssdtrain.schedule import Pass, Schedule
from ssdtrain.storage import open_store

if TYPE_CHECKING:
    from ssdtrain.device.base import Transfer
    from ssdtrain.stats import OffloadStats
    from ssdtrain.storage.base import SpillStore

__all__ = ["OffloadActivations"]


class OffloadActivations(saved_tensors_hooks):
    """Keeps the activations of the forward passes inside it on SSD until backward asks for them.

    Enter it around each forward pass; run backward inside, after, or never. It nests like any other
    `torch.autograd.graph.saved_tensors_hooks`: the innermost one sees a saved tensor. Gradients are those of plain
    torch, bit for bit.

    Args:
        model: Its parameters and buffers stay in memory, whatever views or autocast copies of them autograd saves.
            None: only what is an `nn.Parameter`, or a view of one, is recognised.
        config: Options.
        **options: Fields of `OffloadConfig`, on top of `config`.

    Raises:
        ConfigError: An option, or a spill directory, cannot be used.

    Example:
        >>> offload = ssdtrain.OffloadActivations(model, spill_dir="/mnt/nvme")
        >>> with offload:
        ...     loss = model(batch)
        >>> loss.backward()
    """

    def __init__(
        self, model: nn.Module | None = None, config: OffloadConfig | None = None, **options: Any
    ) -> None:
        checked = OffloadConfig.of(config, options)
        store = self._open_store(checked)
        try:
            transfers = self._open_transfers(checked, store)
        except BaseException:
            store.close()
            raise
        self._session = session = _Session(model, checked, store, transfers)
        super().__init__(session.pack, session.unpack)

    def _open_store(self, config: OffloadConfig) -> SpillStore:
        return open_store(config)

    def _open_transfers(self, config: OffloadConfig, store: SpillStore) -> Transfers:
        # The compute thread reads as well.
        return Transfers(config, threads=config.io_threads * store.members + 1)

    def __enter__(self) -> Self:  # type: ignore[override]  # the base class returns nothing
        """Begin a forward pass.

        Raises:
            SSDTrainError: It is closed, or belongs to another process.
        """
        self._session.begin()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """End a forward pass. Backward may come now, later or never."""
        super().__exit__(*exception)
        self._session.end()

    @property
    def stats(self) -> OffloadStats:
        """Counters, as of now."""
        return self._session.stats()

    def synchronize(self) -> None:
        """Return when no store is queued or running, and let go of the memory of what this thread packed.

        Raises:
            StoreError: A write failed, and `on_store_error` is "raise".
        """
        self._session.synchronize()

    def close(self) -> None:
        """Stop the threads and give the disk's room back. Idempotent; also happens at garbage collection and exit.

        A backward pass that still needs a block on disk then raises `ActivationLostError`.
        """
        self._session.close()


# What torch answers when no backward pass is running.
_NO_TASK = -1


class _Kept:
    """What the pack hook returns for an exempt tensor: itself, and its version."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version


class _Thread(threading.local):
    """What each thread that runs a forward pass has of its own."""

    def __init__(self) -> None:
        self.forward_pass: Pass | None = None
        self.to_settle: deque[Block] = deque()  # blocks packed here whose memory is to be let go


class _Session:
    """All that one offloader owns. Its hooks are held by every graph, so it outlives the last of them.

    Apart from `OffloadActivations`, whose base class holds the hooks, so that there is no reference cycle and both
    end at once when they are no longer used.
    """

    def __init__(
        self, model: nn.Module | None, config: OffloadConfig, store: SpillStore, transfers: Transfers
    ) -> None:
        self._min_bytes = max(
            in_bytes(config.min_tensor_bytes), 1
        )  # an emptied storage has nothing to offload
        self._weights = ModelStorages(model)
        self._pid = os.getpid()
        self._closed = False
        self._schedule = Schedule()
        self._transfers = transfers
        self._engine = Engine(store, config)
        self._thread = _Thread()
        self._finalizer = weakref.finalize(self, self._engine.close_from_finalizer)

    def begin(self) -> None:
        self._check_process()
        if self._closed:
            raise SSDTrainError("this OffloadActivations is closed; make a new one")
        self._weights.refresh()
        # Micro-batches whose backward is yet to come are one pass: backward of one then reads ahead into the next.
        if self._thread.forward_pass is not None:
            self._thread.forward_pass.share_no_more()

    def end(self) -> None:
        if os.getpid() == self._pid:  # a forked child ends the forward pass that it was born in, too
            self._engine.end_forward()

    def close(self) -> None:
        self._closed = True
        self._engine.close()
        self._finalizer.detach()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SSDTrainError(
                "this OffloadActivations was made before a fork and its threads are in the parent process; "
                "make one in each process"
            )

    def pack(self, tensor: Tensor) -> _Kept | Handle:
        """The pack hook."""
        self._check_process()
        transfer = None if saved_unfilled(sys._getframe().f_back) else self._transfer_for(tensor)
        # Detached: an operation may save its own output, and what it saves must not hold the graph that holds it.
        detached = tensor.detach()
        if transfer is None:
            self._engine.exempt(self._thread.to_settle)
            return _Kept(detached)
        return self._offload(detached, root_of(tensor), transfer)

    def _transfer_for(self, tensor: Tensor) -> Transfer | None:
        """How a tensor is moved; None where it is exempt."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() < self._min_bytes
            # Backward is running: reentrant checkpointing recomputes what is needed at once, and a graph of the
            # gradient (create_graph) is mostly used soon.
            or torch._C._current_graph_task_id() != _NO_TASK
            or self._weights.owns(tensor, storage)
        ):
            return None
        return self._transfers.of(tensor.device)

    def _offload(self, tensor: Tensor, root: Tensor, transfer: Transfer) -> Handle:
        geometry = Geometry.of(tensor)
        storage = tensor.untyped_storage()
        span = Span.of(tensor, storage, geometry, root)
        transfer.hold(tensor)
        thread = self._thread
        if thread.forward_pass is None or thread.forward_pass.begun_backward or thread.forward_pass.worn_out:
            thread.forward_pass = Pass(self._schedule)
        for block in thread.forward_pass.blocks_of(storage, root):
            if block.version == tensor._version and block.span.covers(span):
                handle = self._engine.share(block, geometry, tensor)
                if handle is not None:
                    return handle
        block = Block(
            storage,
            root,
            span,
            tensor._version,
            transfer=transfer,
            to_settle=thread.to_settle,
            forward_pass=thread.forward_pass,
        )
        return self._engine.store(block, geometry, tensor)

    def unpack(self, packed: _Kept | Handle) -> Tensor:
        """The unpack hook."""
        self._check_process()
        if isinstance(packed, _Kept):
            check_version(packed.tensor, packed.version)
            return packed.tensor
        task = torch._C._current_graph_task_id()
        return self._engine.fetch(packed, None if task == _NO_TASK else task, self._thread.to_settle)

    def stats(self) -> OffloadStats:
        self._check_process()
        return self._engine.snapshot()

    def synchronize(self) -> None:
        self._check_process()
        self._engine.synchronize(self._thread.to_settle)
