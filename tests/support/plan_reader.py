"""A second reader of plan tensors, written from the description of the tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import distca

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93

FORWARD, BACKWARD = 0, 1
IN, OUT = 0, 1
TENSORS = ("q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv", "dk_partial", "dv_partial")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = ("causal", "full")
RETURNED, ARENA, PARTIAL, ADDED = 0, 1, 2, 3
COPY, ASSIGN, ADD, FINISH = 0, 1, 2, 3
Range = tuple[int, int]  # begin and end; the end is excluded
SLOT_BYTES_WORD = 21
CHECKSUM_BEGIN = 4
FIRST_MADE = 30  # the first word that says how the plan was made: such words are in the checksum and in no digest


def digest(*lists: Sequence[int]) -> int:
    """The 64-bit digest of lists of words, as a signed word.

    The words are spread over eight chains. The first chain also has the lists' lengths.
    """
    chains = list(range(8))

    def step(i: int, word: int) -> None:
        x = chains[i] ^ (word & MASK)
        chains[i] = (x << 29 | x >> 35) * MULTIPLIER & MASK

    for words in lists:
        step(0, len(words))
        for i, word in enumerate(words):
            step(i % 8, word)
    state = GOLDEN
    for x in chains:
        x ^= state
        x = (x ^ (x >> 32)) * MULTIPLIER & MASK
        x = (x ^ (x >> 32)) * MULTIPLIER & MASK
        state = ((x ^ (x >> 32)) + GOLDEN) & MASK
    return state - 2**64 if state >= 2**63 else state


def with_checksum(words: Sequence[int]) -> list[int]:
    """The words with a checksum that matches them."""
    return [*words[:3], digest(words[CHECKSUM_BEGIN : words[2]]), *words[4:]]


def with_digests(words: Sequence[int]) -> list[int]:
    """The words with the digests of tables and plan and the checksum made to match them.

    The words must still say where the tables are.
    """
    changed = list(words)
    number = len(Header._fields)
    spans = [changed[number + 2 * i :][:2] for i in range(len(TABLES))]
    tables = [
        changed[begin : begin + count * len(kind._fields)] for (begin, count), kind in zip(spans, TABLES, strict=True)
    ]
    own = [table for kind, table in zip(TABLES, tables, strict=True) if kind not in (RankDigest, Block)]
    first_own = Header._fields.index("rank")
    at = spans[0][0] + changed[first_own]
    if spans[0][0] <= at < spans[0][0] + spans[0][1]:
        changed[at] = digest(changed[first_own:FIRST_MADE], *own)
    rank_digests = changed[spans[0][0] : spans[0][0] + spans[0][1]]
    changed[4] = digest(changed[1:2], changed[5:first_own], rank_digests)
    return with_checksum(changed)


def with_tensor(plan: distca.Plan, tensor: torch.Tensor) -> distca.Plan:
    """A copy of a plan with another tensor."""
    changed = plan.for_rank(plan.rank)
    changed.tensor = tensor  # type: ignore[misc]
    return changed


def with_words(plan: distca.Plan, words: Sequence[int]) -> distca.Plan:
    """A copy of a plan whose tensor has these words."""
    return with_tensor(plan, torch.tensor(list(words), dtype=torch.int64))


def made_alike(words: Sequence[int], changed: Sequence[int]) -> list[int]:
    """Another rank's slice, made to match a changed slice: it gets the digest of its tables, and what all headers
    share.
    """
    alike = list(words)
    number, first_own = len(Header._fields), Header._fields.index("rank")
    alike[5:first_own] = changed[5:first_own]
    rank, of_ranks = changed[first_own], changed[number]
    if 0 <= rank < words[number + 1] and 0 <= of_ranks + rank < len(changed):
        alike[words[number] + rank] = changed[of_ranks + rank]
    return with_digests(alike)


class Header(NamedTuple):
    magic: int
    version: int
    num_words: int
    checksum: int
    plan_digest: int
    layout_digest: int
    cost_digest: int
    num_ranks: int
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: int
    key_block_rows: int
    label_0: int
    label_1: int
    label_2: int
    label_3: int
    label_4: int
    label_5: int
    retains: int
    slot_bytes: int
    rank: int
    num_rows: int
    forward_arena_bytes: int
    backward_arena_bytes: int
    retained_bytes: int
    num_rounds: int
    num_local_groups: int
    num_local_tasks: int
    num_documents: int
    num_tokens: int
    tolerance_ppm: int
    min_rows: int
    capacity: int
    choices: int
    mask_kind: int
    window: int
    scores_digest: int
    lists_digest: int


class RankDigest(NamedTuple):
    digest: int


class ScoresEntry(NamedTuple):
    mask_kind: int
    window: int
    scale: int
    softcap: int


class Shared(NamedTuple):
    document: int
    at: int
    of: int
    begin: int
    end: int


class Bidirectional(NamedTuple):
    begin: int
    end: int


class GroupEntry(NamedTuple):
    document: int
    scores: int
    bidirectional_begin: int
    bidirectional_end: int
    kv_head_begin: int
    kv_head_end: int
    kv_begin: int
    kv_end: int
    first_block: int
    num_blocks: int
    block_begin: int
    task_begin: int
    task_end: int
    num_arena_rows: int
    forward_k: int
    forward_v: int
    backward_k: int
    backward_v: int
    retained_k: int
    retained_v: int
    grad_begin: int
    grad_end: int
    round: int


class TaskEntry(NamedTuple):
    group: int
    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    home: int
    home_row: int
    forward_q: int
    forward_lse: int
    backward_q: int
    backward_dout: int
    backward_lse: int
    backward_delta: int


class Block(NamedTuple):
    entry: int


class Grad(NamedTuple):
    begin: int
    end: int
    target: int
    row: int
    dk: int
    dv: int


class Segment(NamedTuple):
    document: int
    scores: int
    begin: int
    end: int


class Send(NamedTuple):
    direction: int
    round: int
    after: int
    peer: int
    tensor: int
    row: int
    source: int
    num_rows: int
    kv_head_begin: int
    kv_head_end: int
    target: int


class Receive(NamedTuple):
    round: int
    peer: int
    tensor: int
    action: int
    row: int
    num_rows: int
    kv_head_begin: int
    kv_head_end: int
    source: int
    sum: int


class Wait(NamedTuple):
    direction: int
    round: int
    peer: int


#: The tables in the order of a slice. Tables of two phases follow one another.
TABLES: list[Any] = [
    RankDigest, ScoresEntry, Shared, Bidirectional, GroupEntry, TaskEntry, Block, Grad, Segment, Send, Send, Receive,
    Receive, Wait, Wait,
]  # fmt: skip


class Slice(NamedTuple):
    """One rank's tables. Pairs of tables are those of forward and backward."""

    header: Header
    rank_digests: list[RankDigest]
    scores: list[ScoresEntry]
    shared: list[Shared]
    bidirectional: list[Bidirectional]
    groups: list[GroupEntry]
    tasks: list[TaskEntry]
    blocks: list[Block]
    grads: list[Grad]
    segments: list[Segment]
    sends: tuple[list[Send], list[Send]]
    receives: tuple[list[Receive], list[Receive]]
    waits: tuple[list[Wait], list[Wait]]


