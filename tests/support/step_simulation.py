"""A simulation of one step of all ranks, which moves labels (tensor, document, row) instead of rows.

It asserts that every task finds each of its rows where it will look for it, that no two things share a byte of an
arena, and that every result comes home exactly once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

import distca
from support.plan_reader import (
    ADD,
    ADDED,
    ARENA,
    ASSIGN,
    BACKWARD,
    COPY,
    DTYPES,
    FINISH,
    FORWARD,
    IN,
    MASK,
    MASKS,
    OUT,
    PARTIAL,
    RETURNED,
    TENSORS,
    GroupEntry,
    Range,
    Receive,
    TaskEntry,
    heads_of,
    keys_of_rows,
    owners,
    read_slice,
    row_bytes,
    with_digests,
)

#: The most rounds in which rows go to a server.
ROUNDS = 3
Row = tuple[int, int]  # (document, row)
Label = tuple[str, Range, int, int]  # (tensor, key/value heads, document, row)
Result = tuple[Range, list[Row]]
Moved = tuple[int, int, int, str, int, int, int]  # message, source, target, tensor, document, row, key/value head


class Simulation:
    """One step of all ranks. `run` makes the assertions; afterwards `bytes` and `arena_ends` say what it saw."""

    def __init__(self, plan: distca.Plan) -> None:
        self.plan, self.layout, self.heads = plan, plan.layout, plan.heads
        self.ranks = range(plan.layout.num_ranks)
        self.slices = [read_slice(plan.for_rank(rank).tensor.tolist()) for rank in self.ranks]
        self.home_rows: list[list[Row | None]] = [
            [
                None if document < 0 else (document, row)
                for document, begin, end in self.layout.segments(rank)
                for row in range(begin, end)
            ]
            for rank in self.ranks
        ]
        self.branches = self.layout.branches
        self.tasks_of: dict[int, list[distca.Task]] = {}
        for task in plan.tasks:
            self.tasks_of.setdefault(task.document, []).append(task)
        self.bytes = [0, 0, 0, 0]
        # Like `arena` below, but kept from forward to backward.
        self.retained: list[dict[int, Label]] = [{} for _ in self.ranks]
        self.moved: Counter[Moved] = Counter()
        self.arena_ends: list[list[int]] = [[0 for _ in self.ranks] for _ in (FORWARD, BACKWARD)]

    def run(self) -> None:
        for rank in self.ranks:
            self._check_header(rank)
            self._check_groups(rank)
        for phase in (FORWARD, BACKWARD):
            self._run_phase(phase)

    def _check_header(self, rank: int) -> None:
        header = self.slices[rank].header
        heads = self.heads
        assert (header.rank, header.num_ranks) == (rank, len(self.ranks))
        assert header.num_rows == len(self.home_rows[rank])
        assert (header.q_heads, header.kv_heads, header.dim) == (heads.q, heads.kv, heads.dim)
        assert (header.v_dim, DTYPES[header.dtype]) == (heads.value_dim, heads.dtype)
        assert (MASKS[header.mask_kind], header.window) == (self.plan.mask, self.plan.window or 0)
        assert header.plan_digest & MASK == int(self.plan.digest, 16)
        assert header.retains == any(self.plan.retain_bytes)
        assert [(s.document, s.begin, s.end) for s in self.slices[rank].segments] == self.layout.segments(rank)
        assert [d.digest for d in self.slices[rank].rank_digests] == [d.digest for d in self.slices[0].rank_digests]
        words = self.plan.for_rank(rank).tensor.tolist()
        assert with_digests(words) == words

    def _check_groups(self, rank: int) -> None:
        """Groups and their tasks, blocks and gradients follow one another, and local ones come first."""
        tables = self.slices[rank]
        next_task = next_block = next_grad = 0
        pools: dict[tuple[int, int], tuple[set[int], GroupEntry]] = {}
        for index, group in enumerate(tables.groups):
            assert 0 <= group.kv_head_begin < group.kv_head_end <= self.heads.kv
            assert group.first_block == group.kv_begin // 64
            assert group.num_blocks == -(-group.kv_end // 64) - group.first_block
            assert (group.task_begin, group.block_begin, group.grad_begin) == (next_task, next_block, next_grad)
            next_task, next_block = group.task_end, next_block + group.num_blocks
            next_grad = group.grad_end
            tasks = tables.tasks[group.task_begin : group.task_end]
            assert tasks and all(task.group == index for task in tasks)
            assert group.kv_begin == min(task.kv_begin for task in tasks)
            assert group.kv_end == max(task.kv_end for task in tasks)
            entries = [block.entry for block in tables.blocks[group.block_begin : next_block]]
            arena_rows = {
                entry // 2 + row - start
                for start, entry in zip(range(64 * group.first_block, group.kv_end, 64), entries, strict=True)
                for row in range(max(start, group.kv_begin), min(start + 64, group.kv_end))
                if entry % 2
            }
            assert bool(arena_rows) == (group.num_arena_rows > 0)
            if arena_rows:  # of a pool that groups of documents share which have common rows
                places, first = pools.setdefault((group.forward_k, group.forward_v), (set(), group))
                assert (first[13:18], heads_of(first)) == (group[13:18], heads_of(group))
                assert first == group or self.branches
                places |= arena_rows
            assert (group.round == -1) == (index < tables.header.num_local_groups)
        for places, group in pools.values():
            assert places == set(range(group.num_arena_rows))
        rounds = [group.round for group in tables.groups if group.round >= 0]
        assert rounds == sorted(rounds) and set(rounds) == set(range(len(set(rounds)))) and len(set(rounds)) <= ROUNDS
        assert (next_task, next_block, next_grad) == (len(tables.tasks), len(tables.blocks), len(tables.grads))
        for task in tables.tasks:
            document = tables.groups[task.group].document
            assert (task.kv_begin, task.kv_end) == keys_of_rows(self.plan, document, task.q_begin, task.q_end)
            assert all((offset == -1) == (task.home == rank) for offset in task[7:])

    def _stride(self, kv_heads: Range, phase: int, at_server: bool, tensor: str) -> int:
        return row_bytes(self.heads, kv_heads, phase, at_server, tensor)[1]

    def _run_phase(self, phase: int) -> None:
        # For each arena: the byte ranges in use, and the label of the row that starts at an offset.
        self.used: list[list[tuple[int, int, str]]] = [[] for _ in self.ranks]
        self.arena: list[dict[int, Label]] = [{} for _ in self.ranks]
        self.results: list[dict[tuple[str, int], Result]] = [{} for _ in self.ranks]
        # These are by (tensor, row, key/value head).
        self.written: list[Counter[tuple[str, int, int]]] = [Counter() for _ in self.ranks]
        self.terms: list[dict[tuple[str, int, int], list[tuple[int, int]]]] = [{} for _ in self.ranks]
        self.kind_of_terms: list[dict[tuple[str, int, int], str]] = [{} for _ in self.ranks]  # of sums
        # By (tensor, offset), the round of the rows that a result is computed from.
        self.after: list[dict[tuple[str, int], int]] = [{} for _ in self.ranks]
        # By (document, row, key/value head), the servers and documents that contribute to its key gradients.
        self.contributors: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self.written_here: list[dict[tuple[int, int], Result]] = [{} for _ in self.ranks]
        for number in range(-1, ROUNDS):
            self._dispatch(phase, number)
            for server in self.ranks:
                self._attend(phase, server, number)
        for server in self.ranks:
            if phase == FORWARD:
                self._retain(server)
        messages = self._send_home(phase)
        for home in self.ranks:
            self._receive(phase, home, messages)
            self._check_returned(phase, home)
        assert not messages, "rows that nobody receives"
        self._check_waits(phase)

    def _occupy(self, rank: int, begin: int, size: int, what: str) -> None:
        assert begin >= 0 and size > 0
        self.used[rank].append((begin, begin + size, what))

    def _dispatch(self, phase: int, number: int) -> None:
        """Sends the rows of a round; with -1 those that a rank copies to where it reads them itself."""
        for home in self.ranks:
            for send in self.slices[home].sends[phase]:
                if send.direction != IN or (-1 if send.peer == home else send.round) != number:
                    continue
                assert (send.after, send.source) == (0, -1) and 0 <= send.round < ROUNDS
                tensor = TENSORS[send.tensor]
                kv_heads = heads_of(send)
                wire, stride = row_bytes(self.heads, kv_heads, phase, True, tensor)
                for i in range(send.num_rows):
                    owner = self.home_rows[home][send.row + i]
                    assert owner is not None, "a padding row travels"
                    self.arena[send.peer][send.target + i * stride] = (tensor, kv_heads, *owner)
                self._occupy(send.peer, send.target, send.num_rows * stride, tensor)
                if send.peer != home:
                    self.bytes[2 * phase + IN] += send.num_rows * wire
                    owners = self.home_rows[home][send.row : send.row + send.num_rows]
                    self._count_moves(2 * phase + IN, home, send.peer, tensor, (kv_heads, owners))

    def _count_moves(self, message: int, source: int, target: int, tensor: str, result: Any) -> None:
        for (document, row), head in itertools.product(result[1], range(*result[0])):
            self.moved[(message, source, target, tensor, document, row, head)] += 1

    def _expect(self, server: int, tensor: str, kv_heads: Range, offset: int, stride: int, rows: Iterable[Row]) -> None:
        self._expect_in(self.arena[server], tensor, kv_heads, offset, stride, rows)

    @staticmethod
    def _expect_in(
        memory: dict[int, Label], tensor: str, kv_heads: Range, offset: int, stride: int, rows: Iterable[Row]
    ) -> None:
        for i, row in enumerate(rows):
            assert memory.get(offset + i * stride) == (tensor, kv_heads, *row)

    def _retain(self, server: int) -> None:
        """Copies the key blocks of retained groups whole. Each has a place of its own, and all of them are needed."""
        tables = self.slices[server]
        extents = []
        for group in tables.groups:
            kept = group.retained_k >= 0
            assert (group.retained_v >= 0) == kept
            if not kept:
                continue
            assert group.num_arena_rows > 0 and (group.backward_k, group.backward_v) == (-1, -1)
            for tensor, offset, to in (
                ("k", group.forward_k, group.retained_k), ("v", group.forward_v, group.retained_v)
            ):  # fmt: skip
                size = group.num_arena_rows * self._stride(heads_of(group), FORWARD, True, tensor)
                extents.append((to, to + size))
                for at, label in self.arena[server].items():
                    if offset <= at < offset + size:
                        self.retained[server][to + at - offset] = label
        end = 0
        for begin, after in sorted(extents):
            assert end <= begin and begin % 64 == 0
            end = after
        assert end <= tables.header.retained_bytes < end + 64
        assert tables.header.retained_bytes <= self.plan.retain_bytes[server]

    def _write(self, rank: int, tensors: Iterable[str], kv_heads: Range, row: int, num_rows: int) -> None:
        keys = itertools.product(tensors, range(row, row + num_rows), range(*kv_heads))
        self.written[rank].update(keys)

    def _attend(self, phase: int, server: int, number: int) -> None:
        """Computes the groups of a round, when no rows of later rounds are there."""
        tables = self.slices[server]
        home_rows = self.home_rows[server]
        before = set(self.results[server])
        for index, group in enumerate(tables.groups):
            if group.round != number:
                continue
            memory = self.arena[server]
            k, v = (group.forward_k, group.forward_v) if phase == FORWARD else (group.backward_k, group.backward_v)
            if phase == BACKWARD and group.retained_k >= 0:
                memory, k, v = self.retained[server], group.retained_k, group.retained_v
            for b in range(group.num_blocks):
                entry = tables.blocks[group.block_begin + b].entry
                start = 64 * (group.first_block + b)
                begin, end = max(start, group.kv_begin), min(start + 64, group.kv_end)
                rows = self._owners(group.document, begin, end)
                at, in_arena = entry // 2 + begin - start, entry % 2
                if not in_arena:
                    assert at >= 0 and home_rows[at : at + len(rows)] == rows
                    continue
                assert index >= tables.header.num_local_groups, "a local group waits for nobody"
                for tensor, base in (("k", k), ("v", v)):
                    stride = self._stride(heads_of(group), phase, True, tensor)
                    self._expect_in(memory, tensor, heads_of(group), base + at * stride, stride, rows)
            if phase == BACKWARD:
                self._key_gradients(server, group, number)
        for index, task in enumerate(tables.tasks):
            if tables.groups[task.group].round != number:
                continue
            document, kv_heads = tables.groups[task.group].document, heads_of(tables.groups[task.group])
            rows = [(document, row) for row in range(task.q_begin, task.q_end)]
            if task.home == server:
                assert home_rows[task.home_row : task.home_row + len(rows)] == rows
                returned = ("out", "lse") if phase == FORWARD else ("dq",)
                self._write(server, returned, kv_heads, task.home_row, len(rows))
                continue
            assert index >= tables.header.num_local_tasks, "a local task waits for nobody"
            self._remote_task(phase, server, task, kv_heads, rows)
        self.after[server] |= dict.fromkeys(set(self.results[server]) - before, number)

    def _remote_task(self, phase: int, server: int, task: TaskEntry, kv_heads: Range, rows: list[Row]) -> None:
        if phase == FORWARD:
            self._expect(server, "q", kv_heads, task.forward_q, self._stride(kv_heads, phase, True, "q"), rows)
            self._occupy(server, task.forward_lse, len(rows) * self._stride(kv_heads, phase, True, "lse"), "lse")
            self.results[server][("out", task.forward_q)] = (kv_heads, rows)
            self.results[server][("lse", task.forward_lse)] = (kv_heads, rows)
            return
        offsets = {
            "q": task.backward_q, "dout": task.backward_dout, "lse": task.backward_lse, "delta": task.backward_delta
        }  # fmt: skip
        for tensor, offset in offsets.items():
            self._expect(server, tensor, kv_heads, offset, self._stride(kv_heads, phase, True, tensor), rows)
        self.results[server][("dq", task.backward_dout)] = (kv_heads, rows)

    def _key_gradients(self, server: int, group: GroupEntry, number: int) -> None:
        tables = self.slices[server]
        sums = {
            (dk.sum, dv.sum): dk
            for dk, dv in itertools.pairwise(tables.receives[BACKWARD])
            if dk.action != COPY and (TENSORS[dk.tensor][:2], TENSORS[dv.tensor][:2]) == ("dk", "dv")
        }
        kv_heads = heads_of(group)
        next_row = group.kv_begin
        for grad in tables.grads[group.grad_begin : group.grad_end]:
            assert grad.begin == next_row
            next_row = grad.end
            rows = self._owners(group.document, grad.begin, grad.end)
            for (document, row), head in itertools.product(rows, range(*kv_heads)):
                self.contributors.setdefault((document, row, head), []).append((server, group.document))
            if grad.target == ADDED:  # to what an earlier group has written, of these rows and others
                [(dk, dv)] = [
                    place
                    for place, (heads, written) in self.written_here[server].items()
                    if heads == kv_heads and rows[0] in written
                ]
                first = self.written_here[server][dk, dv][1].index(rows[0])
                assert self.written_here[server][dk, dv][1][first : first + len(rows)] == rows
                for tensor, at, offset in (("dk_partial", dk, grad.dk), ("dv_partial", dv, grad.dv)):
                    assert offset - at == first * self._stride(kv_heads, BACKWARD, True, tensor)
                    if (tensor, at) in self.results[server]:
                        self.after[server][tensor, at] = number
                continue
            if grad.target == RETURNED:
                assert self.home_rows[server][grad.row : grad.row + len(rows)] == rows
                self._direct(server, ("dk", "dv"), kv_heads, grad.row, len(rows), server)
                continue
            assert grad.target in (ARENA, PARTIAL)
            assert (grad.dk, grad.dv) not in self.written_here[server]
            if grad.target == PARTIAL:
                self.written_here[server][grad.dk, grad.dv] = (kv_heads, rows)
            own = sums.get((grad.dk, grad.dv)) if grad.target == PARTIAL else None
            if own is not None:  # the first term of a sum at home
                assert self.home_rows[server][own.row : own.row + own.num_rows] == rows
                assert heads_of(own) == kv_heads
                self._term(server, ("dk", "dv"), kv_heads, own.row, own.num_rows, (server, ASSIGN))
                continue
            suffix = "_partial" if grad.target == PARTIAL else ""
            for tensor, offset in ((f"dk{suffix}", grad.dk), (f"dv{suffix}", grad.dv)):
                self._occupy(server, offset, len(rows) * self._stride(kv_heads, BACKWARD, True, tensor), tensor)
                self.results[server][(tensor, offset)] = (kv_heads, rows)
        assert next_row == group.kv_end

    def _direct(self, home: int, tensors: Iterable[str], kv_heads: Range, row: int, num_rows: int, server: int) -> None:
        self._write(home, tensors, kv_heads, row, num_rows)
        self._term(home, tensors, kv_heads, row, num_rows, (server, COPY))

    def _term(
        self, home: int, tensors: Iterable[str], kv_heads: Range, row: int, num_rows: int, term: tuple[int, int]
    ) -> None:
        for key in itertools.product(tensors, range(row, row + num_rows), range(*kv_heads)):
            self.terms[home].setdefault(key, []).append(term)

    def _send_home(self, phase: int) -> dict[tuple[int, ...], Result]:
        messages: dict[tuple[int, ...], Result] = {}
        for server in self.ranks:
            for send in self.slices[server].sends[phase]:
                if send.direction != OUT:
                    continue
                assert send.peer != server and send.row == -1
                tensor = TENSORS[send.tensor]
                assert send.after == self.after[server][tensor, send.source]
                result = self.results[server][(tensor, send.source)]
                assert (result[0], len(result[1])) == (heads_of(send), send.num_rows)
                key = (server, send.peer, send.round, send.tensor, send.target)
                assert key not in messages
                messages[key] = result
                wire = row_bytes(self.heads, heads_of(send), phase, True, tensor)[0]
                self.bytes[2 * phase + OUT] += send.num_rows * wire
                self._count_moves(2 * phase + OUT, server, send.peer, tensor.removesuffix("_partial"), result)
        return messages

    def _receive(self, phase: int, home: int, messages: dict[tuple[int, ...], Result]) -> None:
        tables = self.slices[home]
        sums: dict[tuple[str, int], Receive] = {}
        for r in tables.receives[phase]:
            tensor = TENSORS[r.tensor]
            if r.action == COPY or (tensor, r.sum) in sums:
                continue
            sums[(tensor, r.sum)] = r
            name, partial = tensor[:2], f"{tensor[:2]}_partial"
            assert tensor in (name, partial)
            self._occupy(home, r.sum, r.num_rows * self._stride(heads_of(r), phase, False, partial), "sum")
            self._write(home, [name], heads_of(r), r.row, r.num_rows)
            for key in itertools.product([name], range(r.row, r.row + r.num_rows), range(*heads_of(r))):
                self.kind_of_terms[home][key] = tensor
        finished: list[tuple[str, int]] = []
        by_round: dict[int, list[tuple[int, int, str]]] = {0: []}
        for receive in sorted(tables.receives[phase], key=lambda r: r.round):
            assert receive.round < tables.header.num_rounds
            tensor = TENSORS[receive.tensor]
            assert (receive.peer == home) == (receive.action == FINISH)
            if receive.action == FINISH:  # a sum that this rank alone has computed
                assert (receive.round, receive.source) == (0, -1)
                finished.append((tensor, receive.sum))
                continue
            kv_heads, rows = messages.pop((receive.peer, home, receive.round, receive.tensor, receive.source))
            assert kv_heads == heads_of(receive)
            assert self.home_rows[home][receive.row : receive.row + receive.num_rows] == rows
            end = receive.source + receive.num_rows * self._stride(kv_heads, phase, False, tensor)
            by_round.setdefault(receive.round, []).append((receive.source, end, tensor))
            if receive.action == COPY and phase == FORWARD:
                self._write(home, [tensor], kv_heads, receive.row, receive.num_rows)
            elif receive.action == COPY:
                self._direct(home, [tensor], kv_heads, receive.row, receive.num_rows, receive.peer)
            else:
                into = sums[(tensor, receive.sum)]
                assert (into.row, into.num_rows, heads_of(into)) == (receive.row, receive.num_rows, kv_heads)
                name = tensor.removesuffix("_partial")
                self._term(home, [name], kv_heads, receive.row, receive.num_rows, (receive.peer, receive.action))
        assert all(Counter((TENSORS[r.tensor], r.sum) for r in tables.receives[phase])[sum] == 1 for sum in finished)
        size = (tables.header.forward_arena_bytes, tables.header.backward_arena_bytes)[phase]
        for extents in by_round.values():
            ordered = sorted(self.used[home] + extents)
            for (_, end, first), (begin, _, second) in zip(ordered, ordered[1:], strict=False):
                assert end <= begin, f"{first} and {second} overlap in the arena of rank {home}"
            last = ordered[-1][1] if ordered else 0
            assert last <= size <= tables.header.slot_bytes
            self.arena_ends[phase][home] = max(self.arena_ends[phase][home], last)

    def _check_returned(self, phase: int, home: int) -> None:
        """Every row and head of a document is written exactly once. Key gradients have every contributor, in order."""
        rows = [row for row, owner in enumerate(self.home_rows[home]) if owner is not None]
        names = ("out", "lse") if phase == FORWARD else ("dq", "dk", "dv")
        heads = range(self.heads.kv)
        assert self.written[home] == Counter(itertools.product(names, rows, heads))
        if phase == FORWARD:
            return
        for row, head in itertools.product(rows, heads):
            document, position = self.home_rows[home][row]  # type: ignore[misc]
            seeing = {
                (t.server, reader)
                for reader, key in self._readers(document, position)
                for t in self.tasks_of[reader]
                if t.kv_begin <= key < t.kv_end and t.kv_head_begin <= head < t.kv_head_end
            }
            assert sorted(self.contributors[document, position, head]) == sorted(seeing)
            # What another server computes is one contribution in fp32, or one for each document in the dtype of the
            # heads, where these have fewer bytes.
            others = sorted(server for server, _ in seeing if server != home)
            narrow = self.plan.reduce_dtype != torch.float32 and 2 * len(others) < 4 * len(set(others))
            order = sorted({home} & {server for server, _ in seeing}) + (others if narrow else sorted(set(others)))
            actions = [COPY] if len(seeing) == 1 else [ASSIGN] + [ADD] * (len(order) - 1)
            expected = list(zip(order, actions, strict=True))
            for name in ("dk", "dv"):
                assert self.terms[home][(name, row, head)] == expected
                kind = self.kind_of_terms[home].get((name, row, head))
                assert kind == (None if len(seeing) == 1 else name if narrow else f"{name}_partial")

    def _owners(self, document: int, begin: int, end: int) -> list[Row]:
        if document not in self.branches:
            return [(document, row) for row in range(begin, end)]
        return owners(self.layout, document, begin, end)

    def _readers(self, document: int, row: int) -> list[Row]:
        """The documents that have this row of a document's own, and which of their keys it is."""
        readers = [(document, row)]
        for reader, ranges in self.branches.items():
            at = 0
            for of, begin, end in ranges:
                if of == document and begin <= row < end:
                    readers.append((reader, at + row - begin))
                at += end - begin
        return [(reader, key) for reader, key in readers if reader in self.tasks_of]

    def _check_waits(self, phase: int) -> None:
        for rank in self.ranks:
            senders = {
                (send.direction, send.round, home)
                for home in self.ranks
                for send in self.slices[home].sends[phase]
                if send.peer == rank and home != rank
            }
            waits = [tuple(wait) for wait in self.slices[rank].waits[phase]]
            assert sorted(waits) == sorted(senders)
