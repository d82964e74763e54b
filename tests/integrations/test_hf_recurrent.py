"""Models with recurrent layers: each document is computed as if it were alone, whatever runs the layers."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import io
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from families.recurrent import Result, assert_as_expected
from families.reference import gradients, loss_of
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import distca
from distca.integrations import hf
from distca.integrations.hf_limits import examine
from distca.integrations.hf_recurrent import is_recurrent, looks_by_functions, run_by_document
from support.groups import loopback_group, on_all_ranks, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels

#: A rank with several documents, one with a single one, and one with padding alone. Two segments of document 1 follow
#: each other.
LAYOUT = distca.Layout([[(0, 0, 9), (1, 0, 12), (1, 12, 20), (2, 0, 1), (-1, 0, 2)], [(3, 0, 40)], [(-1, 0, 1)]])
MODELS = {
    "linear attention": ("qwen3_next", {}),
    "state spaces beside attention": ("falcon_h1", {}),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "a sum over time": ("minimax", {}),
}
QWEN = MODELS["linear attention"]


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, tiny.VOCABULARY, (n,), generator=generator) for n in LAYOUT.document_lengths]


def _inputs(rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A rank's input_ids and position_ids, and the targets of its rows; -100 where there is none."""
    ids, targets = [], []
    for document, begin, end in LAYOUT.segments(rank):
        tokens = _tokens()[document] if document >= 0 else torch.zeros(end, dtype=torch.int64)
        following = torch.cat([tokens[1:], torch.tensor([-100])]) if document >= 0 else torch.full((end,), -100)
        ids.append(tokens[begin:end])
        targets.append(following[begin:end])
    return {"input_ids": torch.cat(ids)[None], "position_ids": LAYOUT.position_ids(rank)[None]}, torch.cat(targets)


@functools.cache
def _expected(which: str) -> Result:
    """transformers' own attention, one document at a time."""
    entry, options = MODELS[which]
    model, total = tiny.model_of(entry, "eager", options).train(), 0.0
    for tokens in _tokens():
        loss = loss_of(model(tokens[None], use_cache=False).logits[0], torch.cat([tokens[1:], torch.tensor([-100])]))
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def _on_all_ranks(
    which: str, prepare: Callable[[torch.nn.Module], Any] = lambda model: None, halves: bool = False, **keywords: Any
) -> Result:
    entry, options = MODELS[which]
    models = [tiny.model_of(entry, "distca", options).train() for _ in range(3)]
    config = models[0].config
    arguments = LAYOUT, hf.heads_of(config, torch.float32)
    make = hf.plan_halves if halves else distca.plans
    made = [make(*arguments, windows=hf.windows_of(config), rank=rank) for rank in range(3)]

    def work(rank: int, context: distca.Context) -> Result:
        prepared = prepare(models[rank])
        model = models[rank] if prepared is None else prepared
        inputs, targets = _inputs(rank)
        shared = {"plan": made[rank], "distca_context": context} | keywords
        loss = loss_of(model(**inputs, **shared).logits[0], targets)
        loss.backward()
        return loss.item(), gradients(models[rank])

    parts = made[0].plans if halves else made[:1]
    plans = [plan for part in parts for plan in part.values()]
    with loopback_group(plans) as contexts:
        results = on_all_ranks(contexts, work)
    summed = {name: sum(of[name] for _, of in results) for name in results[0][1]}
    return sum(loss for loss, _ in results), summed


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("cache", [False, None], ids=["no cache", "the default cache"])
def test_documents_on_three_ranks_are_computed_as_if_alone(which: str, cache: bool | None) -> None:
    """transformers' default cache would hand the state of a document to the next one."""
    assert_as_expected(_on_all_ranks(which, **({} if cache is None else {"use_cache": cache})), _expected(which))


@pytest.mark.parametrize("which", MODELS)
def test_documents_that_see_each_others_state_would_be_noticed(which: str) -> None:
    entry, options = MODELS[which]
    model, tokens = tiny.model_of(entry, "eager", options).eval(), _tokens()
    with torch.no_grad():
        alone = model(tokens[1][None], use_cache=False).logits[0]
        mask = torch.ones(1, len(tokens[0]) + len(tokens[1]))
        after = model(torch.cat(tokens[:2])[None], attention_mask=mask, use_cache=False).logits[0][len(tokens[0]) :]
    assert (alone - after).norm() > 1e-2 * alone.norm()