def read_slice(words: Sequence[int]) -> Slice:
    header = Header(*words[: len(Header._fields)])
    assert digest(words[CHECKSUM_BEGIN : header.num_words]) == header.checksum
    tables: list[list[Any]] = []
    next_word = len(header) + 2 * len(TABLES)
    for index, kind in enumerate(TABLES):
        begin, count = words[len(header) + 2 * index :][:2]
        width = len(kind._fields)
        assert begin == next_word, "tables follow one another without gaps"
        next_word = begin + count * width
        tables.append([kind(*words[begin + i * width : begin + (i + 1) * width]) for i in range(count)])
    assert next_word == header.num_words
    assert all(word == 0 for word in words[next_word:])
    assert len(words).bit_count() == 1 and len(words) < 2 * header.num_words, "padded to the next power of two"
    pairs = [(tables[i], tables[i + 1]) for i in (9, 11, 13)]
    return Slice(header, *tables[:9], *pairs)


def row_bytes(heads: distca.Heads, kv_heads: Range, phase: int, at_server: bool, tensor: str) -> tuple[int, int]:
    """The bytes of a row with these heads on the wire, and the bytes from one row to the next in an arena."""
    e = heads.dtype.itemsize
    of_kv = kv_heads[1] - kv_heads[0]
    of_q = of_kv * heads.q // heads.kv
    query, value = of_q * heads.dim * e, of_q * heads.value_dim * e
    wide = max(query, value)
    key, key_value = of_kv * heads.dim, of_kv * heads.value_dim
    return {
        "q": (query, wide if phase == FORWARD else query),
        "out": (value, wide if at_server else value),
        "dout": (value, wide),
        "dq": (query, wide if at_server else query),
        "lse": (4 * of_q, 4 * of_q),
        "delta": (4 * of_q, 4 * of_q),
        "k": (key * e, key * e),
        "v": (key_value * e, key_value * e),
        "dk": (key * e, key * e),
        "dv": (key_value * e, key_value * e),
        "dk_partial": (key * 4, key * 4),
        "dv_partial": (key_value * 4, key_value * 4),
    }[tensor]


def heads_of(entry: Any) -> Range:
    """The key/value heads of an entry of a table."""
    return entry.kv_head_begin, entry.kv_head_end


def own_rows(layout: distca.Layout) -> list[range]:
    """The rows of each document that lie on some rank as its own."""
    begins: dict[int, int] = {}
    for rank in range(layout.num_ranks):
        for document, begin, _ in layout.segments(rank):
            begins[document] = min(begin, begins.get(document, begin))
    return [range(begins[document], length) for document, length in enumerate(layout.document_lengths)]


def owners(layout: distca.Layout, document: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Rows [begin, end) that a document has, each as a row (document, row) that is some document's own."""
    of_others = [(of, row) for of, first, last in layout.branches.get(document, ()) for row in range(first, last)]
    rows = of_others + [(document, row) for row in own_rows(layout)[document]]
    assert len(rows) == layout.document_lengths[document]
    return rows[begin:end]


def keys_of_rows(plan: distca.Plan, document: int, begin: int, end: int) -> tuple[int, int]:
    """The range of keys that rows [begin, end) of a document see."""
    if plan.mask == "full":
        length = plan.layout.document_lengths[document]
        reach = (plan.window or length) - 1
        return max(0, begin - reach), min(length, end + reach)
    first, last = (max(0, begin - plan.window + 1) if plan.window else 0), end
    for range_begin, range_end in plan.layout.bidirectional.get(document, ()):
        if range_begin <= end - 1 < range_end:
            last = max(last, range_end)
    return first, last
