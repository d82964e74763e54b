"""A plan tensor that was altered, cut short or made by another version is noticed before it is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distca
from distca import _C
from support.batches import random_batch, rows_of_rank
from support.groups import loopback_group, outcomes
from support.plan_reader import (
    SLOT_BYTES_WORD,
    TABLES,
    GroupEntry,
    RankDigest,
    ScoresEntry,
    Send,
    TaskEntry,
    digest,
    made_alike,
    read_slice,
    with_checksum,
    with_digests,
    with_tensor,
    with_words,
)
from support.refusals import HEADS, LAYOUT, LENGTHS, Group, plan_of_two


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
                group.attend(inputs, with_words(group.plan, changed))
    group.check_still_works()


def test_a_truncated_plan_is_noticed_at_every_length(group: Group) -> None:
    tensor = group.plan.tensor
    used = read_slice(tensor.tolist()).header.num_words
    inputs = group.inputs()
    for length in range(used):
        with pytest.raises(distca.PlanFormatError):
            group.attend(inputs, with_tensor(group.plan, tensor[:length].clone()))
    group.check_still_works()


@pytest.mark.parametrize("version", [0, _C.PLAN_FORMAT - 1, _C.PLAN_FORMAT + 1, -1])
def test_a_plan_of_another_format_version_is_refused_with_both_versions(group: Group, version: int) -> None:
    words = group.plan.tensor.tolist()
    with pytest.raises(distca.PlanFormatError, match=f"version is {version}, this library reads {_C.PLAN_FORMAT}"):
        group.attend(group.inputs(), with_words(group.plan, with_checksum([words[0], version, *words[2:]])))
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
        group.attend(group.inputs(), with_tensor(group.plan, change(group.plan.tensor)))
    group.check_still_works()


def test_the_checksum_is_what_an_independent_reader_computes() -> None:
    for rank in (0, 1):
        words = plan_of_two().for_rank(rank).tensor.tolist()
        assert digest(words[4 : words[2]]) == words[3]
        _C.validate_plan(torch.tensor(with_checksum(words)).numpy())


def _offset_words(words: list[int]) -> list[int]:
    """The indices of a slice's words that are rows, counts or offsets: those of the tables."""
    header_words = len(read_slice(words).header) + 2 * len(TABLES)
    return list(range(header_words, words[2]))


@pytest.mark.parametrize("value", [2**62, -(2**62), 2**31 + 1, 2**46, -(2**33)])
def test_an_offset_far_outside_is_never_accepted_even_with_digests_that_match(value: int) -> None:
    """Some words are names instead of addresses and are excepted: documents, and the rows where a task's rows are at
    home. A scale may be any number.
    """
    accepted = []
    slices = [plan_of_two(retain_bytes=retain).for_rank(rank) for retain in (0, 2**40) for rank in (0, 1)]
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
        if kind is TaskEntry:  # this says where the rows are on their own rank
            return field == "home_row" and tables.tasks[row].home != tables.header.rank
        return kind is RankDigest or (kind, field) in ((GroupEntry, "document"), (ScoresEntry, "scale"))
    return False


def test_an_altered_target_outside_the_peer_s_slot_is_refused_when_it_would_be_written() -> None:
    """A slice does not know its peer's arena, but the put knows the size of the peer's slot. All digests are made to
    match.
    """
    plan = plan_of_two()
    batch = random_batch(LENGTHS, HEADS, 1)
    words = plan.tensor.tolist()
    sends_begin = words[len(read_slice(words).header) + 2 * TABLES.index(Send)]
    sends = read_slice(words).sends[0]
    index = next(i for i, send in enumerate(sends) if send.peer == 1)
    words[sends_begin + len(Send._fields) * index + Send._fields.index("target")] = words[SLOT_BYTES_WORD]
    altered = with_words(plan, with_digests(words))
    other = with_words(plan.for_rank(1), made_alike(plan.for_rank(1).tensor.tolist(), altered.tensor.tolist()))
    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(
            contexts,
            lambda rank, context: distca.core_attention(
                *(rows_of_rank(batch, LAYOUT, rank, t) for t in (batch.q, batch.k, batch.v)),
                altered if rank == 0 else other,
                context=context,
            ),
        )
    assert isinstance(results[0], distca.PlanFormatError) and "does not fit into the arena of rank 1" in str(results[0])
    assert isinstance(results[1], distca.PeerLeftError) and "rank 0 abandoned" in str(results[1])