@pytest.mark.parametrize("which", MODELS)
def test_layers_that_run_again_in_backward_have_the_plan(which: str) -> None:
    assert_as_expected(_on_all_ranks(which, lambda model: model.gradient_checkpointing_enable()), _expected(which))


def test_a_recurrent_module_that_fully_shard_has_wrapped_by_itself_runs_by_document() -> None:
    """fully_shard gives the module a class of its own, of another name. Here it has that class without the rest."""

    def prepare(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            kind = type(layer.self_attn)
            layer.self_attn.__class__ = type("FSDP" + kind.__name__, (kind,), {})

    assert_as_expected(_on_all_ranks("a sum over time", prepare), _expected("a sum over time"))


def test_a_layer_that_runs_again_without_its_plan_is_refused() -> None:
    def prepare(model: torch.nn.Module) -> None:
        layer = model.model.layers[0]
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    with pytest.raises(distca.InvalidArgumentError, match="a layer runs again in backward"):
        _on_all_ranks("linear attention", prepare)


@pytest.mark.parametrize("which", MODELS)
def test_two_halves_are_computed_as_one_row(which: str) -> None:
    found = _on_all_ranks(which, lambda model: hf.ping_pong(model), halves=True, use_cache=False)
    assert_as_expected(found, _expected(which))


def test_keywords_of_a_packed_row_do_not_reach_a_single_document() -> None:
    seen: list[set[str]] = []

    def prepare(model: torch.nn.Module) -> None:
        mixer = model.model.layers[0].linear_attn
        forward = mixer.forward

        def watch(*args: Any, **kwargs: Any) -> Any:
            seen.append(set(kwargs))
            return forward(*args, **kwargs)

        mixer.forward = watch

    assert_as_expected(
        _on_all_ranks("linear attention", prepare, seq_idx=None, cu_seq_lens_q=None), _expected("linear attention")
    )
    assert len(seen) == 3  # once on each rank
    assert not set.union(*seen) & {"seq_idx", "cu_seq_lens_q"}


def test_a_compiled_model_is_called_outside_of_graphs() -> None:
    entry, options = QWEN
    torch._dynamo.reset()
    model, tokens = tiny.model_of(entry, "distca", options).eval(), _tokens()
    plan = distca.plan(distca.Layout.from_documents([[40, 1]]), hf.heads_of(model.config, torch.float32))
    inputs = {"position_ids": plan.layout.position_ids(0)[None], "plan": plan, "use_cache": False}
    compiled = torch.compile(model, backend="eager")
    with loopback_group([plan]) as [context], torch.no_grad():
        found = compiled(torch.cat([tokens[3], tokens[2]])[None], **inputs, distca_context=context).logits[0]
        alone = [model(one[None], use_cache=False).logits[0] for one in (tokens[3], tokens[2])]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-4)


class _HybridCache:
    """A cache as some models of older transformers have: it derives from nothing."""

    state: torch.Tensor | None = None


class _KeepsState(torch.nn.Module):
    """A recurrence that goes on from the state in its cache. Its forward is decorated as in transformers 5.13."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = torch.nn.Conv1d(1, 1, 4)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._forward(*args, **kwargs)

    def _forward(self, hidden_states: torch.Tensor, cache_params: _HybridCache | None = None) -> torch.Tensor:
        sums = hidden_states.cumsum(dim=1)
        if cache_params is not None:
            sums = sums if cache_params.state is None else sums + cache_params.state
            cache_params.state = sums[:, -1:]
        return sums


def test_a_cache_of_a_models_own_does_not_hand_a_state_to_the_next_document() -> None:
    module, rows = _KeepsState(), torch.arange(8.0).view(1, 8, 1)
    assert is_recurrent(module)
    run_by_document(module, lambda: True)
    with distca.using(distca.plan(distca.Layout.from_documents([[5, 3]]), distca.Heads(1, 1, 8))):
        found = module(rows, cache_params=_HybridCache())
    assert torch.equal(found, torch.cat([part.cumsum(dim=1) for part in rows.split([5, 3], dim=1)], dim=1))


class _RunningSum(torch.nn.Module):
    """A recurrence that nothing in it tells from a module that computes row by row."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states.cumsum(dim=1)


def test_a_recurrent_layer_without_a_module_that_is_known_to_be_is_refused() -> None:
    entry, options = QWEN
    model = tiny.model_of(entry, "distca", options).eval()
    model.model.layers[0].linear_attn = _RunningSum()
    plan = distca.plan(distca.Layout.from_documents([[5, 3]]), hf.heads_of(model.config, torch.float32))
    inputs = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "position_ids": plan.layout.position_ids(0)[None]}
    refusal = pytest.raises(distca.InvalidArgumentError, match="1 layers that carry a state .* and only 0 modules")
    with loopback_group([plan]) as [context], torch.no_grad(), refusal:
        model(**inputs, plan=plan, distca_context=context)


def test_a_forward_that_was_replaced_after_the_first_call_is_refused() -> None:
    entry, options = QWEN
    model = tiny.model_of(entry, "distca", options).eval()
    plan = distca.plan(distca.Layout.from_documents([[5, 3]]), hf.heads_of(model.config, torch.float32))
    ids, positions = torch.ones(1, 8, dtype=torch.int64), plan.layout.position_ids(0)[None]
    with loopback_group([plan]) as [context], torch.no_grad():
        model(ids, position_ids=positions, plan=plan, distca_context=context)
        mixer = model.model.layers[0].linear_attn
        mixer.forward = functools.partial(type(mixer).forward, mixer)
        with pytest.raises(distca.InvalidArgumentError, match=r"layers\.0\.linear_attn .* its forward was replaced"):
            model(ids, position_ids=positions, plan=plan, distca_context=context)


def test_a_model_that_takes_plans_no_more_ignores_them() -> None:
    entry, options = QWEN
    model, ids = tiny.model_of(entry, "distca", options).eval(), _tokens()[3][None]
    plan = distca.plan(distca.Layout.from_documents([[30, 10]]), hf.heads_of(model.config, torch.float32))
    with loopback_group([plan]) as [context], torch.no_grad(), distca.using(plan, context=context):
        model(ids, position_ids=plan.layout.position_ids(0)[None])
        for one in (copy.deepcopy(model), model):  # the first as the reference of preference training
            one.set_attn_implementation("eager")
            expected = tiny.model_of(entry, "eager", options).eval()(ids, use_cache=False).logits
            assert torch.equal(one(ids, use_cache=False).logits, expected)
            assert one(ids[:, :30], use_cache=False).logits.shape[1] == 30


def test_a_model_that_had_a_plan_is_local_without_one_and_can_be_copied_and_saved() -> None:
    entry, options = QWEN
    model, ids = tiny.model_of(entry, "distca", options).eval(), _tokens()[3][None]
    plan = distca.plan(distca.Layout.from_documents([[30, 10]]), hf.heads_of(model.config, torch.float32))
    with loopback_group([plan]) as [context], torch.no_grad():
        before = model(ids, use_cache=False).logits
        positions = plan.layout.position_ids(0)[None]
        packed = model(ids, position_ids=positions, plan=plan, distca_context=context).logits
        assert torch.equal(model(ids, use_cache=False).logits, before)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[0].linear_attn.A_log.add_(1.0)
        assert not torch.equal(other(ids, position_ids=positions, plan=plan, distca_context=context).logits, packed)
        assert torch.equal(model(ids, position_ids=positions, plan=plan, distca_context=context).logits, packed)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(ids, position_ids=positions, plan=plan, distca_context=context).logits, packed)
        assert model.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize("which", MODELS)
def test_hooks_that_move_all_arguments_of_every_module_change_nothing(which: str) -> None:
    """accelerate has such hooks in models that are spread over devices."""

    def moved(value: Any) -> Any:
        return value.to("cpu") if hasattr(value, "to") else value

    def move(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}

    def prepare(model: torch.nn.Module) -> None:
        for module in model.modules():
            module.register_forward_pre_hook(move, with_kwargs=True)

    assert_as_expected(_on_all_ranks(which, prepare), _expected(which))


#: A part of a module that runs once for each document.
INNER = "model.layers.1.self_attn.out_proj"


