"""GPT-2, Llama and BERT from a transformers config, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssdtrain.errors import ConfigError
from ssdtrain.launch.data import END, PAD
from ssdtrain.launch.parse import closest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ssdtrain.launch.config import Mode, ModelConfig

__all__ = ["build_model", "transformers_config"]

# What each architecture calls the options that we set.
_NAMES = {
    "gpt2": {
        "layers": "n_layer",
        "hidden_size": "n_embd",
        "heads": "n_head",
        "sequence_length": "n_positions",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "sequence_length": "max_position_embeddings",
    },
    "bert": {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "sequence_length": "max_position_embeddings",
    },
}
_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def transformers_config(model: ModelConfig) -> PretrainedConfig:
    """The transformers config of the model; cheap, and checks what only transformers knows.

    Raises:
        ConfigError: `model.overrides` has an option that the architecture does not know, that the
            launcher sets itself, or a value that transformers refuses.
    """
    import transformers

    classes = {
        "gpt2": transformers.GPT2Config,
        "llama": transformers.LlamaConfig,
        "bert": transformers.BertConfig,
    }
    cls: Any = classes[model.kind]
    options: dict[str, Any] = {
        their_name: getattr(model, name) for name, their_name in _NAMES[model.kind].items()
    }
    options |= {
        "vocab_size": model.vocab_size,
        "use_cache": False,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "attn_implementation": "sdpa",
    }
    if model.dropout is not None:
        options |= dict.fromkeys(_DROPOUTS[model.kind], model.dropout)

    defaults = _feed_forward(model)
    known = cls().to_dict()
    for name in model.overrides:
        if name in options or name in cls.attribute_map:
            raise ConfigError(
                f"model.overrides.{name}: set by the other options of the model section; use those"
            )
        if name not in known:
            hint = closest(name, known)
            raise ConfigError(f"model.overrides.{name}: {cls.__name__} has no such option{hint}")
    try:
        config: PretrainedConfig = cls(**(defaults | model.overrides | options))
    except Exception as error:  # transformers validates with exceptions of several libraries
        raise ConfigError(f"model.overrides: {cls.__name__} refuses them: {error}") from error
    return config


def build_model(config: PretrainedConfig, mode: Mode) -> PreTrainedModel:
    """The model in training mode; its weights come from torch's global generator."""
    import transformers

    classes = {
        "gpt2": transformers.GPT2LMHeadModel,
        "llama": transformers.LlamaForCausalLM,
        "bert": transformers.BertForMaskedLM,
    }
    cls: Any = classes[config.model_type]
    model: PreTrainedModel = cls(config)
    model.train()
    if mode == "recompute":
        _checkpoint(model)
    return model


def _checkpoint(model: Any) -> None:
    options = {"use_reentrant": False}
    # Renamed in the course of transformers 5; the old name warns there.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _feed_forward(model: ModelConfig) -> dict[str, Any]:
    """The feed-forward width in the architecture's usual ratio, where its config does not derive it."""
    if model.kind == "bert":
        return {"intermediate_size": 4 * model.hidden_size}
    if model.kind == "llama":
        # Three matrices of 8/3 the width hold as many weights as two of 4 times (Touvron et al. 2023).
        return {"intermediate_size": -(-model.hidden_size * 8 // 3 // 64) * 64}
    return {}
