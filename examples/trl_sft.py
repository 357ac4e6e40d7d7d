"""Supervised fine-tuning with TRL and LoRA, with the activations on SSD.

    python examples/trl_sft.py [--spill-dir DIR] [--steps N] [--keep]    # needs pip install 'ssdtrain[trl]' peft

`--keep` trains without offloading: the losses are the same to the last digit.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

from ssdtrain.integrations.transformers import SSDTrainCallback

parser = argparse.ArgumentParser(description="TRL's SFTTrainer with activations on SSD.")
parser.add_argument("--spill-dir", help="a directory on an SSD (default: $SSDTRAIN_SPILL_DIR, else /var/tmp)")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--keep", action="store_true", help="keep the activations in memory")
options = parser.parse_args()

# The text, and the tokenizer that is trained on it, are of Python's own library.
text = "".join(path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("a*.py")))
END = "<end>"
words = Tokenizer(BPE())
words.pre_tokenizer = ByteLevel(add_prefix_space=False)
words.train_from_iterator([text], BpeTrainer(vocab_size=512, special_tokens=[END], show_progress=False))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END)
data = Dataset.from_dict({"text": [text[at : at + 2000] for at in range(0, 200_000, 2000)]})

# A model with random weights; yours comes from `from_pretrained`.
torch.manual_seed(0)
width = options.width
shape = {
    "hidden_size": width,
    "intermediate_size": 2 * width,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=256, **shape))

quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
gpu = torch.cuda.is_available()
with tempfile.TemporaryDirectory() as output:
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output,
            max_steps=options.steps,
            max_length=256,
            bf16=gpu,
            dataloader_pin_memory=gpu,
            **quiet,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        callbacks=[] if options.keep else [SSDTrainCallback(spill_dir=options.spill_dir)],
    )
    trainer.remove_callback(PrinterCallback)  # prints all that is logged, rounded
    trainer.train()

for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']!r}")
said = "offloaded nothing"
if not options.keep:  # what TRL's checkpointing, which is on by default, keeps
    said = f"offloaded activations: {trainer.state.log_history[-1]['ssdtrain/bytes_written'] / 1e6:.1f} MB written"
print(said)
