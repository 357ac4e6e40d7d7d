"""Offloading in Lightning's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import missing_extra
from ssdtrain.offload import OffloadActivations
from ssdtrain.stats import OffloadStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            # The same code under its older name.
            from pytorch_lightning import Callback
        except ImportError as error:
            raise missing_extra("lightning", "lightning", "ssdtrain.integrations.lightning") from error

__all__ = ["SSDTrainCallback"]

# Before the name of each metric.
PREFIX = "ssdtrain/"


class SSDTrainCallback(Callback):
    """Keeps the activations of Lightning's training steps on SSD until backward asks for them.

    Threads and files live from the beginning of `fit()` to its end. Validation, testing and prediction write nothing.
    Metrics, the totals of `OffloadStats` since `fit()` began, go to every logger each `log_every_n_steps`.

    Args:
        config: Options.
        **options: Fields of `OffloadConfig`, on top of `config`.

    Raises:
        ConfigError: An option cannot be used. A spill directory is looked at when training begins.

    Example:
        >>> lightning.Trainer(callbacks=[SSDTrainCallback(spill_dir="/mnt/nvme")])
    """

    def __init__(self, config: OffloadConfig | None = None, **options: Any) -> None:
        self._config = OffloadConfig.of(config, options)
        self._reset()

    def _reset(self) -> None:
        self._offload: OffloadActivations | None = None
        self._stats = OffloadStats()
        self._step: _Step | None = None

    @property
    def stats(self) -> OffloadStats:
        """Counters of the training that runs, or of the last one."""
        return self._stats if self._offload is None else self._offload.stats

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that start processes pickle callbacks: threads and files stay here.
        return {"_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's order
        """Open the spill files and wrap the module's training step.

        Raises:
            ConfigError: A spill directory cannot be used.
        """
        self._end()
        self._offload = OffloadActivations(pl_module, self._config)
        self._step = _Step(pl_module, self._offload)

    def on_train_batch_end(self, trainer: Trainer, *_others: Any) -> None:
        """Give the metrics to the loggers, every so many batches."""
        # A part of the trainer sets it, where types do not show it. 0: never.
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (trainer.fit_loop.total_batch_idx + 1) % every == 0:
            # Not `self.log`, which makes float32 of bytes.
            for logger in trainer.loggers:
                logger.log_metrics(self.stats.as_dict(PREFIX), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Unwrap the training step and close the spill files."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """The same when training raises or is interrupted."""
        self._end()

    def _end(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None
        if self._offload is not None:
            self._offload.close()
            # After the threads have ended, so that nothing moves any more.
            self._stats = self._offload.stats
            self._offload = None


class _Step:
    """A module's training step, inside the offloader.

    Lightning calls `training_step` and not `forward`, in every strategy, and runs backward after it; with manual
    optimization the step runs its own backward, inside the context.
    """

    def __init__(self, module: LightningModule, offload: OffloadActivations) -> None:
        self._module = module
        self._offload: OffloadActivations | None = offload
        # What torch.compile has put on the module; None where the step is that of the class.
        self._own: Callable[..., Any] | None = vars(module).get("training_step")
        self.__wrapped__: Callable[..., Any] = module.training_step
        vars(module)["training_step"] = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._offload is None:
            return self.__wrapped__(*arguments, **options)
        with self._offload:
            return self.__wrapped__(*arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module has this too, bound to the copy, and has to do without threads and files.
        return vars(self) | {"_offload": None}

    def remove(self) -> None:
        """End, and take those off the module that have ended: another callback may have wrapped this one."""
        self._offload = None
        own = vars(self._module)
        while isinstance(step := own.get("training_step"), _Step) and step._offload is None:
            if step._own is None:
                del own["training_step"]
            else:
                own["training_step"] = step._own
