"""`Trainer` with the callback."""

import contextlib
import copy
import gc
import pickle
import struct
import threading

import pytest
import torch
from core.helpers import run_python
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

import ssdtrain
from ssdtrain.integrations.transformers import SSDTrainCallback

from .helpers import (
    OPTIONS,
    Observer,
    Tokens,
    assert_same_training,
    context,
    gpt2,
    hooks_of,
    llama,
    lora,
    losses,
    trainer_of,
)

# Newer versions call checkpointing of the model by another name, within themselves and in PEFT as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


class Raising(TrainerCallback):
    """Raises in the middle of a forward pass, the given number of times."""

    def __init__(self, error, module, times=1):
        self.error, self.times = error, times
        module.register_forward_hook(self._raise)

    def _raise(self, module, arguments, output):
        if self.times and torch.is_grad_enabled():
            self.times -= 1
            # A new one: its traceback holds the trainer, and this hook, on the model, must not.
            raise type(self.error)(*self.error.args)


class Watching(TrainerCallback):
    """Remembers the numbers at each evaluation's beginning and end."""

    def __init__(self, callback):
        self._callback = callback
        self.after_step, self.after_evaluation = [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.after_step.append(self._callback.stats.tensors_packed)

    def on_evaluate(self, args, state, control, **kwargs):
        self.after_evaluation.append(self._callback.stats.tensors_packed)


def packs_nothing(model):
    """Whether a training forward pass outside of `train()` is left alone: its saved tensors are where they were."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda x: x):
        model.train()(**{name: value[None] for name, value in Tokens()[0].items()}).loss.backward()
    model.zero_grad()
    return bool(seen)


class TestTheSameTraining:
    """Loss curve and weights to the last bit, and bytes on the disk."""

    def check(self, make_callback, tmp_path, build=gpt2, **options):
        plain = trainer_of(build(), tmp_path, **options)
        plain.train()
        callback = make_callback()
        trainer = trainer_of(build(), tmp_path, callback, **options)
        trainer.train()
        assert_same_training(trainer, plain)
        assert callback.stats.bytes_written > 0
        assert callback.stats.live_blocks == 0
        return callback.stats

    @pytest.mark.parametrize("build", [gpt2, llama])
    def test_plain(self, make_callback, tmp_path, build):
        self.check(make_callback, tmp_path, build)

    def test_gradient_accumulation(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, gradient_accumulation_steps=3)

    def test_autocast_to_bf16(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, bf16=True)

    def test_gradient_checkpointing(self, make_callback, tmp_path):
        whole = self.check(make_callback, tmp_path)
        checkpointed = self.check(make_callback, tmp_path, **CHECKPOINTING)
        assert checkpointed.bytes_written < whole.bytes_written

    @pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.utils.checkpoint")
    def test_reentrant_checkpointing(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, **REENTRANT)

    def test_lora(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, lora)

    def test_lora_under_checkpointing_and_autocast(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, lora, bf16=True, **CHECKPOINTING)

    def test_quantised_weights(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, quantised)

    def test_real_weights_that_autograd_saves_are_offloaded_like_activations(self, make_callback, tmp_path):
        again = self.check(make_callback, tmp_path, quantised)
        saved = self.check(make_callback, tmp_path, lambda: quantised(saved=True))
        more = (saved.tensors_packed - saved.tensors_exempt) - (again.tensors_packed - again.tensors_exempt)
        assert more == 3 * 2 * 3  # steps, layers, maps

    def test_label_smoothing_outside_of_the_model(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, label_smoothing_factor=0.1)

    def test_weights_in_bf16(self, make_callback, tmp_path):
        self.check(make_callback, tmp_path, lambda: llama().to(torch.bfloat16))


class Dequantise(torch.autograd.Function):
    """A linear map by int8 weights that makes the real ones twice, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(weight, scale)
        return x @ (weight * scale).t()

    @staticmethod
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        return gradient @ (weight * scale), None, None


class Quantised(nn.Module):
    """A frozen linear map in int8; `saved`: autograd saves the real weights, instead of making them again."""

    def __init__(self, linear, *, saved):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self._saved = saved

    def forward(self, x):
        if self._saved:
            return nn.functional.linear(x, self.weight * self.scale)
        return Dequantise.apply(x, self.weight, self.scale)


def quantised(*, saved=False):
    model = llama()
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Quantised(getattr(layer.mlp, name), saved=saved))
    return model


