"""`distca bench padded`: a step on padded batches, as the model is and after `hf.unpad`.

Two ranks train a Llama on pairs of answers to a prompt, as TRL's DPOTrainer lays them: a document a row, padded to the
longest of the rank's batch. All pass a barrier after a step, as gradients are reduced then.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import Work, alternate, median_ratio, spread

RANKS, PROMPTS, LONGEST = 2, 4, 2048
#: Median and sigma of the lognormal lengths.
LENGTHS = {"prompts": (200, 0.8), "answers": (150, 0.8)}
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
WAYS = ("padded", "unpad", "unpad, share_prompts")


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of batches with prompts and answers of random lengths."""
    turns = rounds or (3 if short else 9)
    seeds = [0] if short else [0, 1, 2, 3]
    seconds = distca.launch(_run_rank, seeds, turns, ranks=RANKS, threads=1)[0]
    documents = [pair for seed in seeds for rank in range(RANKS) for pair in lengths_of(seed, rank)]
    rows = sum(prompt + answer for prompt, answers in documents for answer in answers)
    shared = rows - sum(prompt * (len(answers) - 1) for prompt, answers in documents)
    padded = sum(
        2 * PROMPTS * max(prompt + max(answers) for prompt, answers in lengths_of(seed, rank))
        for seed in seeds
        for rank in range(RANKS)
    )
    first, *others = WAYS
    return Result(
        "padded",
        [
            *(Row(f"time: {way} / {first}", median_ratio(seconds[way], seconds[first]), "x") for way in others),
            Row("rows: no padding / all", rows / padded, "x"),
            Row("rows: no padding, prompts once / all", shared / padded, "x"),
        ],
        {
            "ranks": RANKS,
            "prompts": PROMPTS,
            "lengths": LENGTHS,
            "longest": LONGEST,
            "model": MODEL,
            "dtype": "float32",
            "seeds": seeds,
            "turns": turns,
            "seconds": seconds,
            "spread": {way: spread(times) for way, times in seconds.items()},
        },
    )


def lengths_of(seed: int, rank: int) -> list[tuple[int, list[int]]]:
    """The length of each prompt of a rank's batch, and those of its two answers."""
    draw = random.Random(1000 * seed + rank)

    def length(name: str) -> int:
        median, sigma = LENGTHS[name]
        return min(max(round(median * draw.lognormvariate(0.0, sigma)), 2), LONGEST // 2)

    return [(length("prompts"), [length("answers"), length("answers")]) for _ in range(PROMPTS)]


def batch_of(seed: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's batch [2 * PROMPTS, L], padded on the right: the first answers, then the others."""
    lengths, generator = lengths_of(seed, rank), torch.Generator().manual_seed(1000 * seed + rank)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(1, MODEL["vocab_size"], (length,), generator=generator)

    prompts = [tokens(prompt) for prompt, _ in lengths]
    documents = [
        torch.cat([prompt, tokens(answers[which])])
        for which in (0, 1)
        for prompt, (_, answers) in zip(prompts, lengths, strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _run_rank(seeds: list[int], turns: int) -> dict[str, list[float]]:
    import transformers

    from distca.integrations import hf

    batches = [batch_of(seed, dist.get_rank()) for seed in seeds]

    def model_of(attention: str) -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL, attn_implementation=attention)).train()

    def step(model: Any) -> None:
        for batch in batches:
            model(**batch).loss.backward()
            model.zero_grad()
            dist.barrier()  # all ranks take the time of the slowest one

    models = [model_of("sdpa"), hf.unpad(model_of("distca")), hf.unpad(model_of("distca"), share_prompts=True)]
    heads = hf.heads_of(models[0].config, torch.float32)
    with distca.init(max_tokens=2 * PROMPTS * LONGEST, heads=heads, heap_bytes=1 << 28):
        works: list[Work] = [partial(step, model) for model in models]
        return dict(zip(WAYS, alternate(works, turns), strict=True))