def test_a_unit_of_fsdp_inside_of_a_recurrent_module_is_refused() -> None:
    """It would gather its weights once for each document, and ranks have different numbers of them."""

    def prepare(model: torch.nn.Module) -> None:
        inner = model.get_submodule(INNER)
        inner.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})  # as fully_shard does

    with pytest.raises(distca.InvalidArgumentError, match=r"layers\.1\.self_attn\.out_proj is a unit of FSDP inside"):
        _on_all_ranks("a sum over time", prepare)


def test_a_module_of_zero_3_inside_of_a_recurrent_module_is_refused() -> None:
    """ZeRO-3 gathers the weights of each module on its own, and marks the module. A whole layer may be gathered."""

    def prepare(model: torch.nn.Module, gathered: str) -> None:
        model.get_submodule(gathered).ds_id = 7  # as deepspeed.initialize does

    with pytest.raises(distca.InvalidArgumentError, match=r"self_attn\.out_proj is gathered by DeepSpeed's ZeRO-3"):
        _on_all_ranks("a sum over time", lambda model: prepare(model, INNER))
    _on_all_ranks("a sum over time", lambda model: prepare(model, "model.layers.1"))


@pytest.mark.parametrize("has_unit", [False, True], ids=["a plain module", "a module with a unit of FSDP"])
def test_a_module_whose_functions_were_replaced_runs_once_for_each_document(
    has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a library that brings kernels of its own after the model was prepared."""
    entry, options = QWEN
    model, tokens = tiny.model_of(entry, "distca", options).eval(), _tokens()
    [module] = examine(model).recurrent.values()
    if not looks_by_functions(module):
        pytest.skip("this version of transformers has no such functions")
    file = importlib.import_module(type(model).__module__)
    for name in module._distca_functions:
        monkeypatch.setattr(file, name, getattr(file, name).__wrapped__)
    if has_unit:
        module.out_proj.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    plan = distca.plan(distca.Layout.from_documents([[40, 1]]), hf.heads_of(model.config, torch.float32))
    inputs = {"position_ids": plan.layout.position_ids(0)[None], "plan": plan, "use_cache": False}
    with loopback_group([plan]) as [context], torch.no_grad():
        ids = torch.cat([tokens[3], tokens[2]])[None]
        if has_unit:
            with pytest.raises(
                distca.InvalidArgumentError, match=r"out_proj is a unit of FSDP inside of a module that"
            ):
                model(ids, **inputs, distca_context=context)
            return
        found = model(ids, **inputs, distca_context=context).logits[0]
        alone = [model(one[None], use_cache=False).logits[0] for one in (tokens[3], tokens[2])]
    assert not looks_by_functions(module)
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("which", "checkpoints"), [("functions", False), ("functions", True), ("forward", False)])
def test_a_module_in_which_others_have_replaced_something_is_trained(
    which: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a library that brings kernels, or a forward, of its own: the latter before the model is prepared."""
    entry, options = QWEN
    model, tokens = tiny.model_of(entry, "distca", options).train(), _tokens()
    file = importlib.import_module(type(model).__module__)
    if checkpoints:
        model.gradient_checkpointing_enable()
    if which == "forward":
        module = model.model.layers[0].linear_attn
        used = inspect.unwrap(type(module).forward)
        known = {name: inspect.unwrap(f) if hasattr(f, "_distca_along") else f for name, f in vars(file).items()}
        other = types.FunctionType(used.__code__, known, closure=used.__closure__, argdefs=used.__defaults__)
        module.forward = functools.partial(other, module)
    else:
        [module] = examine(model).recurrent.values()
        for name in module._distca_functions:
            monkeypatch.setattr(file, name, inspect.unwrap(getattr(file, name)))
    plan = distca.plan(distca.Layout.from_documents([[*map(len, tokens)]]), hf.heads_of(model.config, torch.float32))
    targets = torch.cat([torch.cat([one[1:], torch.tensor([-100])]) for one in tokens])
    inputs = {"position_ids": plan.layout.position_ids(0)[None], "plan": plan, "use_cache": False}
    with loopback_group([plan]) as [context]:
        loss = loss_of(model(torch.cat(tokens)[None], **inputs, distca_context=context).logits[0], targets)
        loss.backward()
    assert_as_expected((loss.item(), gradients(model)), _expected("linear attention"))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("which", MODELS)
def test_a_step_without_a_plan_may_follow_one_with_a_plan(which: str, reentrant: bool) -> None:
    """Its layers run again in backward without a plan, as they have run forward."""
    entry, options = MODELS[which]
    model, ids = tiny.model_of(entry, "distca", options).train(), _tokens()[3][None]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plan = distca.plan(distca.Layout.from_documents([[40]]), hf.heads_of(model.config, torch.float32))
    with loopback_group([plan]) as [context]:
        positions = plan.layout.position_ids(0)[None]
        model(ids, position_ids=positions, plan=plan, distca_context=context).logits.sum().backward()
        expected = gradients(model)
        model.zero_grad()
        model(ids, use_cache=False).logits.sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_a_model_without_a_plan_is_compiled_into_one_graph() -> None:
    """The functions of its file are others from the first model on that is prepared for plans."""
    entry, options = QWEN
    examine(tiny.model_of(entry, "distca", options))
    model, ids = tiny.model_of(entry, "eager", options).eval(), _tokens()[3][None]
    torch._dynamo.reset()
    compiled = torch.compile(model.model.layers[0].linear_attn, backend="eager", fullgraph=True)
    with torch.no_grad():
        rows = model.model.embed_tokens(ids)
        torch.testing.assert_close(compiled(rows), model.model.layers[0].linear_attn(rows))


def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(hidden_states, (weight.shape[-1] - 1, 0)), weight)


