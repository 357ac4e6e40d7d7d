"""Architectures of transformers, tiny and with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers

from .helpers import DROPOUT, assert_trains_the_same

if TYPE_CHECKING:
    from collections.abc import Callable


VOCABULARY = 64
LENGTH = 12
IMAGE = 16
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def text():
    """Two sequences, the second one shorter."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def images():
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE), "labels": torch.randint(2, (2,))}


def segmented_images():
    return {
        "pixel_values": torch.randn(2, 3, 2 * IMAGE, 2 * IMAGE),
        "labels": torch.randint(2, (2, 2 * IMAGE, 2 * IMAGE)),
    }


def spoken():
    return {"input_values": torch.randn(2, 640), "labels": torch.randint(3, VOCABULARY, (2, 4))}


def spectra():
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, VOCABULARY, (2, 8))}


def captioned_images():
    return {**text(), "pixel_values": torch.randn(2, 3, IMAGE, IMAGE)}


def matched_images():
    batch = captioned_images()
    del batch["labels"]
    return {**batch, "return_loss": True}


IMAGE_TOKEN = VOCABULARY - 1


def images_in_text():
    """Four patches stand in each sequence."""
    batch = captioned_images()
    batch["input_ids"] = batch["input_ids"].clamp_max(IMAGE_TOKEN - 1)
    batch["input_ids"][:, 1:5] = IMAGE_TOKEN
    return batch


class Architecture(NamedTuple):
    head: str
    """Of AutoModelFor..."""
    batch: Callable[[], dict[str, Any]]
    options: dict[str, Any]
    checkpointing: bool = True
    """Whether it supports gradient checkpointing."""
    bfloat16: bool = True
    """Whether its weights can be bfloat16 on a CPU."""


def causal(**options):
    return Architecture("ForCausalLM", text, SMALL | options)


def masked(**options):
    return Architecture("ForMaskedLM", text, SMALL | options)


def translating(**options):
    both = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    both |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "decoder_start_token_id": 1}
    return Architecture("ForSeq2SeqLM", text, SMALL | both | options)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": IMAGE, "patch_size": 8}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32, "output_router_logits": True}

