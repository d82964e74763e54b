"""Whether a model computes on two ranks what it computes alone, or is refused with a reason."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

import distca
from support.groups import loopback_group, outcomes

from .reference import (
    NO_TARGET,
    Case,
    Results,
    documents,
    gradients,
    loss_of,
    plans_by_hand,
    reference,
    run,
    takes_any_keyword,
    worst_error,
)

#: Relative bounds: the first for the loss of all documents, the second for the norms of each gradient and of the
#: logits, and the third for those of models whose recurrences carry rounding on.
LOSS, NORM, RECURRENT_NORM = 1e-6, 1e-5, 3e-5
#: Other bounds of norms, by entry. On an Intel Xeon with AMX the gradient of Gemma 4's embeddings differs by 1.09e-5,
#: the same for each instruction set of distca's kernel.
_NORMS = {"gemma4": 1.2e-5}

#: Models whose own loss does not shift labels.
_UNSHIFTED = ("whisper",)


def norm_of(case: Case) -> float:
    """The relative bound for the norms of a case's gradients and logits."""
    return _NORMS.get(case.entry, RECURRENT_NORM if case.recurrent else NORM)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about a model.

    `kind` is "exact", "refused" or "fails". `sentence` has the figures, the refusal, or what went wrong.
    """

    kind: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Way:
    """How a caller uses the model: with the plan as a keyword or by `distca.using`, and with labels if the model
    computes the loss.
    """

    by_keyword: bool
    with_positions: bool = True
    labels: tuple[str, ...] = ()
    train: bool = False


def judge(case: Case) -> Verdict:
    """The verdict on a model whose caller follows the documentation.

    The model also fails if another caller gets other numbers without an error: one who only evaluates, passes the plan
    in another way, leaves out the positions, lets the model compute the loss, or makes heads by hand where the library
    finds none.
    """
    try:
        models = [case.model("distca") for _ in range(2)]
    except distca.InvalidArgumentError as error:
        return Verdict("refused", str(error))
    refused = None
    try:
        plans = case.plans(models[0])
    except distca.InvalidArgumentError as error:
        refused = Verdict("refused", str(error))
        plans = plans_by_hand(case)
    expected = functools.cache(lambda: reference(case))
    usual = Way(by_keyword=takes_any_keyword(models[0]))
    found = _judged(case, models, plans, dataclasses.replace(usual, train=True), expected)
    verdict = refused or found
    if refused is not None and found.kind != "refused":
        return Verdict("fails", f"{refused.sentence}: but with plans by hand {found}")
    others = [usual, Way(by_keyword=False), dataclasses.replace(usual, with_positions=False)]
    if "labels" in inspect.signature(models[0].forward).parameters and case.entry not in _UNSHIFTED:
        ways = (("labels",), ("labels", "shift_labels"))
        others += [dataclasses.replace(usual, labels=names) for names in ways[: 1 if case.masked else 2]]
    for way in others if found.kind != "fails" else []:
        other = _judged(case, models, plans, way, expected)
        if other.kind == "fails":
            return Verdict("fails", f"{verdict}, but {way}: {other}")
    return verdict


def _judged(
    case: Case,
    models: Sequence[torch.nn.Module],
    plans: distca.Plans,
    way: Way,
    expected: Callable[[], Results],
) -> Verdict:
    """ "refused" if every rank raises the library's error of a wrong argument; otherwise the results are compared with
    the reference.
    """
    results = _on_two_ranks(case, models, plans, way)
    errors = [result for result in results if isinstance(result, BaseException)]
    if len(errors) == 2 and all(isinstance(error, distca.InvalidArgumentError) for error in errors):
        return Verdict("refused", str(errors[0]))
    if errors:
        return Verdict("fails", "; ".join(f"{type(result).__name__}: {result}" for result in results))
    first, second = results
    grads = {name: first.grads[name] + second.grads[name] for name in first.grads}
    ours = Results(first.loss + second.loss, grads, torch.cat([first.logits, second.logits]), first.calls)
    name, error = worst_error(ours, expected(), trained=way.train, loss=LOSS, norm=norm_of(case))
    if way.labels:
        wanted = loss_of(expected().logits, torch.cat([document.targets for document in documents()])).item()
        name, error = "the model's own loss", abs(ours.loss - wanted) / wanted / LOSS
    if not error <= 1:
        return Verdict("fails", f"{name} differs by {error:.2f} of what is allowed")
    if not first.calls == second.calls == expected().calls:
        return Verdict("fails", f"{first.calls} and {second.calls} steps for {expected().calls} calls of attention")
    return Verdict("exact", f"{name} differs by {error:.2f} of what is allowed, {expected().calls} steps")


def _on_two_ranks(case: Case, models: Sequence[torch.nn.Module], plans: distca.Plans, way: Way) -> list[Any]:
    """What each rank computed or raised."""
    tokens = torch.cat([document.tokens for document in documents()])
    targets = torch.cat([document.targets for document in documents()])
    # As transformers' collator makes them: the model shifts them by a row, and no row's target is another document's.
    shifted = torch.cat([torch.cat([torch.tensor([NO_TARGET]), document.tokens[1:]]) for document in documents()])
    labels = targets if case.masked else shifted

    def forward(rank: int, context: distca.Context) -> Any:
        rows = case.rows(rank)
        mine, offered = plans.for_rank(rank), {}
        if way.with_positions:
            offered["position_ids"] = case.layout().position_ids(rank)[None] + case.first_position
        offered |= {name: (labels if name == "labels" else targets)[rows][None] for name in way.labels}
        if way.by_keyword:
            return run(models[rank], tokens[rows], **offered, plan=mine, distca_context=context)
        with distca.using(mine, context=context):
            return run(models[rank], tokens[rows], **offered)

    def work(rank: int, context: distca.Context) -> Results:
        loss, model, wanted = 0.0, models[rank], targets[case.rows(rank)]
        if way.train:
            of_rank = loss_of(forward(rank, context).logits[0], wanted)
            of_rank.backward()
            loss = of_rank.item()
        model.eval()
        before = context.step
        with torch.no_grad():
            output = forward(rank, context)
        if way.labels:
            loss = output.loss.item() * int((wanted != NO_TARGET).sum())
        return Results(loss, gradients(model), output.logits[0], context.step - before)

    for model in models:
        model.train(way.train).zero_grad()
    with loopback_group(list(plans.values()), timeout=20.0) as contexts:
        return outcomes(contexts, work)
