"""An unmodified transformers.Trainer under torchrun, with PlanInputs, has the losses and weights of SDPA in one
process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from trainer_program import LEARNING_RATE, STEPS, WAYS, documents, model_with

import distca
from distca.integrations import hf
from support.processes import fault_of
from support.torch_ranks import join, torch_group

PROGRAM = Path(__file__).with_name("trainer_program.py")
Ranks = list[dict[str, Any]]


def _run(folder: Path) -> dict[str, Ranks]:
    """What both ranks saved, by their way of training."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, str(PROGRAM), str(folder)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return {way: [rank[way] for rank in ranks] for way in WAYS}


def _losses(model: torch.nn.Module, batch: list[list[int]]) -> tuple[torch.Tensor, int]:
    """The sum of the losses of a batch's documents, one at a time, and the number of their targets."""
    total, targets = torch.zeros(()), 0
    for document in map(torch.tensor, batch):
        logits = model(document[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], document[1:], reduction="sum")
        targets += len(document) - 1
    return total, targets


def test_a_trainer_under_torchrun_has_losses_and_weights_of_one_process_in_all_ways(tmp_path: Path) -> None:
    for way, ranks in _run(tmp_path).items():
        model = _check_steps(ranks, way)
        with torch.no_grad():
            total, targets = _losses(model, ranks[0]["seen"][STEPS] + ranks[1]["seen"][STEPS])
        for rank in ranks:
            assert rank["evaluation"] == pytest.approx(total.item() / targets, rel=1e-5)


def _check_steps(ranks: Ranks, how: str) -> torch.nn.Module:
    """Takes the same steps with SDPA, one document at a time, compares them, and returns the model."""
    batches = [ranks[0]["seen"][step] + ranks[1]["seen"][step] for step in range(STEPS)]
    assert sorted(sum(batches, [])) == sorted(document["input_ids"] for document in documents())
    model = model_with("sdpa")
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(batches):
        total, targets = _losses(model, batch)
        (total / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in ranks:
            assert rank["losses"][step] == pytest.approx(total.item() / targets, rel=1e-4)  # the log has them rounded
    for rank in ranks:
        assert rank["steps"] == STEPS * 2 * 2 * (2 if how == "ping-pong" else 1), f"{how}: attention went another way"
        assert max(rank["bytes moved"][:STEPS]) > 0
        for name, expected in model.named_parameters():
            moved, expected_move = rank["parameters"][name] - start[name], expected.detach() - start[name]
            assert (moved - expected_move).norm() <= 1e-4 * expected_move.norm(), f"{how}: {name}"
    return model


class _Balanced(hf.PlanInputs, transformers.Trainer):
    """The class of docs/transformers.md for front ends, which make model and trainer themselves."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        model.set_attn_implementation("distca")
        super().__init__(model, *args, **options)

    def train(self, *args: Any, **options: Any) -> Any:
        with distca.init(max_tokens=400, heads=hf.heads_of(self.model.config, torch.float32)) as context:
            result = super().train(*args, **options)
            self.steps = context.step
            return result


def test_a_trainer_class_brings_its_plans_to_a_model_and_a_trainer_that_others_make(tmp_path: Path) -> None:
    """In one process: under test is that a ready model's attention changes, and that there is a context."""
    losses = []
    for kind in (_Balanced, transformers.Trainer):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=2, logging_steps=1, save_strategy="no", report_to="none"
        )
        trainer = kind(
            model=model_with("sdpa"),
            args=arguments,
            train_dataset=documents(),
            data_collator=transformers.DataCollatorWithFlattening(),
        )
        losses.append(trainer.train().training_loss)
        assert getattr(trainer, "steps", 8) == 2 * 2 * 2, "attention went another way"
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---- batches that are not packed


class _Batches:
    """Stands for the Trainer and hands the batch through."""

    model = model_with("distca")

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs


class _Planned(hf.PlanInputs, _Batches):
    pass


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, "the batch has no position_ids: use DataCollatorWithFlattening"),
        (torch.arange(6).reshape(2, 3), r"position_ids are \[2, 3\]: use DataCollatorWithFlattening"),
        (torch.tensor([[3, 4, 0, 1]]), "do not count each document from 0"),
        (torch.tensor([[0, 1, 3, 0]]), "do not count each document from 0"),
    ],
)
def test_batches_that_are_not_packed_documents_are_refused(positions: torch.Tensor | None, message: str) -> None:
    with (
        distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8)),
        pytest.raises(distca.InvalidArgumentError, match=message),
    ):
        _Planned()._prepare_inputs({"position_ids": positions})


def _take_batches(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """Tells how each batch was refused: one that only the last rank has packed wrongly. Then takes one."""
    join(rank, ranks, port)
    positions = torch.tensor([[0, 1, 0, 3 if rank == ranks - 1 else 1]])
    with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8), transport="torch", timeout=20.0):
        pipe.send(fault_of(lambda: _Planned()._prepare_inputs({"position_ids": positions})))
        taken = _Planned()._prepare_inputs({"position_ids": torch.arange(rank + 1)[None]})
        pipe.send(taken["plan"].layout.document_lengths)
    dist.destroy_process_group()