ARCHITECTURES = {
    # Decoders.
    "gpt2": causal(),
    "gpt_neo": causal(attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox": causal(),
    "gptj": causal(rotary_dim=4),
    "opt": causal(ffn_dim=48, word_embed_proj_dim=32),
    "bloom": causal(),
    "falcon": causal(),
    "phi": causal(),
    "llama": causal(num_key_value_heads=2),
    "mistral": causal(num_key_value_heads=2, sliding_window=4),
    "qwen2": causal(num_key_value_heads=2),
    "qwen3": causal(num_key_value_heads=2, head_dim=8),
    "gemma": causal(num_key_value_heads=1, head_dim=8),
    "gemma2": causal(num_key_value_heads=2, head_dim=8, sliding_window=4),
    "xlnet": Architecture(
        "ForCausalLM",
        text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        checkpointing=False,
        bfloat16=False,
    ),
    # Encoders.
    "bert": masked(),
    "roberta": masked(),
    "distilbert": masked(dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    "albert": masked(embedding_size=16)._replace(checkpointing=False),
    "electra": masked(embedding_size=16),
    "deberta-v2": masked(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4),
    "modernbert": masked(local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    "longformer": masked(attention_window=4),
    "reformer": causal(
        attn_layers=["local", "lsh"],
        attention_head_size=8,
        feed_forward_size=48,
        axial_pos_shape=[3, 4],
        axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        is_decoder=True,
    )._replace(checkpointing=False, bfloat16=False),
    "fnet": masked()._replace(bfloat16=False),
    # Encoder-decoders.
    "t5": translating(d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "bart": translating(),
    "marian": translating(),
    "pegasus": translating(),
    # Mixtures of experts.
    "mixtral": causal(**EXPERTS),
    "qwen2_moe": causal(shared_expert_intermediate_size=32, **EXPERTS),
    "gpt_oss": causal(head_dim=8, sliding_window=4, **EXPERTS),
    # State spaces and linear attention.
    "mamba": causal(state_size=4, time_step_rank=2),
    "mamba2": causal(state_size=4, head_dim=8, num_heads=8, n_groups=2, chunk_size=4),
    "falcon_mamba": causal(state_size=4, time_step_rank=2),
    "recurrent_gemma": causal(
        lru_width=32, attention_window_size=4, num_key_value_heads=1, num_hidden_layers=3
    ),
    "rwkv": causal(attention_hidden_size=32),
    "qwen3_next": causal(
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        **EXPERTS,
    ),
    # Vision.
    "vit": Architecture("ForImageClassification", images, VISION),
    "convnext": Architecture(
        "ForImageClassification",
        images,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        checkpointing=False,
    ),
    "swin": Architecture(
        "ForImageClassification",
        images,
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
        },
    ),
    "segformer": Architecture(
        "ForSemanticSegmentation",
        segmented_images,
        {
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "decoder_hidden_size": 16,
        },
    ),
    "resnet": Architecture(
        "ForImageClassification",
        images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        checkpointing=False,
    ),
    # Speech.
    "wav2vec2": Architecture(
        "ForCTC",
        spoken,
        SMALL
        | {
            "conv_dim": [8, 8],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 4],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_length": 2,
            "mask_time_prob": 0.2,
        },
    ),
    "whisper": Architecture(
        "ForSpeechSeq2Seq",
        spectra,
        translating().options | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    # Several at once.
    "clip": Architecture(
        "", matched_images, {"text_config": SMALL, "vision_config": VISION, "projection_dim": 16}
    ),
    "llava": Architecture(
        "ForImageTextToText",
        images_in_text,
        {
            "text_config": SMALL | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": IMAGE_TOKEN,
        },
    ),
    "blip": Architecture(
        "ForImageTextToText",
        captioned_images,
        {
            "text_config": SMALL | {"encoder_hidden_size": 32, "sep_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 16,
            "image_text_hidden_size": 16,
        },
    ),
}


def with_dropout(config):
    """Where dropout is off by default, turn it on."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            with_dropout(value)
        elif "drop" in name and "layerdrop" not in name and value == 0:
            setattr(config, name, DROPOUT)
    return config


def without_dropout(config):
    """Scaled dot product attention then runs kernels that save other tensors."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif "drop" in name and value is not None:
            setattr(config, name, 0.0)
    return config


def program(name, *, use_reentrant=None, configure=with_dropout, dtype=torch.float32, **options):
    """For `train`.

    Args:
        name: In `ARCHITECTURES`.
        use_reentrant: Of gradient checkpointing; None: without.
        configure: Changes the config.
        dtype: Of the weights.
        **options: For `from_config`.
    """
    architecture = ARCHITECTURES[name]

    def build():
        transformers.set_seed(0)  # some models use the generators of Python or numpy
        config = configure(transformers.AutoConfig.for_model(name, **architecture.options))
        auto = getattr(transformers, f"AutoModel{architecture.head}")
        model = auto.from_config(config, dtype=dtype, **options).train()
        assert model.supports_gradient_checkpointing == architecture.checkpointing
        if use_reentrant is not None:
            enable_checkpointing(model, use_reentrant)

        def loss_of_new_batch():
            batch = architecture.batch()
            return model(**{key: of_type(value, dtype) for key, value in batch.items()}).loss

        return model, loss_of_new_batch

    return build


def of_type(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def enable_checkpointing(model, use_reentrant):
    options = {"use_reentrant": use_reentrant}
    # Renamed in the course of transformers 5; the old name warns there.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@pytest.fixture(autouse=True)
def reformer_does_not_ask_the_system_for_seeds(monkeypatch):
    """Two runs of it would differ, whatever was seeded."""
    monkeypatch.setattr(torch, "seed", lambda: 0)


every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
every_one_with_checkpointing = pytest.mark.parametrize(
    "name", [name for name, architecture in ARCHITECTURES.items() if architecture.checkpointing]
)


@every_architecture
def test_plain(make_offload, name):
    assert_trains_the_same(program(name), make_offload)


@every_architecture
def test_autocast(make_offload, name):
    assert_trains_the_same(program(name), make_offload, autocast=True)


@every_one_with_checkpointing
def test_checkpointing(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=False), make_offload)


@pytest.mark.slow
@every_one_with_checkpointing
def test_reentrant_checkpointing(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=True), make_offload)


@pytest.mark.slow
@every_one_with_checkpointing
def test_checkpointing_under_autocast(make_offload, name):
    assert_trains_the_same(program(name, use_reentrant=False), make_offload, autocast=True)


@pytest.mark.slow
@every_architecture
def test_without_dropout(make_offload, name):
    assert_trains_the_same(program(name, configure=without_dropout), make_offload)


@pytest.mark.slow
@every_architecture
def test_eager_attention(make_offload, name):
    assert_trains_the_same(program(name, attn_implementation="eager"), make_offload)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, architecture in ARCHITECTURES.items() if architecture.bfloat16]
)
def test_weights_in_bfloat16(make_offload, name):
    assert_trains_the_same(program(name, dtype=torch.bfloat16), make_offload)


@pytest.mark.slow
@every_architecture
def test_backward_begins_while_writes_run(make_tight_offload, name):
    assert_trains_the_same(program(name), make_tight_offload, settle=False)
