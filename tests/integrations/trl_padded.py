"""TRL's trainers that pad their batches, on two ranks each: with models that went through `hf.unpad`, and without it.

trl_program.py runs them, and test_trl.py compares.
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
import trl

import distca
from distca.integrations import hf

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import trl_sft

STEPS = 3
DOCUMENTS = 48
#: What all trainers here have in common, those of trl_program.py too.
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "ddp_backend": "gloo",
    "bf16": False,
    "gradient_checkpointing": False,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclasses.dataclass
class Case:
    """A trainer of TRL, its options, and how its model is made."""

    trainer: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    share_prompts: bool = False
    lora: bool = False


GENERATES: dict[str, Any] = {"num_generations": 4, "max_completion_length": 12, "beta": 0.0}

CASES = {
    "dpo": Case("DPO"),
    "dpo_bf16": Case("DPO", {"bf16": True}),
    "dpo_shared": Case("DPO", share_prompts=True),
    "dpo_shared_lora_checkpoints": Case("DPO", {"gradient_checkpointing": True}, share_prompts=True, lora=True),
    "reward": Case("Reward"),
    "kto": Case("KTO"),
    "grpo": Case("GRPO", GENERATES),
    "grpo_shared": Case("GRPO", GENERATES, share_prompts=True),
    "rloo": Case("RLOO", GENERATES),
}


def model_of(tokenizer: Any, attention: str, trainer: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
        attn_implementation=attention,
    )
    torch.manual_seed(7)
    return (transformers.LlamaForSequenceClassification if trainer == "Reward" else transformers.LlamaForCausalLM)(
        config
    )


def texts(lengths: list[int], seed: int, begin: str = "") -> list[str]:
    draw = random.Random(seed)
    return [begin + " ".join(draw.choices(trl_sft.WORDS, k=draw.choice(lengths))) for _ in range(DOCUMENTS)]


def data_of(trainer: str) -> datasets.Dataset:
    """Prompts of which most are long enough to be shared, and answers."""
    columns: dict[str, Any] = {"prompt": texts([3, 20, 40, 60], 1)}
    chosen, rejected = (texts([2, 5, 9, 30], seed, begin=" ") for seed in (2, 3))
    if trainer in ("DPO", "Reward"):
        columns |= {"chosen": chosen, "rejected": rejected}
    elif trainer == "KTO":
        columns |= {"completion": chosen, "label": [number % 2 == 0 for number in range(DOCUMENTS)]}
    return datasets.Dataset.from_dict(columns)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(completion.split())) + 0.01 * len(completion) for completion in completions]


def trained(case: Case, folder: Path, plain: bool) -> dict[str, Any]:
    tokenizer = trl_sft.tokenizer_of([" ".join(trl_sft.WORDS)])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    models = [model_of(tokenizer, "sdpa" if plain else "distca", case.trainer) for _ in range(2)]
    if not plain:
        models = [hf.unpad(model, share_prompts=case.share_prompts, tolerance=0.01, min_rows=1) for model in models]
    model, reference = models
    rows = {"computed": 0, "no padding": 0}

    def count_computed(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        rows["computed"] += args[0].shape[0] * args[0].shape[1]

    def count_kept(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is None and kwargs.get("past_key_values") is None:
            rows["no padding"] += int(kwargs["attention_mask"].sum())

    model.model.layers[0].register_forward_pre_hook(count_computed)
    if plain:
        model.model.register_forward_pre_hook(count_kept, with_kwargs=True)
    arguments: dict[str, Any] = {"reward_funcs": reward} if case.trainer in ("GRPO", "RLOO") else {}
    if case.trainer in ("DPO", "KTO") and not case.lora:
        arguments["ref_model"] = reference
    if case.lora:
        arguments["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(8)  # the seed of the adapters' weights
    trainer = getattr(trl, f"{case.trainer}Trainer")(
        model=model,
        args=getattr(trl, f"{case.trainer}Config")(
            str(folder), **OPTIONS | {"per_device_train_batch_size": 4} | case.options
        ),
        train_dataset=data_of(case.trainer),
        processing_class=tokenizer,
        **arguments,
    )
    steps = 0
    if plain:
        trainer.train()
    else:
        heads = hf.heads_of(model.config, torch.bfloat16 if trainer.args.bf16 else torch.float32)
        with distca.init(max_tokens=2048, heads=heads, timeout=60) as context:
            trainer.train()
            steps = context.step
    weights = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: parameter.detach().clone() for name, parameter in weights if parameter.requires_grad},
        "rows": rows,
        "steps": steps,
    }


def train_all(cases: list[str], folder: Path, plain: bool) -> None:
    name_of = f"plain.{os.environ['RANK']}" if plain else os.environ["RANK"]
    for name in cases:
        torch.save(trained(CASES[name], folder, plain), folder / f"{name}.{name_of}.pt")
        gc.collect()
