"""Wrong plans, tensors and calls: a clear error before anything moves, and a context that works on where all refuse.

Faults between ranks, which poison the context, are in test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import distca
from distca import _C
from support.batches import Batch, random_batch, rows_of_rank, spill
from support.groups import compute, loopback_group, on_all_ranks, outcomes, run_step, together
from support.oracle import oracle
from support.plan_reader import (
    SLOT_BYTES_WORD,
    TABLES,
    GroupEntry,
    RankDigest,
    Send,
    TaskEntry,
    digest,
    made_alike,
    read_slice,
    with_checksum,
    with_digests,
)

HEADS = distca.Heads(4, 2, 16, 24)
LENGTHS = (100, 3, 64)
LAYOUT = spill(LENGTHS, 2)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _plan(layout: distca.Layout = LAYOUT, heads: distca.Heads = HEADS, **options: object) -> distca.Plan:
    return distca.plan(layout, heads, **({"tolerance": 0.0, "min_rows": 1} | options))  # type: ignore[arg-type]


class Group:
    """Two ranks, a good plan, and a check that they still compute."""

    def __init__(self, contexts: list[distca.Context], plan: distca.Plan) -> None:
        self.contexts, self.plan = contexts, plan
        self.batch: Batch = random_batch(LENGTHS, HEADS, 1)
        self.reference = oracle(self.batch)

    def inputs(self, rank: int = 0) -> Tensors:
        q, k, v = (rows_of_rank(self.batch, LAYOUT, rank, t) for t in (self.batch.q, self.batch.k, self.batch.v))
        return q, k, v

    def attend(self, inputs: Tensors, plan: distca.Plan, **options: object) -> None:
        mine, other = (context._core for context in self.contexts)
        try:
            distca.core_attention(*inputs, plan, context=self.contexts[0], **options)  # type: ignore[arg-type]
        finally:
            while other.num_calls < mine.num_calls:  # a refused call is one of all ranks
                other.refuse("as on rank 0")

    def check_still_works(self) -> None:
        assert [context.step for context in self.contexts] == [0, 0], "a refused call took a step"
        results = on_all_ranks(self.contexts, lambda rank, context: run_step(self.batch, self.plan, context))
        for a, b in zip(together(LENGTHS, LAYOUT, results), self.reference, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def group() -> Iterator[Group]:
    plan = _plan()
    with loopback_group(plan, timeout=20.0) as contexts:
        yield Group(contexts, plan)


def _with_tensor(plan: distca.Plan, tensor: torch.Tensor) -> distca.Plan:
    """A plan object whose tensor is another one."""
    changed = plan.for_rank(plan.rank)
    changed.tensor = tensor  # type: ignore[misc]
    return changed


def _altered(plan: distca.Plan, words: list[int]) -> distca.Plan:
    return _with_tensor(plan, torch.tensor(words, dtype=torch.int64))


# ---- plans ----

WRONG_PLANS: dict[str, tuple[Callable[[], distca.Plan], list[str]]] = {
    "another layout": (lambda: _plan(spill((90, 3, 40), 2)), ["another layout", "67 rows", "84"]),
    "more ranks": (lambda: _plan(spill(LENGTHS, 3)), ["3 ranks", "has 2"]),
    "another rank's slice": (lambda: _plan().for_rank(1), ["slice of rank 1", "this is rank 0", "for_rank(0)"]),
    "another dtype": (
        lambda: _plan(heads=distca.Heads(4, 2, 16, 24, torch.bfloat16)), ["bfloat16", "float32"]
    ),
    "another head count": (lambda: _plan(heads=distca.Heads(8, 2, 16, 24)), ["8 query heads", "4 query heads"]),
    "other key heads": (lambda: _plan(heads=distca.Heads(4, 4, 16, 24)), ["4 key/value heads", "2 key/value heads"]),
    "another dim": (lambda: _plan(heads=distca.Heads(4, 2, 32, 24)), ["dim 32", "dim 16"]),
    "another value dim": (lambda: _plan(heads=distca.Heads(4, 2, 16, 32)), ["values 32", "values 24"]),
    "another cost model": (lambda: _plan(cost=distca.CostModel(1, 1)), ["another cost model"]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_PLANS)
@pytest.mark.parametrize("argument", ["plan", "plan_backward"])
def test_a_plan_for_something_else_is_refused_before_anything_moves(group: Group, wrong: str, argument: str) -> None:
    make, said = WRONG_PLANS[wrong]
    with pytest.raises(distca.InvalidArgumentError) as caught:
        if argument == "plan":
            group.attend(group.inputs(), make())
        else:
            group.attend(group.inputs(), group.plan, plan_backward=make())
    for words in said:
        assert words in str(caught.value)
    group.check_still_works()


@pytest.mark.parametrize(
    "thing", [None, 3, "plan", torch.zeros(128, dtype=torch.int64)], ids=["None", "3", "str", "tensor"]
)
def test_what_is_not_a_plan_is_refused(group: Group, thing: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=rf"plan is a {type(thing).__name__}; a distca\.Plan"):
        group.attend(group.inputs(), thing)  # type: ignore[arg-type]
    if thing is not None:
        with pytest.raises(distca.InvalidArgumentError, match=rf"plan_backward is a {type(thing).__name__}"):
            group.attend(group.inputs(), group.plan, plan_backward=thing)
    group.check_still_works()


def test_a_plan_that_needs_more_than_the_context_has_is_refused_with_the_bytes_needed() -> None:
    plan = _plan()
    needed = plan.stats.slot_bytes
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, heap_bytes=2 * (needed - 64)) as contexts:
        small = _plan(balance=False, layout=distca.Layout.from_documents([[84], [83]]))
        q, k, v = (rows_of_rank(batch, LAYOUT, 0, t) for t in (batch.q, batch.k, batch.v))
        with pytest.raises(distca.CapacityError, match=rf"{needed} bytes.*heap_bytes >= {2 * needed}"):
            distca.core_attention(q, k, v, plan, context=contexts[0])
        distca.core_attention(q, k, v, small, context=contexts[0])
    with loopback_group(plan, heap_bytes=2 * needed) as contexts:
        on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))


def test_planning_reads_the_context_that_it_is_given_and_no_other() -> None:
    needed, cost = _plan().stats.slot_bytes, distca.CostModel(1, 40)
    with (
        loopback_group(_plan(), heap_bytes=2 * (needed - 64), cost=cost) as contexts,
        distca.init(max_tokens=1, heads=HEADS, heap_bytes=128, cost=cost),
    ):
        alone = _plan()
        assert (alone.rank, alone.stats.slot_bytes) == (0, needed)
        for context in contexts:
            for named in (context, context.name):
                plan = _plan(context=named)
                assert plan.rank == context.rank and plan.stats.slot_bytes <= needed - 64
                assert plan.digest == _plan(cost=cost, capacity=needed - 64).digest != alone.digest
        last = _plan(context=contexts[-1], rank=0, capacity=needed, cost=distca.CostModel())
        assert torch.equal(last.tensor, _plan(capacity=needed).tensor)
        with pytest.raises(distca.InvalidArgumentError, match="is of 2 ranks, context .default. of 1; give a layout"):
            _plan(context="default")
    with pytest.raises(distca.InvalidArgumentError, match="there is no context 'default'; distca.init makes one"):
        _plan(context="default")
    with pytest.raises(distca.InvalidArgumentError, match="context is a int; a distca.Context, or the name of one"):
        _plan(context=3)


# ---- plan tensors ----


def test_a_flipped_word_anywhere_in_a_plan_is_noticed(group: Group) -> None:
    words = group.plan.tensor.tolist()
    used = read_slice(words).header.num_words
    inputs = group.inputs()
    for index in range(used):
        for bit in (0, 17, 63):
            flipped = words[index] ^ (1 << bit)
            changed = [*words[:index], flipped - 2**64 if flipped >= 2**63 else flipped, *words[index + 1 :]]
            if bit == 63:
                changed[index] = words[index] ^ -(2**63)
            with pytest.raises(distca.PlanFormatError):
                group.attend(inputs, _altered(group.plan, changed))
    group.check_still_works()


def test_a_truncated_plan_is_noticed_at_every_length(group: Group) -> None:
    tensor = group.plan.tensor
    used = read_slice(tensor.tolist()).header.num_words
    inputs = group.inputs()
    for length in range(used):
        with pytest.raises(distca.PlanFormatError):
            group.attend(inputs, _with_tensor(group.plan, tensor[:length].clone()))
    group.check_still_works()


@pytest.mark.parametrize("version", [0, 3, 5, -1])
def test_a_plan_of_another_format_version_is_refused_with_both_versions(group: Group, version: int) -> None:
    words = group.plan.tensor.tolist()
    with pytest.raises(distca.PlanFormatError, match=rf"version is {version}, this library reads 4"):
        group.attend(group.inputs(), _altered(group.plan, with_checksum([words[0], version, *words[2:]])))
    group.check_still_works()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.to(torch.int32), "int64"),
        (lambda t: t.repeat_interleave(2)[::2], "contiguous"),
        (lambda t: t.double(), "int64"),
    ],
    ids=["int32", "strided", "double"],
)
def test_a_plan_tensor_of_another_form_is_refused(
    group: Group, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        group.attend(group.inputs(), _with_tensor(group.plan, change(group.plan.tensor)))
    group.check_still_works()


def test_the_checksum_is_what_an_independent_reader_computes() -> None:
    for rank in (0, 1):
        words = _plan().for_rank(rank).tensor.tolist()
        assert digest(words[4 : words[2]]) == words[3]
        _C.validate_plan(torch.tensor(with_checksum(words)).numpy())


def _offset_words(words: list[int]) -> list[int]:
    """Indices of all words of a slice that are rows, counts or offsets: those of the tables."""
    header_words = len(read_slice(words).header) + 24
    return list(range(header_words, words[2]))


@pytest.mark.parametrize("value", [2**62, -(2**62), 2**31 + 1, 2**46, -(2**33)])
def test_an_offset_far_outside_is_never_accepted_even_with_digests_that_match(value: int) -> None:
    """Except in words that are names, not addresses: documents, and rows at the home of a task's rows."""
    accepted = []
    slices = [_plan(retain_bytes=retain).for_rank(rank) for retain in (0, 2**40) for rank in (0, 1)]
    for number, plan in enumerate(slices):
        words = plan.tensor.tolist()
        for index in _offset_words(words):
            changed = with_digests([*words[:index], value, *words[index + 1 :]])
            try:
                _C.validate_plan(torch.tensor(changed).numpy())
            except distca.PlanFormatError:
                continue
            accepted.append((number, index))
    assert any(plan.retained_bytes for plan in slices)
    for number, index in accepted:
        assert _is_no_address(slices[number].tensor.tolist(), index), f"word {index} of slice {number} took {value}"