class TestEvaluation:
    def test_evaluation_writes_nothing(self, make_callback, tmp_path):
        callback = make_callback()
        watching = Watching(callback)
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Tokens(4)}
        trainer = trainer_of(gpt2(), tmp_path, callback, watching, **options)
        trainer.train()
        assert watching.after_step[0] > 0
        assert watching.after_evaluation == watching.after_step

    def test_evaluation_and_prediction_after_training_write_nothing(self, make_callback, tmp_path):
        callback = make_callback()
        trainer = trainer_of(gpt2(), tmp_path, callback)
        trainer.train()
        before = callback.stats
        trainer.evaluate(Tokens(4))
        trainer.predict(Tokens(4))
        assert callback.stats == before

    def test_a_forward_pass_in_evaluation_mode_with_gradients_writes_nothing(self, make_callback, tmp_path):
        callback = make_callback()

        class Probe(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **kwargs):
                before = callback.stats.tensors_packed
                model.eval()(**{name: value[None] for name, value in Tokens()[0].items()})
                assert callback.stats.tensors_packed == before

        trainer_of(gpt2(), tmp_path, callback, Probe()).train()


class TestFromBeginToEnd:
    def test_hooks_are_gone_after_training(self, make_callback, tmp_path):
        model = gpt2()
        trainer_of(model, tmp_path, make_callback()).train()
        assert hooks_of(model) == 0
        assert packs_nothing(model)

    def test_hooks_are_not_there_before_training(self, make_callback, tmp_path):
        model = gpt2()
        trainer_of(model, tmp_path, make_callback())
        assert hooks_of(model) == 0

    def test_threads_are_gone_after_training(self, make_callback, tmp_path):
        trainer_of(gpt2(), tmp_path, make_callback()).train()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ssdtrain")] == []

    def test_several_trainings(self, make_callback, tmp_path):
        def train(*callbacks):
            trainer = trainer_of(gpt2(), tmp_path, *callbacks)
            trainer.train()
            first = losses(trainer)
            trainer.train()
            return first, trainer

        callback = make_callback()
        (ours, trainer), (theirs, plain) = train(callback), train()
        assert ours == theirs
        assert_same_training(trainer, plain)
        assert callback.stats.bytes_written > 0
        assert hooks_of(trainer.model) == 0

    def test_resume_from_checkpoint(self, make_callback, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        plain = trainer_of(gpt2(), tmp_path / "plain", **options)
        plain.train()
        trainer_of(gpt2(), tmp_path / "ours", make_callback(), **options).train()
        callback = make_callback()
        resumed = trainer_of(gpt2(), tmp_path / "ours", callback, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "output" / "checkpoint-2"))
        assert_same_training(resumed, plain)
        assert callback.stats.bytes_written > 0

    def test_a_training_without_a_step_does_not_warn(self, make_callback, tmp_path):
        callback, state = make_callback(), TrainerState()
        callback.on_train_begin(None, state, None, model=gpt2())
        callback.on_train_end(None, state, None)
        assert callback.stats.tensors_packed == 0

    def test_a_new_model_for_each_training(self, make_callback, tmp_path):
        callback = make_callback()
        trainer = trainer_of(None, tmp_path, callback, trainer=from_model_init)
        trainer.train()
        first = trainer.model
        trainer.train()
        assert trainer.model is not first
        assert callback.stats.bytes_written > 0
        assert hooks_of(first) == hooks_of(trainer.model) == 0


def from_model_init(*, model, **options):
    def build():  # without arguments, or Trainer gives it some
        return gpt2()

    return Trainer(model_init=build, **options)


