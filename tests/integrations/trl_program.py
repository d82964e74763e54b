"""The program of test_trl.py: trains every case by ranks under distca, and by one process with plain SDPA.

    trl_program.py FOLDER [CASE ...]

This process imports once and forks all others, because imports take most of a short run. The ranks find each other as
under torchrun. A rank saves its results to FOLDER/CASE.RANK.pt, and the one process to FOLDER/CASE.alone.pt. Of a case
of trl_padded.py, ranks without distca save theirs to FOLDER/CASE.plain.RANK.pt.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

import distca
from distca.integrations.hf import PlanInputs, heads_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import trl_padded
import trl_sft

from support.forked_ranks import forked, forked_ranks, wait_for

MAX_LENGTH = 96
WINDOW = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content + ' <eos> ' }}"
    "{% endgeneration %}{% else %}{{ message.content + ' ' }}{% endif %}{% endfor %}"
)


@dataclasses.dataclass
class Case:
    """How to train: `options` are those of SFTConfig; the one process alone replaces some of them by `alone`."""

    options: dict[str, Any]
    alone: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "llama"
    data: str = "text"
    lora: bool = False
    dtype: torch.dtype = torch.float32
    ranks: int = 2


PACKING: dict[str, Any] = {"packing": True, "max_length": MAX_LENGTH}
PADDING_FREE: dict[str, Any] = {"padding_free": True, "max_length": None}
PADDED: dict[str, Any] = {"padding_free": False}  # one document a row; rows are as wide as the longest
CHECKPOINTS: dict[str, Any] = {"gradient_checkpointing": True}

CASES = {
    "packing": Case(PACKING),
    "padding_free": Case(PADDING_FREE, alone=PADDED),
    "lora": Case(PACKING | CHECKPOINTS, lora=True),
    "gradient_checkpointing": Case(PACKING | CHECKPOINTS),
    "fsdp2": Case(
        PACKING | {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
        alone={"fsdp": None, "fsdp_config": None},
    ),
    "bf16": Case(PACKING | {"bf16": True}, dtype=torch.bfloat16),
    "gradient_accumulation": Case(PADDING_FREE | {"gradient_accumulation_steps": 2}, alone=PADDED),
    "completion_only_loss": Case(PACKING, data="completion"),
    "assistant_only_loss": Case(PADDING_FREE | {"assistant_only_loss": True}, alone=PADDED, data="chat"),
    "padded_to_a_multiple": Case(PADDING_FREE | {"pad_to_multiple_of": 32}, alone=PADDED),
    "sliding_window": Case(PADDING_FREE, alone=PADDED, model="mistral"),
    "layers_that_differ": Case(PADDING_FREE, alone=PADDED, model="gemma3"),
    "evaluation": Case(
        PACKING | {"eval_strategy": "steps", "eval_steps": 1, "eval_packing": False, "per_device_eval_batch_size": 1}
    ),
    "three_ranks": Case(PADDING_FREE, alone=PADDED, ranks=3),
}


def model_of(kind: str, attention: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attn_implementation": attention,
    }
    torch.manual_seed(7)
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=WINDOW, **shape))
    if kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(sliding_window=WINDOW, layer_types=kinds, **shape)
        return transformers.Gemma3ForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def texts(count: int, seed: int) -> list[str]:
    """Documents of which a few are as long as a packed row, and most are far shorter."""
    draw = random.Random(seed)
    lengths = [draw.choice([2, 5, 9, 14, 30, MAX_LENGTH - 4]) for _ in range(count)]
    return [" ".join(draw.choices(trl_sft.WORDS, k=length)) for length in lengths]


def data_of(kind: str, count: int, seed: int) -> datasets.Dataset:
    prompts, answers = texts(count, seed), texts(count, seed + 1)
    if kind == "completion":
        return datasets.Dataset.from_dict(
            {"prompt": [f"{text[:40]} a" for text in prompts], "completion": [f" {text[:200]}" for text in answers]}
        )
    if kind == "chat":
        turns = [
            [{"role": "user", "content": prompt[:60]}, {"role": "assistant", "content": answer}]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return datasets.Dataset.from_dict({"messages": turns})
    return datasets.Dataset.from_dict({"text": prompts})


class UnderDistca(PlanInputs, SFTTrainer):
    plan_options = {"tolerance": 0.01, "min_rows": 1}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bytes_moved = 0

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.model.training:
            self.bytes_moved += sum(plan.stats.bytes["forward_in"] for plan in inputs["plan"].values())
        return inputs


def trained(case: Case, folder: Path, alone: bool) -> dict[str, Any]:
    tokenizer = trl_sft.tokenizer_of([" ".join(trl_sft.WORDS)])
    tokenizer.chat_template = CHAT_TEMPLATE
    options = trl_padded.OPTIONS | {
        "ddp_backend": None if alone else "gloo",
        "per_device_train_batch_size": 2 * (case.ranks if alone else 1),
    }
    options |= case.options | (case.alone if alone else {})
    model = model_of(case.model, "sdpa" if alone else "distca", tokenizer)
    heads = heads_of(model.config, case.dtype)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if case.lora else None
    torch.manual_seed(8)  # the seed of the adapters' weights
    trainer = (SFTTrainer if alone else UnderDistca)(
        model,
        SFTConfig(str(folder), **options),
        train_dataset=data_of(case.data, 48, seed=3),
        eval_dataset=data_of(case.data, 5, seed=5) if "eval_strategy" in options else None,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    steps, bytes_moved = 0, 0
    if alone:
        trainer.train()
    else:
        with distca.init(max_tokens=2 * 2 * MAX_LENGTH, heads=heads, timeout=60) as context:
            trainer.train()
            steps, bytes_moved = context.step, trainer.bytes_moved
    history = trainer.state.log_history
    trained_model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    weights = {name: _whole(p) for name, p in trained_model.named_parameters() if p.requires_grad}
    return {
        "start": {name: start[name] for name in weights if name in start},
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "weights": weights,
        "steps": steps,
        "bytes moved": bytes_moved,
    }


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = parameter.detach()
    return (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()


def train_all(cases: list[str], folder: Path, alone: bool) -> None:
    rank = "alone" if alone else os.environ["RANK"]
    for name in cases:
        torch.save(trained(CASES[name], folder, alone), folder / f"{name}.{rank}.pt")
        gc.collect()


def main() -> None:
    datasets.disable_progress_bars()
    gc.collect()
    gc.freeze()  # trainers collect garbage; leaving imported modules out of that halves the time of a case
    folder = Path(sys.argv[1])
    named = sys.argv[2:] or [*CASES, *trl_padded.CASES]
    padded, cases = ([name for name in named if name in of] for of in (trl_padded.CASES, CASES))
    processes = [forked({}, train_all, cases, folder, True)]
    for plain in (True, False) if padded else ():
        processes += forked_ranks(2, trl_padded.train_all, padded, folder, plain)
    for ranks in sorted({CASES[name].ranks for name in cases}):
        of_ranks = [name for name in cases if CASES[name].ranks == ranks]
        processes += forked_ranks(ranks, train_all, of_ranks, folder, False)
    wait_for(processes)


if __name__ == "__main__":
    main()
