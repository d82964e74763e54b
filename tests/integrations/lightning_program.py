"""The program of test_lightning.py: trains every case by Lightning's Trainer on ranks, and by a plain loop.

    lightning_program.py FOLDER [CASE ...]

This process imports once and forks the ranks, which save their results to FOLDER/CASE.RANK.pt. It runs the plain loop
itself, with SDPA on one document at a time in float64, and saves to FOLDER/CASE.alone.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import distca
from distca.integrations import hf

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.forked_ranks import forked_ranks, wait_for

VOCABULARY, WIDTH = 61, 32
LENGTHS = [90, 9, 1, 40, 5, 33, 64, 2, 30, 70, 3, 17]
PADDING = {name: torch.full((1, 1), of) for name, of in {"input_ids": 0, "position_ids": 0, "labels": -100}.items()}
Batch = dict[str, Any]
Documents = list[dict[str, list[int]]]


@dataclasses.dataclass
class Case:
    """How to train: `options` are those of Lightning's Trainer."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    own_model: bool = False
    uneven: bool = False
    shard: bool = False
    ping_pong: bool = False
    recompute: bool = False
    resume: bool = False
    transport: str = "auto"
    dtype: torch.dtype = torch.float32
    ranks: int = 2

    @property
    def clip(self) -> float | None:
        return self.options.get("gradient_clip_val")


VALIDATION: dict[str, Any] = {"limit_val_batches": 1.0, "num_sanity_val_steps": 2, "val_check_interval": 1}
CLIP: dict[str, Any] = {"gradient_clip_val": 1e-2}  # beside AdamW's epsilon, which is 1e-5, this matters
CASES = {
    "ddp": Case(VALIDATION),
    "accumulated_and_clipped": Case({"accumulate_grad_batches": 3} | CLIP),
    "own_model": Case(own_model=True),
    "own_model_with_uneven_loaders": Case(VALIDATION, own_model=True, uneven=True),
    "uneven_loaders": Case(uneven=True),
    "fsdp2": Case(VALIDATION | CLIP, shard=True),
    "bf16": Case({"precision": "bf16-mixed"}, dtype=torch.bfloat16),
    "recomputation": Case(recompute=True),
    "ping_pong": Case(ping_pong=True),
    "over_torch": Case(transport="torch"),
    "resumed": Case(resume=True),
    "resumed_fsdp2": Case(shard=True, resume=True),
    "three_ranks": Case(ranks=3),
}


def documents() -> Documents:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()} for n in LENGTHS]


def batches(case: Case, rank: int, epoch: int | None = None) -> list[Documents]:
    """The documents of each batch of a rank: as Lightning deals them out, shuffled in an epoch of training, or most of
    them to rank 0.
    """
    documents_of = documents()
    if case.uneven:
        mine = documents_of[:8] if rank == 0 else documents_of[8:]
    else:
        sampler = DistributedSampler(documents_of, case.ranks, rank, shuffle=epoch is not None)
        sampler.set_epoch(epoch or 0)
        mine = [documents_of[index] for index in sampler]
    return [mine[begin : begin + 2] for begin in range(0, len(mine), 2)]


def steps_of(case: Case, epoch: int | None = None) -> list[Documents]:
    """The documents of each step, of all ranks."""
    of_ranks = [batches(case, rank, epoch) for rank in range(case.ranks)]
    return [sum(of_step, []) for of_step in itertools.zip_longest(*of_ranks, fillvalue=[])]


class OwnModel(torch.nn.Module):
    """A model that knows nothing of transformers."""

    heads = distca.Heads(q=4, kv=2, dim=8)

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 8 * (4 + 2 + 2))
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, plan: distca.Plan | None) -> torch.Tensor:
        """Logits of the rows `ids` [rows]; without a plan they are one document."""
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (-1, 8)).split((4, 2, 2), dim=1)
        if plan is not None:
            return self.out(distca.core_attention(q, k, v, plan)[0].flatten(1))
        q, k, v = (rows.transpose(0, 1) for rows in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(0, 1).flatten(1))


def model_of(case: Case, attention: str) -> Any:
    torch.manual_seed(7)
    if case.own_model:
        return OwnModel()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def lengths(batch: Batch) -> list[int]:
    starts = (batch["position_ids"][0] == 0).nonzero().flatten()
    return torch.diff(starts, append=torch.tensor([batch["position_ids"].shape[1]])).tolist()