def _is_no_address(words: list[int], index: int) -> bool:
    """Whether the word is one that a step never uses as a row or an offset."""
    tables = read_slice(words)
    for table, kind in enumerate(TABLES):
        begin, count = words[len(tables.header) + 2 * table :][:2]
        if not begin <= index < begin + count * len(kind._fields):
            continue
        row, column = divmod(index - begin, len(kind._fields))
        field = kind._fields[column]
        if kind is TaskEntry:  # where the rows are on their own rank
            return field == "home_row" and tables.tasks[row].home != tables.header.rank
        return kind is RankDigest or (kind is GroupEntry and field == "document")
    return False


def test_an_altered_target_outside_the_peer_s_slot_is_refused_when_it_would_be_written() -> None:
    """A slice does not know its peer's arena; the put does know the size of its slot. All digests are made to match."""
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)
    words = plan.tensor.tolist()
    sends_begin = words[len(read_slice(words).header) + 2 * 6]
    sends = read_slice(words).sends[0]
    index = next(i for i, send in enumerate(sends) if send.peer == 1)
    words[sends_begin + len(Send._fields) * index + Send._fields.index("target")] = words[SLOT_BYTES_WORD]
    altered = _altered(plan, with_digests(words))
    other = _altered(plan.for_rank(1), made_alike(plan.for_rank(1).tensor.tolist(), altered.tensor.tolist()))
    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(
            contexts,
            lambda rank, context: distca.core_attention(
                *(rows_of_rank(batch, LAYOUT, rank, t) for t in (batch.q, batch.k, batch.v)),
                altered if rank == 0 else other,
                context=context,
            ),
        )
    assert isinstance(results[0], distca.PlanFormatError) and "does not fit into rank 1's arena" in str(results[0])
    assert isinstance(results[1], distca.PeerLeftError) and "rank 0 abandoned" in str(results[1])


# ---- tensors ----

WRONG_TENSORS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors], list[str]]] = {
    "q shorter": (lambda q, k, v: (q[:-1], k, v), ["different lengths", "[83, 4, 16]", "[84, 2, 16]"]),
    "k shorter": (lambda q, k, v: (q, k[:-1], v), ["different lengths", "[83, 2, 16]"]),
    "v shorter": (lambda q, k, v: (q, k, v[:-1]), ["different lengths", "[83, 2, 24]"]),
    "all shorter": (lambda q, k, v: (q[:-1], k[:-1], v[:-1]), ["another layout", "84 rows", "83"]),
    "no rows": (lambda q, k, v: (q[:0], k[:0], v[:0]), ["another layout", "84 rows", "0"]),
    "k another dtype": (lambda q, k, v: (q, k.bfloat16(), v), ["different dtypes", "float32, bfloat16, float32"]),
    "v another dtype": (lambda q, k, v: (q, k, v.bfloat16()), ["different dtypes", "float32, float32, bfloat16"]),
    "float64": (lambda q, k, v: (q.double(), k.double(), v.double()), ["float32, bfloat16 and float16 are supported"]),
    "float16": (lambda q, k, v: (q.half(), k.half(), v.half()), ["plan was made for", "float32", "float16"]),
    "integers": (lambda q, k, v: (q.long(), k.long(), v.long()), ["float32, bfloat16 and float16 are supported"]),
    "q on another device": (lambda q, k, v: (q.to("meta"), k, v), ["device"]),
    "k on another device": (lambda q, k, v: (q, k.to("meta"), v), ["device"]),
    "v on another device": (lambda q, k, v: (q, k, v.to("meta")), ["device"]),
    "k another dim": (lambda q, k, v: (q, k[..., :8], v), ["different head dims", "[84, 2, 8]"]),
    "v another head count": (lambda q, k, v: (q, k, v[:, :1]), ["different head counts", "[84, 1, 24]"]),
    "odd head counts": (lambda q, k, v: (q[:, :3], k, v), ["q has 3 heads, k has 2"]),
    "no key heads": (lambda q, k, v: (q, k[:, :0], v[:, :0]), ["k has 0"]),
    "dim of 12": (lambda q, k, v: (q[..., :12], k[..., :12], v), ["head dim 12", "multiples of 8"]),
    "wider value dim": (lambda q, k, v: (q, k, torch.cat([v, v[..., :8]], 2)), ["values 24", "values 32"]),
    "q last stride": (lambda q, k, v: (q.repeat(1, 1, 2)[..., ::2], k, v), ["q:", "contiguous", "stride is 2"]),
    "k last stride": (lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), ["k:", "contiguous"]),
    "v last stride": (lambda q, k, v: (q, k, v[..., :1].expand(-1, -1, 24)), ["v:", "contiguous", "stride is 0"]),
    "a batch dimension": (lambda q, k, v: (q[None], k[None], v[None]), ["q", "[tokens, heads, dim]"]),
    "no head dimension": (lambda q, k, v: (q[:, 0], k[:, 0], v[:, 0]), ["q", "[tokens, heads, dim]"]),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused_before_anything_moves(group: Group, wrong: str) -> None:
    change, said = WRONG_TENSORS[wrong]
    with pytest.raises(distca.InvalidArgumentError) as caught:
        group.attend(change(*group.inputs()), group.plan)
    for words in said:
        assert words in str(caught.value)
    group.check_still_works()


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_refused(group: Group, scale: float) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="scale = "):
        group.attend(group.inputs(), group.plan, scale=scale)
    group.check_still_works()


def test_mixed_devices_are_refused_by_the_local_operator_too() -> None:
    q, k, v = torch.zeros(5, 2, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    for inputs in ((q.to("meta"), k, v), (q, k.to("meta"), v), (q, k, v.to("meta"))):
        with pytest.raises(distca.InvalidArgumentError, match="device"):
            distca.attention(*inputs)


# ---- contexts ----


def test_a_context_that_is_not_there_is_refused_with_those_that_are(group: Group) -> None:
    with pytest.raises(distca.InvalidArgumentError, match='no context "nobody".*distca.init.*"loopback/'):
        distca.core_attention(*group.inputs(), group.plan, context="nobody")
    with pytest.raises(distca.InvalidArgumentError, match='no context "default"'):
        distca.core_attention(*group.inputs(), group.plan)
    group.check_still_works()


def test_a_closed_context_is_refused_and_may_be_closed_again() -> None:
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan) as contexts:
        inputs = [rows_of_rank(batch, LAYOUT, 0, t) for t in (batch.q, batch.k, batch.v)]
        contexts[0].close()
        contexts[0].close()
        with pytest.raises(distca.InvalidArgumentError, match=f'no context "{contexts[0].name}"'):
            distca.core_attention(*inputs, plan, context=contexts[0])


def test_a_name_in_use_is_refused_until_it_is_closed() -> None:
    with distca.init(max_tokens=8, heads=HEADS, name="taken") as first:
        with pytest.raises(distca.InvalidArgumentError, match="'taken' exists already"):
            distca.init(max_tokens=8, heads=HEADS, name="taken")
        assert distca.get_context("taken") is first
    with distca.init(max_tokens=8, heads=HEADS, name="taken") as second:
        assert distca.get_context("taken") is second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heap_bytes": 0}, "heap_bytes = 0"),
        ({"heap_bytes": 127}, "heap_bytes = 127; at least 128"),
        ({"heap_bytes": -5}, "heap_bytes = -5"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"timeout": 0.0}, "timeout = 0"),
        ({"timeout": -1.0}, "timeout = -1"),
        ({"timeout": float("nan")}, "timeout = nan"),
        ({"transport": "carrier pigeon"}, "'carrier pigeon'; one of auto, shm, torch, cuda-ipc, nvshmem, loopback"),
        ({"cost": distca.CostModel(0, 0)}, "not both 0"),
    ],
    ids=str,
)
def test_arguments_of_init_out_of_range_are_refused(options: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"max_tokens": 8, "heads": HEADS, "name": "refused"}
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.init(**(arguments | options))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert distca.get_context("refused") is None


def test_the_smallest_heap_that_is_accepted_serves_a_rank_alone() -> None:
    plan = distca.plan(distca.Layout.from_documents([LENGTHS]), HEADS)
    batch = random_batch(LENGTHS, HEADS, 1)
    with distca.init(max_tokens=8, heads=HEADS, heap_bytes=128, name="small") as context:
        assert context.slot_bytes == 64
        ours = run_step(batch, plan, context)
    for a, b in zip(ours, compute(batch, plan), strict=True):
        assert torch.equal(a, b)
