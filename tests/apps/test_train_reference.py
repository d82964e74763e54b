"""A whole run of `distca train` beside a plain transformers.Trainer on one process: the same losses and weights.

Two layers of Qwen3 from a checkpoint of transformers, a tokenizer trained on the spot, 30 steps of two micro-batches.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer as TokenizerFile
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from distca.apps.common.corpus import read_corpus
from distca.apps.common.tokens import Tokenizer
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.once import made_once
from support.ranks import launch
from support.train_runs import metrics_in, without_pictures

STEPS, ACCUMULATE, TOKENS, EVAL_EVERY = 30, 2, 96, 10
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "tokens_per_rank": TOKENS,
    "accumulate": ACCUMULATE,
    "lr": 0.01,
    "weight_decay": 0.1,
    "clip_norm": 0.8,
    "eval_every": EVAL_EVERY,
    "checkpoint_every": EVAL_EVERY,
    "keep_checkpoints": 3,
    "checkpoint_activations": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "bfloat16": {"fsdp": True, "dtype": "bfloat16", "master_weights": True},
}


def _texts(num: int, seed: int) -> list[str]:
    """Documents of very different lengths. Some words are much more frequent than others, and words tend to follow in a
    fixed order.
    """
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(60)]
    texts = []
    for number in range(num):
        word, text = 0, []
        for _ in range(generator.randint(80, 160) if number % 5 == 0 else generator.randint(3, 30)):
            word = (7 * word + 3) % 60 if generator.random() < 0.7 else min(generator.randrange(60) for _ in range(3))
            text.append(words[word])
        texts.append(" ".join(text))
    return texts


def _make_files(folder: Path) -> None:
    """A tokenizer, a checkpoint with random weights, documents to train on and to evaluate on."""
    texts = {"data": _texts(60, seed=1), "evaluation": _texts(25, seed=1)[12:] + _texts(12, seed=2)}
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    file = TokenizerFile(BPE(unk_token="[UNK]"))
    file.pre_tokenizer = Whitespace()
    file.train_from_iterator(texts["data"], BpeTrainer(vocab_size=150, special_tokens=["[UNK]"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=file).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**QWEN3, vocab_size=file.get_vocab_size())
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "checkpoint")


def _config(folder: Path, name: str) -> TrainConfig:
    return TrainConfig(
        data=folder / "data.jsonl",
        eval_data=folder / "evaluation.jsonl",
        tokenizer=folder / "tokenizer",
        model=str(folder / "checkpoint"),
        export=folder / f"{name}, exported",
        **{**COMMON, **RUNS[name]},
    )


@without_pictures()
def _train_all(folder: Path) -> None:
    for name in RUNS:
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(_config(folder, name), folder / name)
    resumed = folder / "resumed"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "ddp", resumed)
        shutil.rmtree(whole_checkpoints(resumed)[STEPS])
    dist.barrier()
    train(resumed_config(resumed, {"fsdp": True, "export": folder / "resumed, exported"}), resumed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        _make_files(folder)
        launch(_train_all, folder, ranks=2)
        return folder

    return made_once(tmp_path_factory, "runs_with_reference", make)


# ---- the reference


def _rows(folder: Path, name: str, steps: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Packed rows, each with as many tokens as both ranks hold. Without `steps` there are as many rows as the documents
    fill.
    """
    corpus = read_corpus(folder / f"{name}.jsonl", 1.0, Tokenizer(folder / "tokenizer"))
    steps = steps or sum(corpus.lengths()) // (2 * TOKENS)
    batches = Batches(corpus, rank=0, ranks=1, tokens_per_rank=2 * TOKENS, steps=steps, seed=0)
    return [
        {
            "input_ids": batch.input_ids,
            "position_ids": batch.layout.position_ids(0)[None],
            # In `labels` a row's target is the label of the next row; `shift_labels` are the targets themselves.
            "labels": F.pad(batch.labels, (1, 0), value=-100)[:, :-1],
            "shift_labels": batch.labels,
        }
        for batch in batches
    ]


