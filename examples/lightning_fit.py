"""PyTorch Lightning on two ranks, whose attention distca balances.

    python examples/lightning_fit.py

Lightning starts the second process itself; torchrun may start both. Nothing is downloaded: the model is a tiny Llama
with random weights, and a document counts up from a random token. Rank 0 prints for each step the loss, and the
attention imbalance (largest load over mean) of the documents as they lie and as they are computed, and for each epoch
the loss of the validation. Needs lightning and transformers: docs/lightning.md.
"""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import distca
from distca.integrations import hf

RANKS, DOCUMENTS_PER_RANK, STEPS, EPOCHS = 2, 4, 8, 2
LONGEST, VOCABULARY = 400, 64


class Llama(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="distca",  # the one change to the model
        )
        self.model = LlamaForCausalLM(config)

    def setup(self, stage):  # in every process, once torch.distributed is initialised
        rows = DOCUMENTS_PER_RANK * LONGEST  # the most that a rank's batch has
        self.context = distca.init(max_tokens=rows, heads=hf.heads_of(self.model.config, torch.float32))

    def teardown(self, stage):
        self.context.close()

    def on_after_batch_transfer(self, batch, dataloader_idx):  # in training, validation and test
        return hf.plan_inputs(batch, self.model, tolerance=0.02, min_rows=8)

    def loss(self, batch):
        """The loss of all ranks' documents is the mean of what this returns on each rank."""
        targets = sum(length - 1 for length in batch["plan"].layout.document_lengths)
        loss = self.model(**batch, num_items_in_batch=targets, use_cache=False).loss
        return loss * self.trainer.world_size  # Lightning's strategies take the mean of the ranks' gradients

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, batch_size=1)
        self.stats = batch["plan"][None].stats  # None: no sliding window
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Prints(lightning.Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, module: Llama, *_: Any) -> None:
        if trainer.is_global_zero:
            loss, balance = trainer.callback_metrics["loss"], module.stats
            balanced = f"{balance.imbalance_before:.2f} -> {balance.imbalance_after:.2f}"
            print(f"step {trainer.global_step}: loss {loss:.4f}, imbalance {balanced}")

    def on_validation_epoch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"epoch {trainer.current_epoch}: validation {trainer.callback_metrics['validation']:.4f}")


def documents(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Most of them are short and a few are long, as in real data."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        length, first = min(int(20 * draw.paretovariate(0.7)), LONGEST), draw.randrange(VOCABULARY)
        made.append({"input_ids": [(first + i) % VOCABULARY for i in range(length)]})
    return made


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    train, validation = documents(RANKS * DOCUMENTS_PER_RANK * STEPS, seed=2), documents(16, seed=3)
    collate = DataCollatorWithFlattening()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[Prints()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Llama(),
        DataLoader(train, DOCUMENTS_PER_RANK, shuffle=True, collate_fn=collate),
        DataLoader(validation, DOCUMENTS_PER_RANK, collate_fn=collate),
    )


if __name__ == "__main__":
    main()
