"""The program that test_trainer.py starts by torchrun: trains a model by a transformers.Trainer in each of WAYS.

    trainer_program.py FOLDER

Every rank saves its inputs and results to FOLDER/RANK.pt.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, TrainingArguments

import distca
from distca.integrations.hf import PlanInputs, heads_of, ping_pong
from distca.integrations.hf_ping_pong import HalvedPlans

LENGTHS = [150, 9, 1, 40, 5, 33, 90, 2, 64, 70, 3, 17]
VOCABULARY = 61
STEPS = 3
WAYS = ("eager", "compiled", "ping-pong")
LEARNING_RATE = 0.05


def model_with(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()} for n in LENGTHS]


class Trainer(PlanInputs, transformers.Trainer):
    plan_options = {"tolerance": 0.01, "min_rows": 1}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[list[list[int]]] = []
        self.bytes_moved: list[int] = []

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Notes the documents of this rank's batch as the collator has packed them."""
        inputs = super()._prepare_inputs(inputs)
        packed, starts = inputs["input_ids"][0].tolist(), (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
        self.seen.append([packed[a:b] for a, b in zip(starts, [*starts[1:], len(packed)], strict=True)])
        parts = inputs["plan"].plans if isinstance(inputs["plan"], HalvedPlans) else [inputs["plan"]]
        self.bytes_moved.append(sum(next(iter(plans.values())).stats.bytes["forward_in"] for plans in parts))
        return inputs


def train(folder: Path, way: str) -> dict[str, Any]:
    compiled = way == "compiled"
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        torch_compile=compiled,
        torch_compile_backend="aot_eager" if compiled else None,
    )
    model = model_with("distca")
    if way == "ping-pong":
        model = ping_pong(model)
    trainer = Trainer(
        model, arguments, DataCollatorWithFlattening(), train_dataset=documents(), eval_dataset=documents()[:6]
    )
    with distca.init(max_tokens=400, heads=heads_of(model.config, torch.float32), timeout=60) as context:
        trainer.train()
        steps = context.step
        evaluation = trainer.evaluate()["eval_loss"]
    return {
        "seen": trainer.seen,
        "bytes moved": trainer.bytes_moved,
        "steps": steps,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluation": evaluation,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    results = {way: train(folder, way) for way in WAYS}
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
