"""Tiny models, data made on the spot, and trainings compared bit by bit."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY = 64
LENGTH = 12
# Tensors of any size go to the disk; the forward pass waits for most of them, so that backward does not come first.
OPTIONS = {
    "min_tensor_bytes": 1,
    "min_free_bytes": 0,
    "prefetch_bytes": "64KiB",
    "store_queue_bytes": "16KiB",
    "on_full_queue": "wait",
}


def gpt2(**options):
    torch.manual_seed(0)
    options = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64} | options
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options)
    )


def llama(**options):
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY} | options
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **options,
        )
    )


def lora():
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(llama(), config)
    model.enable_input_require_grads()
    return model


class Tokens(Dataset):
    """Sequences that are the same in every run."""

    def __init__(self, size=16):
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, at):
        return {"input_ids": self._ids[at], "labels": self._ids[at]}


def settings(directory, **options):
    """For TrainingArguments: a few small steps on the CPU."""
    return {
        "output_dir": str(directory / "output"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    } | options


class Observer(TrainerCallback):
    """A reporter: remembers what it is given to report, as TensorBoard's and W&B's do."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append(dict(logs))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_training(with_ssdtrain, plain):
    """Loss curve and final weights of two trainers are equal to the last bit."""
    assert losses(plain)
    assert losses(with_ssdtrain) == losses(plain)
    ours, theirs = weights(with_ssdtrain.model), weights(plain.model)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def context():
    """The saved-tensor hooks that this thread is in; None outside of all."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_of(model):
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def trainer_of(model, directory, *callbacks, eval_dataset=None, data=None, trainer=Trainer, **options):
    return trainer(
        model=model,
        args=TrainingArguments(**settings(directory, **options)),
        train_dataset=Tokens() if data is None else data,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )
