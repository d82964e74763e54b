"""TRL's SFTTrainer on several ranks, whose attention distca balances.

    torchrun --nproc-per-node=2 examples/trl_sft.py

Nothing is downloaded: the model is a tiny Llama with random weights, the documents repeat a few words, and the
tokenizer is trained on them. Rank 0 prints for each step its loss, and the attention imbalance (largest load over mean)
of the documents as they lie and as they are computed. Needs trl and datasets: docs/trl.md.
"""

from __future__ import annotations

import gc
import itertools
import random
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import distca
from distca.integrations import hf

MAX_LENGTH = 256
TEXT = "a document of many words is cut into tasks and every rank has as much attention to compute as any other"
WORDS = TEXT.split()


class Trainer(hf.PlanInputs, SFTTrainer):
    """Makes a plan of each batch, which all attention layers then run by. Notes what it balances."""

    plan_options = {"tolerance": 0.02, "min_rows": 8}  # so few rows: these documents are short

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        self.stats = next(iter(inputs["plan"].values())).stats
        return inputs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs and self.is_world_process_zero():
            balance = f"{self.stats.imbalance_before:.2f} -> {self.stats.imbalance_after:.2f}"
            print(f"step {self.state.global_step}: loss {logs['loss']:.4f}, imbalance {balance}")


def documents(count: int) -> list[str]:
    """Most of them short and a few long, as in real data: words in turn, from any of them on."""
    draw = random.Random(1)
    texts = []
    for _ in range(count):
        length, start = min(int(8 * draw.paretovariate(0.8)), MAX_LENGTH), draw.randrange(len(WORDS))
        texts.append(" ".join(itertools.islice(itertools.cycle(WORDS), start, start + length)))
    return texts


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def train(folder: str) -> None:
    texts = documents(64)
    tokenizer = tokenizer_of(texts)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="distca",  # the one change to the model
        )
    )
    args = SFTConfig(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,  # TRL's default is True; the heads' dtype below would then be torch.bfloat16
        packing=True,
        max_length=MAX_LENGTH,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        num_train_epochs=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
    rows = args.per_device_train_batch_size * MAX_LENGTH  # the most that a rank's batch has
    with distca.init(max_tokens=rows, heads=hf.heads_of(model.config, torch.float32)):
        trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
    gc.collect()  # DDP's reducer goes before the process group that it uses
    dist.barrier()
    dist.destroy_process_group()
