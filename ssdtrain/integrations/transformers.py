"""Offloading in `transformers.Trainer`, and in all that derive from it, such as TRL's trainers."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError, missing_extra
from ssdtrain.offload import OffloadActivations
from ssdtrain.stats import OffloadStats

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing_extra("transformers", "transformers", "ssdtrain.integrations.transformers") from error

# After the extra: it brings torch's compiler, which takes seconds.
from ssdtrain.integrations.hooks import ForwardHooks

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["SSDTrainCallback"]

# Before the name of each metric.
PREFIX = "ssdtrain/"


class SSDTrainCallback(TrainerCallback):
    """Keeps the activations of a `Trainer`'s training steps on SSD until backward asks for them.

    Threads and files live from the beginning of `train()` to its end. Evaluation and prediction write nothing.
    Metrics, the totals of `OffloadStats` since `train()` began, are in `trainer.state.log_history` beside the losses;
    `SSDTrainCallback.attach(trainer, ...)` brings them to TensorBoard, W&B and other reporters as well.

    Args:
        config: Options.
        **options: Fields of `OffloadConfig`, on top of `config`.

    Raises:
        ConfigError: An option cannot be used. A spill directory is looked at when training begins.

    Example:
        >>> Trainer(model=model, args=args, train_dataset=data, callbacks=[SSDTrainCallback(spill_dir="/mnt/nvme")])
    """

    def __init__(self, config: OffloadConfig | None = None, **options: Any) -> None:
        self._config = OffloadConfig.of(config, options)
        self._reset()

    def _reset(self) -> None:
        self._offload: OffloadActivations | None = None
        self._stats = OffloadStats()
        self._hooks = ForwardHooks()
        self._first_step = 0
        # Training that raises calls no callback. Then the hooks stay until the next `train()`, or until the trainer
        # is gone and this callback with it; they hold the hooks alone, and not the callback.
        weakref.finalize(self, self._hooks.remove)

    @classmethod
    def attach(cls, trainer: Trainer, config: OffloadConfig | None = None, **options: Any) -> Self:
        """Put a callback where the trainer's reporters see its metrics.

        Trainer calls its reporters before the callbacks that it was given, so that they never see what these add to
        the log. This one goes first: a new one, or the one that the trainer has if there are no options.

        Returns:
            The callback.

        Raises:
            ConfigError: The trainer has a callback already and options are given; or an option cannot be used.
        """
        callbacks = trainer.callback_handler.callbacks
        there = next((one for one in callbacks if isinstance(one, cls)), None)
        if there is not None and (config is not None or options):
            raise ConfigError(
                "attach: the trainer has an SSDTrainCallback, and its options are settled; "
                "call attach(trainer) without options, or leave it out of callbacks=[...]"
            )
        callback = cls(config, **options) if there is None else there
        callbacks[:] = [callback, *(one for one in callbacks if one is not callback)]
        return callback

    @property
    def stats(self) -> OffloadStats:
        """Counters of the training that runs, or of the last one."""
        return self._stats if self._offload is None else self._offload.stats

    def __getstate__(self) -> dict[str, Any]:
        # Trainers are pickled for hyperparameter searches, and callbacks copied: threads and files stay here.
        return {"_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - Trainer passes them by position
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Open the spill files and hook the model.

        The model is the one that was given to Trainer, not the wrapped one that Trainer calls: every wrapper (DDP,
        autocast, the compiler) calls this one in the end, and with FSDP they are the same.

        Raises:
            ConfigError: A spill directory cannot be used.
        """
        # Training that raised, and begins again with a smaller batch, has not ended.
        self._end()
        model: nn.Module = kwargs["model"]
        self._offload = OffloadActivations(model, self._config)
        self._first_step = state.global_step
        self._hooks.install(model, self._offload)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_others: Any,
    ) -> None:
        """Unhook the model and close the spill files."""
        self._end()
        if state.global_step > self._first_step:
            self._warn_if_idle()

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        logs: dict[str, Any] | None = None,
        **_others: Any,
    ) -> None:
        """Add the metrics to what is logged of training."""
        if logs is None or self._offload is None or not {"loss", "train_loss"} & logs.keys():
            return
        metrics = self.stats.as_dict(PREFIX)
        # For the callbacks after this one; the history has a copy.
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def _end(self) -> None:
        self._hooks.remove()
        if self._offload is not None:
            self._offload.close()
            # After the threads have ended, so that nothing moves any more.
            self._stats = self._offload.stats
            self._offload = None

    def _warn_if_idle(self) -> None:
        stats = self._stats
        if stats.tensors_packed == 0:
            reason = "the trainer never called the forward method of the model that it was given"
        elif stats.tensors_packed == stats.tensors_exempt:
            reason = (
                f"none of {stats.tensors_packed} saved tensors is an activation of at least min_tensor_bytes "
                f"({self._config.min_tensor_bytes} bytes) on a device that is supported"
            )
        else:
            return
        warnings.warn(f"ssdtrain offloaded nothing in this training: {reason}", stacklevel=2)
