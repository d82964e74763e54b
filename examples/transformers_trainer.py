"""transformers' Trainer on two ranks, whose attention distca balances, and the same Trainer in one process.

    python examples/transformers_trainer.py

Nothing is downloaded: the model is a tiny Llama with random weights, and a document counts up from a random token. Two
CPU ranks train by plans. One process then trains on the same batches by PyTorch's own attention. The program prints
for each step both losses, and the attention imbalance (largest load over mean) of the two ranks before and after
balancing. Needs transformers and accelerate: docs/transformers.md.
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import Any

import torch
import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, TrainingArguments

import distca
from distca.integrations import hf

RANKS, DOCUMENTS_PER_RANK, STEPS = 2, 4, 6
LONGEST, VOCABULARY = 400, 64


class Trainer(hf.PlanInputs, transformers.Trainer):
    """Makes a plan of each batch, which all attention layers then run by. Notes what it balances."""

    plan_options = {"tolerance": 0.02, "min_rows": 8}  # the documents here are short

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.imbalance: list[tuple[float, float]] = []

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        stats = next(iter(inputs["plan"].values())).stats
        self.imbalance.append((stats.imbalance_before, stats.imbalance_after))
        return inputs


def documents() -> list[dict[str, list[int]]]:
    """Most of them are short and a few are long, as in real data."""
    draw = random.Random(2)
    made = []
    for _ in range(RANKS * DOCUMENTS_PER_RANK * STEPS):
        length, first = min(int(20 * draw.paretovariate(0.7)), LONGEST), draw.randrange(VOCABULARY)
        made.append({"input_ids": [(first + i) % VOCABULARY for i in range(length)]})
    return made


def model_with(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,  # "distca" is the one change to the model
    )
    return LlamaForCausalLM(config)


def arguments(folder: str, documents_per_process: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=documents_per_process,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )


def losses_of(trainer: transformers.Trainer) -> list[float]:
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_on_a_rank(folder: str) -> tuple[list[float], list[tuple[float, float]]]:
    """In a process that distca.launch has started, or torchrun."""
    args = arguments(folder, DOCUMENTS_PER_RANK, ddp_backend="gloo", ddp_find_unused_parameters=False)
    model = model_with("distca")
    trainer = Trainer(model, args, DataCollatorWithFlattening(), train_dataset=documents())
    rows = DOCUMENTS_PER_RANK * LONGEST  # the most that a rank's batch has
    with distca.init(max_tokens=rows, heads=hf.heads_of(model.config, torch.float32)):
        return losses_of(trainer), trainer.imbalance


def train_alone(folder: str) -> list[float]:
    """A batch has the documents of all ranks here. The seed of the arguments, 42, decides their order."""
    args = arguments(folder, RANKS * DOCUMENTS_PER_RANK)
    trainer = transformers.Trainer(model_with("sdpa"), args, DataCollatorWithFlattening(), train_dataset=documents())
    return losses_of(trainer)


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        losses, imbalance = distca.launch(train_on_a_rank, folder, ranks=RANKS)[0]
        expected = train_alone(folder)
    for step, (loss, alone, (before, after)) in enumerate(zip(losses, expected, imbalance, strict=True)):
        print(
            f"step {step}: loss {loss:.4f} on {RANKS} ranks, {alone:.4f} in one process, "
            f"imbalance {before:.2f} -> {after:.2f}"
        )


if __name__ == "__main__":
    main()