class TestErrors:
    def test_smaller_batches_after_running_out_of_memory(self, make_callback, tmp_path):
        def train(*callbacks):
            model = gpt2()
            error = RuntimeError("CUDA out of memory.")
            raising = Raising(error, model.transformer.h[1], times=2)
            options = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
            trainer = trainer_of(model, tmp_path, *callbacks, raising, **options)
            trainer.train()
            assert trainer._train_batch_size < 8
            return trainer

        callback = make_callback()
        trainer = train(callback)
        assert_same_training(trainer, train())
        assert callback.stats.bytes_written > 0
        assert hooks_of(trainer.model) == 0

    def test_hooks_are_installed_once_after_a_retry(self, make_callback, tmp_path):
        model = gpt2()
        raising = Raising(RuntimeError("CUDA out of memory."), model.transformer.h[1])
        seen = []

        class Count(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(hooks_of(model))

        trainer_of(model, tmp_path, make_callback(), raising, Count(), auto_find_batch_size=True).train()
        assert set(seen) == {2}

    def test_a_forward_pass_that_raises_leaves_no_context(self, make_callback, tmp_path):
        model = gpt2()
        raising = Raising(ValueError("a layer failed"), model.transformer.h[1])
        trainer = trainer_of(model, tmp_path, make_callback(), raising)
        with pytest.raises(ValueError, match="a layer failed"):
            trainer.train()
        assert context() is None

    def test_the_training_after_an_interrupt_begins_and_ends_clean(self, make_callback, tmp_path):
        # For which torch calls no hook.
        model = gpt2()
        raising = Raising(KeyboardInterrupt(), model.transformer.h[1])
        trainer = trainer_of(model, tmp_path, make_callback(), raising)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert context() is not None
        trainer.train()
        assert context() is None
        assert hooks_of(model) == 0

    def test_the_same_model_in_a_new_trainer_after_one_that_raised(self, make_callback, tmp_path):
        model, callback = gpt2(), make_callback()
        raising = Raising(ValueError("a layer failed"), model.transformer.h[1])
        first = trainer_of(model, tmp_path, make_callback(), raising)
        with pytest.raises(ValueError, match="a layer failed"):
            first.train()
        trainer_of(model, tmp_path, callback).train()
        assert callback.stats.bytes_written > 0

    def test_a_training_after_one_that_raised_is_the_same(self, make_callback, tmp_path):
        def train(*callbacks):
            model = gpt2()
            raising = Raising(ValueError("a layer failed"), model.transformer.h[1])
            trainer = trainer_of(model, tmp_path, *callbacks, raising)
            with pytest.raises(ValueError, match="a layer failed"):
                trainer.train()
            trainer.train()
            return trainer

        assert_same_training(train(make_callback()), train())

    def test_hooks_end_with_a_trainer_that_raised(self, make_callback, tmp_path):
        model = gpt2()

        def train():
            raising = Raising(ValueError("a layer failed"), model.transformer.h[1])
            with contextlib.suppress(ValueError):
                trainer_of(model, tmp_path, make_callback(), raising).train()

        train()
        gc.collect()
        assert hooks_of(model) == 0

    def test_a_global_hook_that_raises_is_survived(self, make_callback, tmp_path):
        model, callback = gpt2(), make_callback()
        trainer = trainer_of(model, tmp_path, callback)

        def raises(module, arguments):
            raise ValueError("somebody's hook")

        handle = nn.modules.module.register_module_forward_pre_hook(raises)
        try:
            with pytest.raises(ValueError, match="somebody's hook"):
                trainer.train()
        finally:
            handle.remove()
        assert context() is None
        trainer.train()
        assert callback.stats.bytes_written > 0

    def test_an_unknown_option_is_named_at_once(self):
        with pytest.raises(ssdtrain.ConfigError, match="did you mean spill_dir"):
            SSDTrainCallback(spil_dir="/mnt")

    def test_a_missing_directory_is_named_before_the_first_step(self, tmp_path):
        trainer = trainer_of(gpt2(), tmp_path, SSDTrainCallback(spill_dir=tmp_path / "missing"))
        with pytest.raises(ssdtrain.ConfigError, match="missing"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_missing_transformers_is_named_with_its_command(self):
        code = """
            import sys
            sys.modules["transformers"] = None
            import ssdtrain
            try:
                import ssdtrain.integrations.transformers
            except ssdtrain.ConfigError as error:
                print(error)
        """
        assert "pip install 'ssdtrain[transformers]'" in run_python(code).stdout


class TestNothingOffloaded:
    def test_small_tensors_are_told(self, make_callback, tmp_path):
        trainer = trainer_of(gpt2(), tmp_path, make_callback(min_tensor_bytes="1GiB"))
        with pytest.warns(UserWarning, match=r"offloaded nothing.*min_tensor_bytes \(1073741824 bytes\)"):
            trainer.train()

    def test_a_forward_method_that_is_never_called_is_told(self, make_callback, tmp_path):
        class Around(Trainer):
            def compute_loss(self, model, inputs, **kwargs):
                hidden = model.transformer(inputs["input_ids"]).last_hidden_state
                return model.lm_head(hidden).square().mean()

        trainer = trainer_of(gpt2(), tmp_path, make_callback(), trainer=Around)
        with pytest.warns(UserWarning, match="offloaded nothing.*never called the forward method"):
            trainer.train()


def scalars(path):
    """What a file of TensorBoard's says of each name: records of length, checksum, event and checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, values = path.read_bytes(), {}
    while data:
        [length] = struct.unpack_from("<Q", data)
        for value in Event.FromString(data[12 : 12 + length]).summary.value:
            values.setdefault(value.tag, []).append(value.simple_value)
        data = data[12 + length + 4 :]
    return values


class TestMetrics:
    def test_history_has_plain_numbers_beside_each_loss(self, make_callback, tmp_path):
        trainer = trainer_of(gpt2(), tmp_path, make_callback())
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry or "train_loss" in entry]
        assert len(entries) == 3 + 1
        for entry in entries:
            metrics = {name: value for name, value in entry.items() if name.startswith("ssdtrain/")}
            assert len(metrics) == len(ssdtrain.OffloadStats().as_dict())
            assert {type(value) for value in metrics.values()} <= {int, float}
            assert metrics["ssdtrain/tensors_packed"] > 0

    def test_the_last_entry_has_what_the_callback_says(self, make_callback, tmp_path):
        callback = make_callback()
        trainer = trainer_of(gpt2(), tmp_path, callback)
        trainer.train()
        assert callback.stats.bytes_written == trainer.state.log_history[-1]["ssdtrain/bytes_written"]

    def test_evaluation_is_logged_without_them(self, make_callback, tmp_path):
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Tokens(4)}
        trainer = trainer_of(gpt2(), tmp_path, make_callback(), **options)
        trainer.train()
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(evaluations) == 3
        assert not any(name.startswith("ssdtrain/") for entry in evaluations for name in entry)

    def test_a_reporter_before_the_callback_does_not_see_them(self, make_callback, tmp_path):
        reporter = Observer()
        trainer_of(gpt2(), tmp_path, reporter, make_callback()).train()
        assert not any(name.startswith("ssdtrain/") for logs in reporter.logged for name in logs)

    def test_attach_brings_them_to_a_reporter(self, tmp_path):
        reporter = Observer()
        trainer = trainer_of(gpt2(), tmp_path, reporter)
        callback = SSDTrainCallback.attach(trainer, spill_dir=tmp_path, **OPTIONS)
        trainer.train()
        steps = [logs for logs in reporter.logged if "loss" in logs]
        assert len(steps) == 3
        assert all(type(logs["ssdtrain/bytes_written"]) is int for logs in steps)
        assert callback.stats.bytes_written > 0

    def test_attach_brings_them_to_tensorboard(self, tmp_path):
        trainer = trainer_of(gpt2(), tmp_path, report_to=["tensorboard"])
        SSDTrainCallback.attach(trainer, spill_dir=tmp_path, **OPTIONS)
        trainer.train()
        [events] = tmp_path.rglob("events.out.tfevents.*")
        written = scalars(events)["train/ssdtrain/bytes_written"]
        assert len(written) == 3 + 1
        assert 0 < written[0] < written[-1]

    def test_attach_finds_the_callback_that_is_there(self, make_callback, tmp_path):
        reporter, callback = Observer(), make_callback()
        trainer = trainer_of(gpt2(), tmp_path, reporter, callback)
        assert SSDTrainCallback.attach(trainer) is callback
        assert trainer.callback_handler.callbacks.count(callback) == 1
        trainer.train()
        assert "ssdtrain/bytes_written" in reporter.logged[0]

    def test_attach_refuses_options_for_a_callback_that_is_there(self, make_callback, tmp_path):
        trainer = trainer_of(gpt2(), tmp_path, make_callback())
        with pytest.raises(ssdtrain.ConfigError, match="without options"):
            SSDTrainCallback.attach(trainer, spill_dir=tmp_path)


class TestCopies:
    def test_a_callback_is_copied_without_threads_and_files(self, make_callback, tmp_path):
        callback = make_callback()
        copies = []

        class Copy(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

        trainer_of(gpt2(), tmp_path, callback, Copy(), max_steps=1).train()
        for one in copies:
            trainer = trainer_of(gpt2(), tmp_path, one)
            trainer.train()
            assert one.stats.bytes_written > 0

    def test_a_copy_of_the_model_offloads_nothing(self, make_callback, tmp_path):
        callback = make_callback()
        copies = []

        class Copy(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **kwargs):
                copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
                before = callback.stats.tensors_packed
                assert all(packs_nothing(one) for one in copies)
                assert callback.stats.tensors_packed == before

        trainer_of(gpt2(), tmp_path, callback, Copy()).train()
        assert len(copies) == 6


class TestForwardPasses:
    def test_a_reference_pass_without_gradients_writes_nothing(self, make_callback, tmp_path):
        callback = make_callback()
        packed = []

        class WithReference(Trainer):
            def compute_loss(self, model, inputs, **kwargs):
                loss = super().compute_loss(model, inputs, **kwargs)
                before = callback.stats.tensors_packed
                with torch.no_grad():
                    reference = super().compute_loss(model, inputs, **kwargs)
                packed.append(callback.stats.tensors_packed - before)
                return (loss - reference).square()

        trainer_of(gpt2(), tmp_path, callback, trainer=WithReference).train()
        assert packed == [0, 0, 0]

    def test_two_passes_before_one_backward(self, make_callback, tmp_path):
        class Pair(Trainer):
            def compute_loss(self, model, inputs, **kwargs):
                first = super().compute_loss(model, inputs, **kwargs)
                return first * super().compute_loss(model, inputs, **kwargs)

        plain = trainer_of(gpt2(), tmp_path, trainer=Pair)
        plain.train()
        trainer = trainer_of(gpt2(), tmp_path, make_callback(), trainer=Pair)
        trainer.train()
        assert_same_training(trainer, plain)

    def test_a_model_that_calls_itself(self, make_callback, tmp_path):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(12, 12)
                self.config = None

            def forward(self, input_ids, labels=None, *, again=True):
                hidden = input_ids.float() / 64
                if again:
                    with torch.no_grad():
                        hidden = hidden + self(input_ids, again=False)["hidden"]
                    hidden = self(hidden, again=False)["hidden"]
                # The inner passes have ended, and this one is still offloaded.
                hidden = self.layer(hidden).tanh()
                return {"loss": hidden.square().mean(), "hidden": hidden}

        plain = trainer_of(Twice(), tmp_path)
        plain.train()
        callback = make_callback()
        trainer = trainer_of(Twice(), tmp_path, callback)
        trainer.train()
        assert_same_training(trainer, plain)
        # Of each pass with gradients: what the layer, tanh and the mean save that is not a weight.
        inner, outer = 2, 3
        assert callback.stats.tensors_packed - callback.stats.tensors_exempt >= 3 * (inner + outer)


# Warnings of torch's own, within its compiler.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
class TestCompile:
    def test_a_compiled_model(self, make_callback, tmp_path):
        options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        plain = trainer_of(gpt2(), tmp_path, **options)
        plain.train()
        callback = make_callback()
        trainer = trainer_of(gpt2(), tmp_path, callback, **options)
        trainer.train()
        assert losses(trainer) == losses(plain)
        assert_same_training(trainer, plain)
        assert callback.stats.bytes_written > 0

    def test_fullgraph_is_refused_by_the_compiler(self, make_callback, tmp_path):
        class FullGraph(Trainer):
            def compute_loss(self, model, inputs, **kwargs):
                return torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).loss

        callback = make_callback()
        trainer = trainer_of(gpt2(), tmp_path, callback, trainer=FullGraph)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            trainer.train()
        assert context() is None