class Module(lightning.LightningModule):
    """As docs/lightning.md shows it: plans are made by `plan_inputs` or, if loaders are uneven or the model is one's
    own, by `PlanAhead`.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, model_of(case, "distca")
        self.losses: list[float] = []
        self.validations: list[float] = []
        self.steps, self.bytes_moved = 0, 0
        if case.recompute:
            self.model.gradient_checkpointing_enable()
        if case.ping_pong:
            self.model = hf.ping_pong(self.model)

    def configure_model(self) -> None:
        if self.case.shard:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def setup(self, stage: str) -> None:
        self.open = contextlib.ExitStack()
        heads = OwnModel.heads if self.case.own_model else hf.heads_of(self.model.config, self.case.dtype)
        context = distca.init(max_tokens=400, heads=heads, transport=self.case.transport, timeout=60)
        self.context = self.open.enter_context(context)

    def teardown(self, stage: str) -> None:
        self.steps += self.context.step
        self.open.close()

    def loader(self, epoch: int | None) -> Any:
        collate = transformers.DataCollatorWithFlattening()
        if not (self.case.own_model or self.case.uneven):
            return DataLoader(documents(), 2, collate_fn=collate)  # Lightning deals out its documents
        loader = DataLoader(batches(self.case, self.context.rank, epoch), None, collate_fn=collate)
        ahead = distca.PlanAhead(
            loader,
            heads=self.context.heads,
            context=self.context,
            lengths=lengths,
            idle_rows=0 if self.case.own_model else 1,
            tolerance=0.01,
            min_rows=1,
        )
        return self.open.enter_context(ahead)

    def train_dataloader(self) -> Any:
        return self.loader(epoch=0)

    def val_dataloader(self) -> Any:
        return self.loader(epoch=None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        if isinstance(batch, dict):
            return hf.plan_inputs(batch, self.model, tolerance=0.01, min_rows=1)
        batch, plan = batch
        return {**(batch or PADDING), "plan": plan}

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over the ranks is the loss of all ranks' documents."""
        plan = batch["plan"]
        targets = sum(length - 1 for length in plan.layout.document_lengths)
        if self.case.own_model:
            rows = plan.layout.num_rows(plan.rank)  # none, if this rank's loader has ended
            logits = self.model(batch["input_ids"][0, :rows], plan)
            own = F.cross_entropy(logits[:-1], batch["labels"][0, 1:rows], reduction="sum") if rows else logits.sum()
            loss = own / targets
        else:
            loss = self.model(**batch, num_items_in_batch=targets, use_cache=False).loss
        return loss * self.trainer.world_size

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, batch_size=1)
        plan = batch["plan"]
        parts = plan.plans if self.case.ping_pong else [plan if isinstance(plan, distca.Plans) else {None: plan}]
        self.bytes_moved += sum(part[None].stats.bytes["forward_in"] for part in parts)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def fitted(module: Module, folder: Path, epochs: int, checkpoint: Path | None = None) -> lightning.Trainer:
    case = module.case
    strategy = ModelParallelStrategy(data_parallel_size=case.ranks, tensor_parallel_size=1) if case.shard else "ddp"
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"limit_val_batches": 0, "enable_checkpointing": False, **quiet} | case.options
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        use_distributed_sampler=True,
        **options,
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer


def trained(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    module = Module(case)
    trainer = fitted(module, folder, epochs=1)
    losses, steps = module.losses, module.steps
    if case.resume:
        checkpoint = folder / f"{name}.ckpt"
        trainer.save_checkpoint(checkpoint)
        module = Module(case)
        torch.nn.init.zeros_(module.model.lm_head.weight)  # the checkpoint has another
        fitted(module, folder, epochs=2, checkpoint=checkpoint)
        losses, steps = losses + module.losses, steps + module.steps
    return {
        "losses": losses,
        "validations": module.validations,
        "weights": {name: _whole(parameter) for name, parameter in module.model.named_parameters()},
        "steps": steps,
        "bytes moved": module.bytes_moved,
    }


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = parameter.detach()
    return (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()


def trained_alone(name: str) -> dict[str, Any]:
    """The same by a plain loop: the batches of all ranks, one document at a time."""
    case = CASES[name]
    model = model_of(case, "sdpa").double()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, steps = optimizer_of(model), steps_of(case, 0) + (steps_of(case, 1) if case.resume else [])

    def loss_of(docs: Documents) -> torch.Tensor:
        total, targets = torch.zeros((), dtype=torch.float64), 0
        for ids in (torch.tensor(document["input_ids"]) for document in docs):
            logits = model(ids, None) if case.own_model else model(ids[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            targets += len(ids) - 1
        return total / targets

    losses, validations = [], []
    num_accumulated = case.options.get("accumulate_grad_batches", 1)
    for number, docs in enumerate(steps, 1):
        loss = loss_of(docs)
        (loss / num_accumulated).backward()
        losses.append(loss.item())
        if number % num_accumulated == 0:
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        if "limit_val_batches" in case.options:
            with torch.no_grad():
                of_batches = [loss_of(docs).item() for docs in steps_of(case)]
            validations.append(sum(of_batches) / len(of_batches))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"start": start, "losses": losses, "validations": validations, "weights": weights}


def train_all(cases: list[str], folder: Path) -> None:
    for name in cases:
        torch.save(trained(name, folder), folder / f"{name}.{os.environ['RANK']}.pt")
        gc.collect()


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    folder = Path(sys.argv[1])
    cases = sys.argv[2:] or list(CASES)
    processes = []
    for ranks in sorted({CASES[name].ranks for name in cases}):
        of_ranks = [name for name in cases if CASES[name].ranks == ranks]
        processes += forked_ranks(ranks, train_all, of_ranks, folder)
    for name in cases:
        torch.save(trained_alone(name), folder / f"{name}.alone.pt")
    wait_for(processes)


if __name__ == "__main__":
    main()