def renamed_scan(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states.cumsum(dim=1)


class Qwen3NextGatedDeltaNet(torch.nn.Module):
    """A module of a known name, whose recurrence has another name, as in a version of transformers yet to come."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = torch.nn.Conv1d(3, 3, 2, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return renamed_scan(causal_conv1d_fn(hidden_states.mT, self.conv1d.weight).mT)


def _shifted(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class that derives from a recurrent one, and adds to each row the one before it."""

    class Shifted(kind):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(hidden_states + F.pad(hidden_states, (0, 0, 1, -1)), *args, **kwargs)

    return Shifted


@pytest.mark.parametrize("which", ["another name", "another forward"])
def test_a_module_that_looks_along_rows_in_ways_that_are_not_known_runs_once_for_each_document(which: str) -> None:
    if which == "another name":
        module, width = Qwen3NextGatedDeltaNet(), 3
    else:
        model = tiny.model_of(QWEN[0], "distca", QWEN[1]).eval()
        module, width = model.model.layers[0].linear_attn, model.config.hidden_size
        module.__class__ = _shifted(type(module))
    rows = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.cat([module(part) for part in rows.split([5, 3], dim=1)], dim=1)
        run_by_document(module, lambda: True)
        with distca.using(distca.plan(distca.Layout.from_documents([[5, 3]]), distca.Heads(1, 1, 8))):
            torch.testing.assert_close(module(rows), expected)


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(
    ("shape", "said"), [((2, 8), "batch size is 2, must be 1"), ((1, 9), "9 rows but the plan was made for 8 rows")]
)
def test_what_a_recurrent_layer_refuses_on_one_rank_is_told_to_its_peer_at_once(
    which: str, shape: tuple[int, int], said: str
) -> None:
    entry, options = MODELS[which]
    models = [tiny.model_of(entry, "distca", options).train() for _ in range(2)]
    layout = distca.Layout.from_documents([[6], [8]])
    config = models[0].config
    plans = distca.plans(layout, hf.heads_of(config, torch.float32), windows=hf.windows_of(config))

    def work(rank: int, context: distca.Context) -> None:
        ids = torch.ones(shape if rank else (1, 6), dtype=torch.int64)
        positions = torch.arange(ids.shape[1])[None]
        models[rank](ids, position_ids=positions, plan=plans.for_rank(rank), distca_context=context, use_cache=False)

    with loopback_group([*plans.values()], timeout=20.0) as contexts:
        ours, theirs = outcomes(contexts, work)
    assert isinstance(theirs, distca.InvalidArgumentError) and said in str(theirs), theirs
    assert isinstance(ours, distca.PeerLeftError) and "rank 1" in str(ours) and said in str(ours), ours