@torch.no_grad()
def _mean_loss(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss over all targets, computed one document at a time."""
    total, targets = 0.0, 0
    for row in rows:
        starts = [*(row["position_ids"][0] == 0).nonzero().flatten().tolist(), row["position_ids"].shape[1]]
        for begin, end in zip(starts, starts[1:], strict=False):
            logits = model(row["input_ids"][:, begin:end], use_cache=False).logits[0].float()
            labels = row["shift_labels"][0, begin:end]
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            targets += int((labels != -100).sum())
    return total / targets


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


class Trainer(transformers.Trainer):
    """Notes the loss of every micro-batch, because the log has it rounded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[float] = []

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        self.noted.append(loss.item())
        return loss


class Evaluate(TrainerCallback):
    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % EVAL_EVERY == 0:
            self.losses.append(_mean_loss(model.eval(), self.rows))
            model.train()


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    model: torch.nn.Module


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", attn_implementation="sdpa").train()
    model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("trainer")),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=COMMON["lr"],
        weight_decay=COMMON["weight_decay"],
        max_grad_norm=COMMON["clip_norm"],
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=5,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    evaluate = Evaluate(_rows(folder, "evaluation"))
    rows = Rows(_rows(folder, "data", STEPS * ACCUMULATE))
    trainer = Trainer(model, arguments, lambda rows: rows[0], train_dataset=rows, callbacks=[evaluate])
    trainer.train()
    noted = torch.tensor(trainer.noted, dtype=torch.float64).view(STEPS, ACCUMULATE)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return Reference(noted.sum(1).tolist(), norms, evaluate.losses, model.eval())


# ---- beside it


def _evaluations(run_dir: Path) -> list[float]:
    return [step["eval_loss"] for step in metrics_in(run_dir) if "eval_loss" in step]


EXACT = ["ddp", "fsdp", "resumed"]


@pytest.mark.parametrize("name", EXACT)
def test_all_steps_and_evaluations_are_those_of_a_trainer_of_transformers(
    name: str, folder: Path, reference: Reference
) -> None:
    metrics = metrics_in(folder / name)
    assert len(reference.losses) == STEPS and reference.losses[-1] < 0.8 * reference.losses[0]
    assert [step["loss"] for step in metrics] == pytest.approx(reference.losses, rel=1e-5)
    assert [step["grad_norm"] for step in metrics] == pytest.approx(reference.norms, rel=1e-5)
    assert min(reference.norms) < COMMON["clip_norm"] < max(reference.norms), "clipping made no difference"
    assert _evaluations(folder / name) == pytest.approx(reference.evaluations, rel=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_an_exported_folder_has_the_weights_the_tokenizer_and_the_evaluation(
    name: str, folder: Path, reference: Reference
) -> None:
    exported = folder / f"{name}, exported"
    model = AutoModelForCausalLM.from_pretrained(exported)
    start = dict(AutoModelForCausalLM.from_pretrained(folder / "checkpoint").named_parameters())
    expected = dict(reference.model.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, weight in model.named_parameters():
        moved = (expected[key] - start[key]).norm()
        assert moved > 0 and (weight - expected[key]).norm() < 1e-4 * moved, key
    assert _mean_loss(model.eval(), _rows(folder, "evaluation")) == pytest.approx(reference.evaluations[-1], rel=1e-5)
    text = _texts(1, seed=2)[0]
    assert AutoTokenizer.from_pretrained(exported)(text) == AutoTokenizer.from_pretrained(folder / "tokenizer")(text)


def test_bfloat16_with_weights_in_float32_trains_like_float32(folder: Path, reference: Reference) -> None:
    losses = [step["loss"] for step in metrics_in(folder / "bfloat16")]
    assert losses == pytest.approx(reference.losses, rel=5e-3)
    assert losses != pytest.approx(reference.losses, rel=1e-5)
    assert _evaluations(folder / "bfloat16") == pytest.approx(reference.evaluations, rel=5e-3)
