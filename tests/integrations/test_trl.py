"""TRL's trainers with the callback."""

import copy

import datasets
import pytest
import torch
from core.helpers import same_bits
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .helpers import VOCABULARY, assert_same_training, gpt2, hooks_of, llama, settings

# Names and defaults that the versions of TRL, PEFT and transformers are moving away from, among themselves.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:trl"
)

WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]
LORA = {"r": 4, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def texts(count, length=10):
    generator = torch.Generator().manual_seed(1)
    picks = torch.randint(len(WORDS), (count, length), generator=generator).tolist()
    return [" ".join(WORDS[at] for at in row) for row in picks]


def sft(tokenizer, directory, *callbacks, build=gpt2, peft=False, **options):
    data = datasets.Dataset.from_dict({"text": texts(16)})
    return SFTTrainer(
        model=build(),
        args=SFTConfig(**settings(directory, **options)),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA) if peft else None,
        callbacks=list(callbacks),
    )


def dpo(tokenizer, directory, *callbacks, build=gpt2, peft=False, **options):
    data = datasets.Dataset.from_dict(
        {"prompt": texts(8, 4), "chosen": texts(8, 5), "rejected": texts(8, 6)[::-1]}
    )
    model = build()
    return DPOTrainer(
        model=model,
        ref_model=None if peft else copy.deepcopy(model),
        args=DPOConfig(**settings(directory, **options)),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA) if peft else None,
        callbacks=list(callbacks),
    )


def check(make, tokenizer, directory, make_callback, **options):
    plain = make(tokenizer, directory, **options)
    plain.train()
    callback = make_callback()
    trainer = make(tokenizer, directory, callback, **options)
    trainer.train()
    assert_same_training(trainer, plain)
    assert callback.stats.bytes_written > 0
    assert callback.stats.live_blocks == 0
    assert hooks_of(trainer.model) == 0
    return trainer, callback


class TestSFT:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    def test_the_same_training(self, tokenizer, tmp_path, make_callback, gradient_checkpointing):
        options = {"gradient_checkpointing": gradient_checkpointing}
        check(sft, tokenizer, tmp_path, make_callback, **options)

    def test_lora(self, tokenizer, tmp_path, make_callback):
        check(sft, tokenizer, tmp_path, make_callback, build=llama, peft=True)

    def test_autocast_to_bf16(self, tokenizer, tmp_path, make_callback):
        check(sft, tokenizer, tmp_path, make_callback, bf16=True)

    def test_packed_sequences_with_accumulation(self, tokenizer, tmp_path, make_callback):
        options = {"gradient_accumulation_steps": 2, "packing": True, "max_length": 24}
        options |= {"packing_strategy": "wrapped"}
        check(sft, tokenizer, tmp_path, make_callback, **options)


class TestDPO:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    def test_the_same_training_with_a_reference_model(
        self, tokenizer, tmp_path, make_callback, gradient_checkpointing
    ):
        options = {"gradient_checkpointing": gradient_checkpointing}
        check(dpo, tokenizer, tmp_path, make_callback, **options)

    def test_the_reference_model_is_left_alone(self, tokenizer, tmp_path, make_callback):
        trainer, _ = check(dpo, tokenizer, tmp_path, make_callback)
        assert hooks_of(trainer.ref_model) == 0
        reference, start = trainer.ref_model.state_dict(), gpt2().state_dict()
        assert all(same_bits(reference[name], start[name]) for name in start)

    def test_lora_is_its_own_reference(self, tokenizer, tmp_path, make_callback):
        check(dpo, tokenizer, tmp_path, make_callback, build=llama, peft=True)

    def test_both_passes_write_no_more_than_that_of_the_policy(self, tokenizer, tmp_path, make_callback):
        # The reference runs with gradients disabled, by the very model that is trained.
        callback = make_callback()
        trainer = dpo(tokenizer, tmp_path, callback, build=llama, peft=True, max_steps=1)
        passes = []
        trainer.model.register_forward_hook(
            lambda *_: passes.append((torch.is_grad_enabled(), callback.stats.tensors_packed))
        )
        trainer.train()
        assert sorted(gradients for gradients, _ in passes) == [False, True]
        assert {packed for _, packed in passes} <= {0, callback.stats.tensors_packed}
