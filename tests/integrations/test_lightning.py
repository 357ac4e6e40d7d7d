"""Lightning with the callback."""

import copy
import pickle
import warnings

import pytest
import torch
from core.helpers import run_python, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    # Of its own dependencies.
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.loggers import Logger

import ssdtrain
from ssdtrain.integrations.lightning import SSDTrainCallback

from .helpers import OPTIONS, context

# Advice about loaders, and what Lightning calls in torch under older names.
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.losses = []

    def loss(self, batch):
        return (self.layers(batch[0]) - batch[0].flip(1)).square().mean()

    def training_step(self, batch, at):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, at):
        self.log("validation", self.loss(batch))

    def predict_step(self, batch, at):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Module):
    """Runs its own backward, twice for each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, at):
        for _ in range(2):
            self.optimizers().zero_grad()
            loss = super().training_step(batch, at)
            self.manual_backward(loss)
            self.optimizers().step()


class Checkpointed(Module):
    """Keeps the input of its layers and makes the rest again in backward."""

    def loss(self, batch):
        output = checkpoint(self.layers, batch[0].clone().requires_grad_(), use_reentrant=False)
        return (output - batch[0].flip(1)).square().mean()


class Memory(Logger):
    """Remembers what it is given."""

    def __init__(self):
        super().__init__()
        self.logged = []

    name = version = "memory"

    def log_hyperparams(self, *arguments, **options):
        pass

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def loader(size=16):
    data = torch.randn(size, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(data), batch_size=4)


def trainer_of(directory, *callbacks, **options):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=list(callbacks),
        **options,
    )


@pytest.fixture
def callback(tmp_path):
    return SSDTrainCallback(spill_dir=tmp_path, **OPTIONS)


def fit(module, directory, *callbacks, **options):
    trainer_of(directory, *callbacks, **options).fit(module, loader())
    return module


def assert_same(ours, theirs):
    assert theirs.losses
    assert ours.losses == theirs.losses
    state = theirs.state_dict()
    assert all(same_bits(tensor, state[name]) for name, tensor in ours.state_dict().items())


class TestTheSameTraining:
    @pytest.mark.parametrize(
        ("build", "options"),
        [
            (Module, {}),
            (Module, {"accumulate_grad_batches": 3}),
            (Module, {"precision": "bf16-mixed"}),
            (Module, {"gradient_clip_val": 0.1}),
            (Manual, {}),
            (Checkpointed, {}),
        ],
        ids=["plain", "accumulation", "bf16", "clipping", "manual optimization", "checkpointing"],
    )
    def test_losses_and_weights(self, tmp_path, callback, build, options):
        theirs = fit(build(), tmp_path, **options)
        ours = fit(build(), tmp_path, callback, **options)
        assert_same(ours, theirs)
        assert callback.stats.bytes_written > 0
        assert callback.stats.live_blocks == 0

    @pytest.mark.usefixtures("fresh_compiler")
    def test_a_compiled_module(self, tmp_path, callback):
        def compiled(*callbacks):
            module = Module()
            fit(torch.compile(module, backend="aot_eager"), tmp_path, *callbacks)
            return module

        theirs, ours = compiled(), compiled(callback)
        assert_same(ours, theirs)
        assert callback.stats.bytes_written > 0

    def test_several_fits(self, tmp_path, callback):
        theirs = fit(fit(Module(), tmp_path), tmp_path)
        ours = fit(fit(Module(), tmp_path, callback), tmp_path, callback)
        assert_same(ours, theirs)


class TestFromBeginToEnd:
    def test_validation_and_prediction_write_nothing(self, tmp_path, callback):
        packed = []

        class Watch(lightning.Callback):
            def on_validation_start(self, trainer, module):
                packed.append(callback.stats.tensors_packed)

            on_validation_end = on_validation_start

        module, trainer = Module(), trainer_of(tmp_path, callback, Watch())
        trainer.fit(module, loader(), loader(8))
        # Beginning and end of the check before training, and of each epoch.
        assert packed[0::2] == packed[1::2]
        assert len(packed) == 6
        after = callback.stats
        trainer.validate(module, loader(8), verbose=False)
        trainer.predict(module, loader(8))
        assert callback.stats == after

    def test_the_step_is_that_of_the_class_again(self, tmp_path, callback):
        assert "training_step" not in vars(fit(Module(), tmp_path, callback))

    def test_of_two_callbacks_none_is_left_on_the_module(self, tmp_path, callback):
        second = copy.copy(callback)
        module = fit(Module(), tmp_path, callback, second)
        assert "training_step" not in vars(module)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_a_step_that_raises(self, tmp_path, callback, error):
        class Raises(Module):
            def training_step(self, batch, at):
                super().training_step(batch, at)
                raise error("in the middle")

        module = Raises()
        with pytest.raises((ValueError, SystemExit)):
            fit(module, tmp_path, callback)
        assert "training_step" not in vars(module)
        assert callback.stats.tensors_packed > 0
        assert context() is None

    def test_an_unknown_option_is_named_at_once(self):
        with pytest.raises(ssdtrain.ConfigError, match="did you mean spill_dir"):
            SSDTrainCallback(spil_dir="/mnt")

    def test_missing_lightning_is_named_with_its_command(self):
        code = """
            import sys
            sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
            import ssdtrain
            try:
                import ssdtrain.integrations.lightning
            except ssdtrain.ConfigError as error:
                print(error)
        """
        assert "pip install 'ssdtrain[lightning]'" in run_python(code).stdout


class TestMetrics:
    def test_loggers_get_plain_numbers_where_lightning_logs(self, tmp_path, callback):
        logger = Memory()
        fit(Module(), tmp_path, callback, logger=logger, log_every_n_steps=2)
        ours = [(step, metrics) for step, metrics in logger.logged if "ssdtrain/bytes_written" in metrics]
        assert [step for step, _ in ours] == [2, 4, 6, 8]
        assert {type(value) for _, metrics in ours for value in metrics.values()} <= {int, float}
        assert ours[-1][1]["ssdtrain/bytes_written"] > 0


class TestCopies:
    def test_a_copy_of_the_module_trains_itself_and_offloads_nothing(self, tmp_path, callback):
        copies = []

        class Copy(lightning.Callback):
            def on_train_batch_end(self, trainer, module, *others):
                packed = callback.stats.tensors_packed
                one = copy.deepcopy(module)
                one.training_step(next(iter(loader())), 0).backward()
                copies.append((module, one, callback.stats.tensors_packed - packed))

        fit(Module(), tmp_path, callback, Copy(), max_steps=1)
        [(module, one, packed)] = copies
        assert packed == 0
        assert len(one.losses) == len(module.losses) + 1

    def test_a_callback_is_copied_without_threads_and_files(self, tmp_path, callback):
        fit(Module(), tmp_path, callback)
        for one in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            fit(Module(), tmp_path, one)
            assert one.stats.bytes_written > 0
