"""The wrappers that people put around a model: torch.compile, activation checkpointing, autocast, FSDP2, gradient
accumulation.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distca
from support.groups import loopback_group, on_all_ranks
from support.ranks import launch

HEADS = distca.Heads(q=4, kv=2, dim=16)
LAYOUT = distca.Layout.packed([100, 31, 5, 60], ranks=2, tokens_per_rank=98)
ROWS = 98


class Layer(torch.nn.Module):
    """A residual attention layer."""

    def __init__(self, context: distca.Context | str) -> None:
        super().__init__()
        self.context = context
        self.qkv = torch.nn.Linear(64, 8 * HEADS.dim)
        self.out = torch.nn.Linear(4 * HEADS.dim, 64)

    def forward(self, x: torch.Tensor, plan: distca.Plan) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 8, HEADS.dim).split([4, 2, 2], 1)
        return x + self.out(distca.core_attention(q, k, v, plan, context=self.context)[0].flatten(1))


class Model(torch.nn.Module):
    def __init__(self, context: distca.Context | str = "default") -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(context) for _ in range(2)])

    def forward(self, x: torch.Tensor, plan: distca.Plan) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, plan)
        return x


def _seeded_model(context: distca.Context | str = "default") -> Model:
    torch.manual_seed(0)
    return Model(context)


def _rows(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2 * seed + rank))


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def alone() -> Iterator[distca.Plan]:
    with distca.init(max_tokens=128, heads=HEADS):
        yield distca.plan(distca.Layout.from_documents([[70, 28]]), HEADS)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_is_one_graph_and_a_new_plan_of_its_size_does_not_recompile(
    backend: str, alone: distca.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = _seeded_model()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    graphs = []
    for lengths in ([70, 28], [98], [3, 95], [49, 49]):
        plan = distca.plan(distca.Layout.from_documents([lengths]), HEADS)
        x, y = (_rows(0).requires_grad_() for _ in range(2))
        expected, found = model(x, plan), compiled(y, plan)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-4)
        graphs.append((plan.tensor.numel(), counter.frame_count))
    sizes = len({size for size, _ in graphs})
    assert graphs[-1][1] <= min(sizes, 2), graphs


def test_layers_that_name_themselves_share_a_compiled_graph(alone: distca.Plan) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    q, (k, v) = torch.randn(98, 4, 16, requires_grad=True), torch.randn(2, 98, 2, 16)

    def layer(x: torch.Tensor, index: int) -> torch.Tensor:
        return distca.core_attention(x, k, v, alone, layer=index)[0]

    compiled, x, y = torch.compile(layer, fullgraph=True, backend=counter), q, q
    for index in range(4):
        x, y = layer(x, index), compiled(y, index)
    assert torch.equal(x, y)
    assert counter.frame_count == 1


def _on_two_ranks(work: Callable[[distca.Context, distca.Plan], object]) -> list:
    plan = distca.plan(LAYOUT, HEADS, tolerance=0.01)
    with loopback_group(plan, heap_bytes=1 << 24) as contexts:
        return on_all_ranks(contexts, lambda rank, context: work(context, plan.for_rank(rank)))


@pytest.mark.parametrize(("options", "steps"), [({}, 6), ({"context_fn": distca.save_core_attention}, 4)])
def test_checkpointing_gives_the_same_bits_and_runs_attention_again_only_where_it_is_not_saved(
    options: dict, steps: int
) -> None:
    lock = threading.Lock()

    def work(context: distca.Context, plan: distca.Plan) -> None:
        with lock:
            model = _seeded_model(context)
        gradients, taken = [], []
        for checkpointed in (False, True):
            model.zero_grad()
            before = context.step
            x = _rows(context.rank).requires_grad_()
            y = x
            for layer in model.layers:
                y = checkpoint(layer, y, plan, use_reentrant=False, **options) if checkpointed else layer(y, plan)
            y.square().sum().backward()
            gradients.append([x.grad, *_gradients(model)])
            taken.append(context.step - before)
        assert taken == [4, steps]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    _on_two_ranks(work)


def test_a_reentrant_checkpoint_may_return_lse_that_nobody_uses() -> None:
    heads = distca.Heads(q=4, kv=2, dim=16)
    with distca.init(max_tokens=64, heads=heads):
        plan = distca.plan(distca.Layout.from_documents([[64]]), heads)
        inputs = [torch.randn(64, n, 16) for n in (4, 2, 2)]
        for function in (lambda *qkv: distca.core_attention(*qkv, plan), distca.attention):
            gradients = []
            for checkpointed in (False, True):
                q, k, v = (t.clone().requires_grad_() for t in inputs)
                out, _ = checkpoint(function, q, k, v, use_reentrant=True) if checkpointed else function(q, k, v)
                out.sum().backward()
                gradients.append([q.grad, k.grad, v.grad])
            assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_autocast_casts_q_k_and_v_and_without_it_different_dtypes_are_an_error() -> None:
    heads = distca.Heads(q=4, kv=2, dim=16, dtype=torch.bfloat16)
    with distca.init(max_tokens=64, heads=heads):
        plan = distca.plan(distca.Layout.from_documents([[64]]), heads)
        q = torch.randn(64, 4, 16, requires_grad=True)
        k, v = torch.randn(64, 2, 16), torch.randn(64, 2, 16, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = distca.core_attention(q, k, v, plan)
        assert out.dtype == torch.bfloat16
        expected, _ = distca.core_attention(q.bfloat16(), k.bfloat16(), v, plan)
        assert torch.equal(out, expected)
        out.sum().backward()
        assert q.grad is not None and q.grad.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(distca.attention(q, k, v)[0], expected)
        with pytest.raises(distca.InvalidArgumentError, match="float32, float32, bfloat16"):
            distca.core_attention(q, k, v, plan)


def _plan_of(seed: int) -> distca.Plan:
    lengths = [[60 + seed, 38 - seed], [98 - 10 * seed, 10 * seed]] if seed else [[98], [50, 48]]
    return distca.plan(distca.Layout.from_documents(lengths), HEADS, tolerance=0.01)


def _wrapped_gradients(wrapper: str, transport: str) -> list[torch.Tensor]:
    """Gradients of two accumulated micro-batches on this rank, averaged over ranks by the wrapper."""
    with distca.init(transport=transport, max_tokens=ROWS, heads=HEADS, timeout=60):
        model: torch.nn.Module = _seeded_model()
        if wrapper == "fsdp2":
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        for seed in range(2):
            model(_rows(dist.get_rank(), seed), _plan_of(seed).for_rank(dist.get_rank())).square().sum().backward()
        gradients = [p.grad.full_tensor() if wrapper == "fsdp2" else p.grad.clone() for p in model.parameters()]
    del model
    return gradients


@pytest.mark.parametrize(("wrapper", "transport"), [("fsdp2", "shm"), ("ddp", "shm"), ("ddp", "torch")])
def test_accumulated_gradients_under_a_wrapper_are_the_mean_of_those_without(wrapper: str, transport: str) -> None:
    found = launch(_wrapped_gradients, wrapper, transport, ranks=2)

    def work(context: distca.Context, _: distca.Plan) -> list[torch.Tensor]:
        model = models[context.rank]
        for seed in range(2):
            model(_rows(context.rank, seed), _plan_of(seed).for_rank(context.rank)).square().sum().backward()
        return _gradients(model)

    models = {rank: _seeded_model() for rank in range(2)}

    def with_context(context: distca.Context, plan: distca.Plan) -> list[torch.Tensor]:
        for layer in models[context.rank].layers:
            layer.context = context
        return work(context, plan)

    plain = _on_two_ranks(with_context)
    for rank in range(2):
        for mine, a, b in zip(found[rank], *plain, strict=True):
            assert (mine - (a + b) / 2).norm() <= 1e-5 * mine.norm()
