"""What users call, on a GPU: ranks of a process group over each transport, and a model of transformers.

The ranks are processes that share one GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import distca
from support.batches import random_batch, scattered, spill
from support.gpus import missing_gpu, no_gpu
from support.groups import run_step, together
from support.oracle import ErrorPool, oracle, torch_attention

HEADS = distca.Heads(4, 2, 64, dtype=torch.bfloat16)
LENGTHS = (300, 7, 64, 129)
SEEDS = range(6)


def _plans(ranks: int) -> list[distca.Plan]:
    layouts = [(spill if seed % 2 == 0 else scattered)(LENGTHS, ranks, seed) for seed in SEEDS]
    return [distca.plan(layout, HEADS, tolerance=0.0, min_rows=1) for layout in layouts]


def steps_of_rank(ranks: int, options: dict[str, Any]) -> list[list[Any]]:
    """The results of all plans, as numpy arrays of fp32."""
    torch.cuda.set_device(0)
    plans = _plans(ranks)
    heap_bytes = 2 * max(plan.stats.slot_bytes for plan in plans)
    with distca.init(
        max_tokens=1, heads=HEADS, device="cuda", heap_bytes=heap_bytes, timeout=60.0, **options
    ) as context:
        results = [
            run_step(random_batch(LENGTHS, HEADS, seed), plan, context) for seed, plan in zip(SEEDS, plans, strict=True)
        ]
        torch.cuda.synchronize()
        context.check()
        assert context.transport == options["transport"], context.transport
    return [[t.detach().float().numpy() for t in result] for result in results]


def _check(of_ranks: Sequence[list[list[Any]]], flash: bool) -> None:
    pool = ErrorPool(HEADS.dtype)
    for seed, plan in zip(SEEDS, _plans(len(of_ranks)), strict=True):
        batch = random_batch(LENGTHS, HEADS, seed)
        results = [[torch.from_numpy(t) for t in of_rank[seed]] for of_rank in of_ranks]
        results = [[t if i == 1 else t.bfloat16() for i, t in enumerate(one)] for one in results]
        pool.add(together(LENGTHS, plan.layout, results), torch_attention(batch), oracle(batch))
    pool.check(1.5 if flash else 1.0)


@pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu())
@pytest.mark.parametrize("attention", ["own", "flash"])
@pytest.mark.parametrize(("transport", "ranks"), [("loopback", 1), ("cuda-ipc", 2), ("cuda-ipc", 3), ("nvshmem", 2)])
def test_ranks_of_a_process_group_are_as_exact_as_pytorch(transport: str, ranks: int, attention: str) -> None:
    if transport == "nvshmem" and distca._C.nvshmem_status()[1]:
        pytest.skip(distca._C.nvshmem_status()[1])
    options = {"transport": transport, "attention": attention}
    _check(distca.launch(steps_of_rank, ranks, options, ranks=ranks, threads=1), attention == "flash")


MODEL = """
import torch, distca
from distca.integrations import hf  # registers the attention
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
lengths = [300, 7, 64, 141]
heads = distca.Heads(4, 2, 64, dtype=torch.bfloat16)
layout = distca.Layout.packed(lengths, ranks=1, tokens_per_rank=512)
plan = distca.plan(layout, heads)
ids = torch.randint(0, 512, (1, 512), device="cuda")
positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
models = {}
for name in ("sdpa", "distca"):
    torch.manual_seed(1)
    models[name] = LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16).cuda()
with distca.init(max_tokens=512, heads=heads, device="cuda", attention=ATTENTION) as context:
    out = models["distca"](ids, position_ids=positions, use_cache=False, plan=plan.for_rank(0)).logits
    out.float().square().mean().backward()
    torch.cuda.synchronize()
    context.check()
parts = [models["sdpa"](one, use_cache=False).logits for one in ids.split(lengths, 1)]
torch.cat(parts, 1).float().square().mean().backward()
right = torch.cat(parts, 1)
def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
assert error(out, right) < 0.02, error(out, right)
for a, b in zip(models["distca"].parameters(), models["sdpa"].parameters()):
    assert error(a.grad, b.grad) < 0.03, error(a.grad, b.grad)
print("right")
"""


@pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("attention", ["own", "flash"])
def test_a_model_of_transformers_gives_what_its_documents_give_one_by_one(attention: str) -> None:
    if attention == "own" and missing_gpu():
        pytest.skip(missing_gpu())
    code = MODEL.replace("ATTENTION", repr(attention))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0 and ran.stdout.endswith("right\n"), ran.stdout + ran.stderr