def test_all_ranks_refuse_a_batch_that_one_rank_has_packed_wrongly() -> None:
    with torch_group(_take_batches, 3) as group:
        for rank in range(3):
            kind, message = group.receive(rank)
            assert kind == "InvalidArgumentError"
            assert message.startswith("rank 2: ")
            assert "do not count each document from 0" in message
            assert group.receive(rank) == [1, 2, 3]  # the next batch is taken


def _init_with_a_few(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """Makes a context of the first two of three ranks."""
    join(rank, ranks, port)
    few = dist.new_group([0, 1])
    if rank < 2:
        with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8), group=few):
            pipe.send(fault_of(lambda: _Planned()._prepare_inputs({"position_ids": torch.arange(4)[None]})))
    dist.destroy_process_group()


def test_a_context_of_some_of_the_processes_is_refused() -> None:
    with torch_group(_init_with_a_few, 3) as group:
        for rank in range(2):
            kind, message = group.receive(rank)
            assert kind == "InvalidArgumentError"
            assert "has the processes [0, 1] of 3" in message


def _init_too_early(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """Makes a context before torch.distributed is there: of this process alone."""
    with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8)):
        join(rank, ranks, port)
        pipe.send(fault_of(lambda: _Planned()._prepare_inputs({"position_ids": torch.arange(4)[None]})))
    dist.destroy_process_group()


def test_a_context_that_was_made_before_the_process_group_is_refused() -> None:
    """Each rank would compute its own documents, and nothing would be balanced."""
    with torch_group(_init_too_early, 2) as group:
        for rank in range(2):
            kind, message = group.receive(rank)
            assert kind == "InvalidArgumentError"
            assert "has the processes [0] of 2" in message
            assert "call distca.init in each process, once torch.distributed is initialised" in message


def _end_early(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """The last rank has one batch less."""
    join(rank, ranks, port)
    with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8), transport="torch", timeout=20.0):
        batch = {"position_ids": torch.arange(4)[None]}
        _Planned()._prepare_inputs(batch)
        if rank < ranks - 1:
            pipe.send(fault_of(lambda: _Planned()._prepare_inputs(batch)))
    dist.destroy_process_group()


def test_a_rank_that_has_no_further_batch_is_an_error_that_says_so() -> None:
    with torch_group(_end_early, 2) as group:
        kind, message = group.receive(0)
        assert kind == "PeerDiedError"
        assert "all ranks need equally many batches, or distca.PlanAhead" in message


def _never_begin(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """The last rank has no batch at all."""
    join(rank, ranks, port)
    with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8), transport="torch", timeout=2.0):
        if rank < ranks - 1:
            pipe.send(fault_of(lambda: _Planned()._prepare_inputs({"position_ids": torch.arange(4)[None]})))
    dist.destroy_process_group()


def test_a_rank_that_has_no_batch_at_all_is_an_error_after_the_context_s_timeout() -> None:
    with torch_group(_never_begin, 2) as group:
        kind, message = group.receive(0)
        assert kind in ("PeerTimeoutError", "PeerDiedError")  # PyTorch's store may end with the other rank
        assert "all ranks need equally many batches, or distca.PlanAhead" in message


def test_a_trainer_without_a_context_says_what_to_call() -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"no context 'default': call distca\.init before training"):
        _Planned()._prepare_inputs({"position_ids": torch.arange(4)[None]})


def test_a_packed_batch_gets_the_plan_of_its_documents() -> None:
    with distca.init(max_tokens=8, heads=distca.Heads(4, 2, 8)):
        inputs = _Planned()._prepare_inputs({"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1]])})
    assert inputs["plan"].layout.segments(0) == [(0, 0, 3), (1, 0, 1), (2, 0, 2)]


def test_a_loop_of_ones_own_plans_a_batch_by_plan_inputs() -> None:
    model, ids = model_with("distca"), torch.arange(2, 8)
    batch = transformers.DataCollatorWithFlattening()(
        [{"input_ids": ids[:2].tolist()}, {"input_ids": ids[2:].tolist()}]
    )
    heads = hf.heads_of(model.config, torch.float32)
    with distca.init(max_tokens=8, heads=heads, name="other") as context:
        inputs = hf.plan_inputs(batch, model, distca_context="other", tolerance=0.5)
        assert inputs["plan"].layout.document_lengths == [2, 4] and inputs["distca_context"] == "other"
        loss = model(**inputs, use_cache=False).loss
        assert context.step == 2
    total, targets = _losses(model_with("sdpa"), [ids[:2].tolist(), ids[2:].tolist()])
    torch.testing.assert_close(loss, total / targets)
