"""Plants faults in the sources, one at a time, and requires that the tests catch each.

    make faults                     all of them
    make faults ARGS="--list"       their names
    make faults ARGS="--only NAME"  one

Works on a copy of the tree in a temporary folder, which it builds once and then again for each fault in C++. For each
fault the tests that should notice run first, then, if they pass, the whole suite. Prints which test noticed; exits with
1 if a fault survives, or if the tests fail without one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0
"""Seconds for one run of tests; one that takes longer hangs, which is noticed too."""

EXACT = "tests/test_exactness.py"
STEPS = "tests/test_steps.py"
ATTENTION = "tests/test_attention.py"
PLAN = "tests/test_plan.py"
SCHEDULER = "tests/test_scheduler.py"
DEATH = "tests/test_death.py"
TRANSPORT = "tests/test_transport.py"
TORCH_TRANSPORT = "tests/test_torch_transport.py"
BAD_INPUT = "tests/test_bad_input.py"
PARTS = "tests/test_parts.py"
PING_PONG = "tests/test_ping_pong.py"
FLASH = "tests/test_flash.py"
FLASH_RANKS = "tests/test_flash_ranks.py"
RETAIN = "tests/test_retain.py"
CUDA_HOST = "tests/test_cuda_attention_host.py"
MEMORY = "tests/test_memory.py"
TIMELINE = "tests/test_timeline.py"


@dataclass(frozen=True)
class Fault:
    """In `file`, the text `old`, which must stand there exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DISPATCHER = "cpp/runtime/dispatcher.cpp"
PROTOCOL = "cpp/runtime/protocol.cpp"
ARRANGEMENT = "cpp/plan/arrangement.cpp"
TABLES = "cpp/plan/rank_tables.cpp"
SHARD = "cpp/plan/shard.cpp"
FORWARD = "cpp/attention/cpu_forward.cpp"
BACKWARD = "cpp/attention/cpu_backward.cpp"
KERNEL = "cpp/attention/cpu_kernel.h"
PRODUCTS = "cpp/attention/micro_products.h"
SOFTMAX = "cpp/attention/micro_softmax.h"

FAULTS = [
    # ---- puts, credits, signals
    Fault(
        "values are not put",
        DISPATCHER,
        "    protocol_.put(s.peer, s.target, f.row_stride(), f.head_stride, source, n);",
        "    if (kind != TensorKind::kV) protocol_.put(s.peer, s.target, f.row_stride(), f.head_stride, source, n);",
        (STEPS, EXACT),
    ),
    Fault(
        "attention is not told to be deterministic",
        DISPATCHER,
        "scores.deterministic};",
        "false};",
        ("tests/test_deterministic.py",),
    ),
    Fault(
        "rows are sent without credit",
        DISPATCHER,
        "      protocol_.await_credit(Direction::kIn, s.peer, 0);",
        "",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "rows are sent home without credit",
        DISPATCHER,
        "      protocol_.await_credit(Direction::kOut, s.peer, round);",
        "",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "credit is granted for the step after next too",
        PROTOCOL,
        "signals_.credit(slot(), rank()), given);",
        "signals_.credit(slot(), rank()), sequence(now_.number + 2, round));",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "credit is granted for all rounds at once",
        PROTOCOL,
        "signals_.credit(slot(), rank()), given);",
        "signals_.credit(slot(), rank()), sequence(now_.number, 99));",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "rows are announced before they are put",
        DISPATCHER,
        "      protocol_.await_credit(Direction::kIn, s.peer, 0);",
        "      protocol_.await_credit(Direction::kIn, s.peer, 0); protocol_.announce(Direction::kIn, s.peer, 0);",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "rows that come home are not awaited",
        DISPATCHER,
        "      protocol_.await_rows(Direction::kOut, w.peer, round);",
        "      continue;",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "a signal does not wait for earlier puts",
        "cpp/transport/reordering.cpp",
        "  if (const Item& drawn = held_[pick]; drawn.is_signal) {",
        "  if (const Item& drawn = held_[pick]; drawn.is_signal && drawn.value == 0) {",
        (STEPS, TRANSPORT),
    ),
    # ---- what is retained
    Fault(
        "retained keys are not copied",
        DISPATCHER,
        "    keep(TensorKind::kK, g.retained_k, g.forward_k);",
        "",
        (RETAIN,),
    ),
    Fault(
        "retained keys are read from the arena in backward",
        DISPATCHER,
        "    if (backward && g.retained_k >= 0) {",
        "    if (false) {",
        (RETAIN,),
    ),
    Fault(
        "keys that save the fewest bytes are kept first",
        ARRANGEMENT,
        "    std::sort(by_bytes.begin(), by_bytes.end());",
        "    std::sort(by_bytes.rbegin(), by_bytes.rend());",
        (RETAIN,),
    ),
    Fault(
        "more is retained than is allowed",
        ARRANGEMENT,
        "      if (end > retain_bytes_[s]) continue;",
        "      if (end > retain_bytes_[s] + 20'000) continue;",
        (PLAN, RETAIN),
    ),
    Fault(
        "what is retained is not part of the digest",
        "cpp/plan/plan.cpp",
        "    if (arrangement.groups[g].is_retained()) d.add(",
        "    if (false) d.add(",
        (RETAIN,),
    ),
    Fault(
        "servers wait for keys that they have retained",
        TABLES,
        "      if (!g.is_retained()) wait(Phase::kBackward, Direction::kIn, 0, p.rank);",
        "      wait(Phase::kBackward, Direction::kIn, 0, p.rank);",
        (PLAN, RETAIN),
    ),
    Fault(
        "the size of what forward has kept is not checked",
        "cpp/torch/core_attention.cpp",
        "given.has_value() && given->numel() == h.retained_bytes,",
        "given.has_value(),",
        (RETAIN,),
    ),
    # ---- faults of peers
    Fault(
        "the digest of a plan is not compared",
        PROTOCOL,
        "      if (theirs == call_word() && digest == now_.plan_digest) {",
        "      if (theirs == call_word()) {",
        ("tests/test_faults.py",),
    ),
    Fault(
        "a poisoned context goes on",
        PROTOCOL,
        "  require<ContextPoisonedError>(poison_.empty(),",
        "  require<ContextPoisonedError>(true,",
        (DEATH,),
    ),
    Fault(
        "a death is not looked for",
        PROTOCOL,
        "  if (!gone || gone->orderly) return;",
        "  return;",
        (DEATH,),
    ),
    Fault(
        "a forked child keeps the sockets",
        "cpp/transport/fork_guard.cpp",
        "                     for (const int fd : watch().open) ::close(fd);",
        "",
        (f"{DEATH}::test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent",),
    ),
    Fault(
        "heaps of different sizes are not noticed",
        "cpp/transport/shm_mesh.cpp",
        "    require(hello.heap_bytes == group_.heap_bytes,",
        "    require(true,",
        (TRANSPORT,),
    ),
    # ---- exchanges of all ranks
    Fault(
        "ranks of an exchange do not compare their plans",
        PROTOCOL,
        "        for (int64_t p = 0; p < num_ranks(); ++p) compare_with(p);",
        "",
        (TORCH_TRANSPORT,),
    ),
    Fault(
        "a rank stops exchanging when its own rounds are over",
        "cpp/transport/collective.cpp",
        "    return any(&Header::more);",
        "    return more;",
        (TORCH_TRANSPORT,),
    ),
    Fault(
        "rows of a peer go wherever it says",
        "cpp/transport/collective.cpp",
        "        check_put(rank_, heap_bytes(), record.target, record.row_stride, record.head_stride, n);",
        "",
        (TORCH_TRANSPORT,),
    ),
    Fault(
        "a rank that fails leaves its group without a word",
        "python/distca/exchange.py",
        "            self._report(kind, text)",
        "            pass",
        (TORCH_TRANSPORT,),
    ),
    # ---- the plan
    Fault(
        "queries are sent from the row before",
        TABLES,
        "      send(phase, Direction::kIn, 0, t.server, kind, t.home_row, -1,",
        "      send(phase, Direction::kIn, 0, t.server, kind, t.home_row - (t.home_row > 0), -1,",
        (PLAN, STEPS),
    ),
    Fault(
        "a block of the local tensor starts a row late",
        TABLES,
        "block_entry(p.row + (next * block_rows_ - p.begin), false)",
        "block_entry(p.row + (next * block_rows_ - p.begin) + (next * block_rows_ > p.begin), false)",
        (PLAN, STEPS),
    ),
    Fault(
        "extents of the arena overlap",
        ARRANGEMENT,
        "    part += (bytes + kExtentAlignment - 1) / kExtentAlignment * kExtentAlignment;",
        "    part += bytes / kExtentAlignment * kExtentAlignment;",
        (PLAN, STEPS),
    ),
    Fault(
        "a first partial is added twice",
        "cpp/runtime/row_arithmetic.h",
        "e.starts ? table.terms[static_cast<size_t>(t++)]",
        "e.starts ? table.terms[static_cast<size_t>(t)]",
        (STEPS, EXACT),
    ),
    Fault(
        "a partial replaces the sum",
        TABLES,
        ": ReceiveAction::kAdd;",
        ": ReceiveAction::kAssign;",
        (PLAN, STEPS),
    ),
    Fault(
        "an altered plan is not noticed",
        "cpp/plan/validate.cpp",
        "    check(static_cast<int64_t>(digest(used)) == h().checksum,",
        "    check(static_cast<int64_t>(digest(used)) != 0,",
        (BAD_INPUT,),
    ),
    Fault(
        "a shard is always the last rows",
        SHARD,
        "b = inner;",
        "b = end;",
        (SCHEDULER,),
    ),
    Fault(
        "what a shard leaves may be shorter than wanted",
        SHARD,
        "    if (a > begin) a = std::max(a, begin + min_rows);",
        "",
        (SCHEDULER,),
    ),
    Fault(
        "ranks give away more than they must",
        "cpp/plan/balancer.cpp",
        "  limit_ = load_limits(total, speed_, options_.tolerance_ppm);",
        "  limit_ = load_limits(total, speed_, 0);",
        (SCHEDULER,),
    ),
    Fault(
        "a rank may pass its capacity a little",
        "cpp/plan/capacity.cpp",
        "      if (bytes <= capacity_) continue;",
        "      if (bytes <= capacity_ + 64) continue;",
        (PLAN,),
    ),
    Fault(
        "small tasks are dear in the statistics alone",
        "cpp/plan/balancer.cpp",
        "is_additive_(options.cost.is_additive()),",
        "is_additive_(true),",
        (SCHEDULER,),
    ),
    # ---- the kernel
    Fault(
        "a row sees the key after it",
        FORWARD,
        "keys_visible_from(mask, item.begin + t * kTileRows, start, step.end)",
        "keys_visible_from(mask, item.begin + t * kTileRows + 1, start, step.end)",
        (ATTENTION,),
    ),
    Fault(
        "a key's gradient misses the row of its own",
        BACKWARD,
        "seeing{1 - keys.upto,",
        "seeing{2 - keys.upto,",
        (ATTENTION,),
    ),
    Fault(
        "a block of the arena starts a row late",
        KERNEL,
        "view.at((entry >> 1) + row - block * kKeyBlockRows, kv_head)",
        "view.at((entry >> 1) + row - block * kKeyBlockRows + (entry & 1), kv_head)",
        (STEPS, EXACT),
    ),
    Fault(
        "a window reaches a key too far",
        KERNEL,
        "row - mask.window + 1 - key",
        "row - mask.window - key",
        (EXACT,),
    ),
    Fault(
        "keys before a window are not fetched",
        TABLES,
        "std::max(segment.begin, g.kv_begin)",
        "std::max(segment.begin, g.kv_begin + (g.kv_begin > 0))",
        (PLAN, EXACT),
    ),
    Fault(
        "a range of heads is read from the first head on",
        DISPATCHER,
        "plan::has_kv_heads(kind) ? range.begin : range.begin * heads.group_heads()",
        "plan::has_kv_heads(kind) ? range.begin : 0 * heads.group_heads()",
        (EXACT,),
    ),
    Fault(
        "tasks of overlapping head ranges are not cut apart",
        "cpp/plan/task_list.cpp",
        "    if (head <= piece.kv_head_begin || head >= task.kv_head_end) continue;",
        "    if (head <= piece.kv_head_begin || head >= 0) continue;",
        (PLAN,),
    ),
    Fault(
        "all query heads use the first key/value head",
        KERNEL,
        "view.at((entry >> 1) + row - block * kKeyBlockRows, kv_head)",
        "view.at((entry >> 1) + row - block * kKeyBlockRows, 0 * kv_head)",
        (ATTENTION,),
    ),
    Fault(
        "keys that a row may not see are multiplied by zero",
        PRODUCTS,
        "        if (begin < from || begin >= upto) continue;",
        "        if (begin < from && begin >= upto) continue;",
        ("tests/test_nan.py",),
    ),
    Fault(
        "the unseen one of a pair is multiplied by zero",
        PRODUCTS,
        "(second ? 0xffff0000u : 0u)",
        "0xffff0000u",
        ("tests/test_nan.py",),
    ),
    Fault(
        "the order of sums depends on the rows beside",
        PRODUCTS,
        "constexpr int64_t kScoreChain = 64;\n",
        "#define kScoreChain (tile.lanes == kTileRows ? 16 : 64)\n",
        (ATTENTION, EXACT),
    ),
    Fault(
        "the log-sum-exp lacks the sum",
        FORWARD,
        "-kInfinity : base + std::log(sum);",
        "-kInfinity : base;",
        (ATTENTION,),
    ),
    Fault(
        "delta is left out",
        SOFTMAX,
        "p * (load(dprobs + key * kTileRows) - lanes.delta)",
        "p * load(dprobs + key * kTileRows)",
        (ATTENTION,),
    ),
    Fault(
        "padding rows are not filled",
        DISPATCHER,
        "  fill_padding(step);\n  backend_.finish();",
        "  backend_.finish();",
        (EXACT, STEPS),
    ),
    # ---- attention by ATen's operator
    Fault(
        "flash: a window is a row too wide",
        "cpp/torch/flash.cpp",
        "mask.window - 1, 0}",
        "mask.window, 0}",
        (FLASH_RANKS,),
    ),
    Fault(
        "flash: a sink leaves the output as it is",
        "cpp/torch/flash.cpp",
        "torch::stable::subtract(lse, with_sink)",
        "torch::stable::subtract(lse, lse)",
        (FLASH,),
    ),
    Fault(
        "flash: the last task's gradient replaces the sum",
        "cpp/torch/flash.cpp",
        "aten::add(rows, aten::narrow_rows(partial, done, b.kv_lengths[i]))",
        "aten::narrow_rows(partial, done, b.kv_lengths[i])",
        (FLASH,),
    ),
    Fault(
        "flash: rows that are not aligned are passed as they are",
        "cpp/torch/flash.cpp",
        "  if (fine) return t;",
        "  if (fine || true) return t;",
        (FLASH,),
    ),
    Fault(
        "flash: squares of small gradients are zero",
        "cpp/torch/aten_backend.cpp",
        'aten::unary("aten::abs", rows)',
        "aten::divide(rows, rows)",
        (FLASH_RANKS,),
    ),
    Fault(
        "flash: keys of a block that begins before the group are a row off",
        "cpp/torch/aten_backend.cpp",
        "(entry >> 1) + begin - first",
        "(entry >> 1)",
        (FLASH_RANKS,),
    ),
    # ---- errors
    Fault(
        "a backward does not know its layer",
        "python/distca/ops.py",
        "        out.grad_fn.metadata[_LAYER] = layer",
        "        pass",
        ("tests/test_mistakes.py",),
    ),
    # ---- steps in parts, ping-pong
    Fault(
        "a step takes a slot that is in use",
        PROTOCOL,
        "    if (!busy_[static_cast<size_t>(slot)]) return slot;",
        "    return slot;",
        (PARTS,),
    ),
    Fault(
        "whole steps and parts look alike to peers",
        PROTOCOL,
        "static_cast<uint64_t>(part_) << 1 |",
        "",
        (PARTS,),
    ),
    Fault(
        "peers are not told of a step that is given up",
        "python/distca/context.py",
        "            self._core.abandon(step, why)",
        "            pass",
        (PARTS,),
    ),
    Fault(
        "inputs may change while a step is under way",
        "python/distca/steps.py",
        "        if (name := self._call.changed_input()) is not None:",
        "        if (name := None) is not None:",
        (PARTS,),
    ),
    Fault(
        "a half runs under the saved-tensor hooks of the other",
        "python/distca/thread_state.py",
        "        self._restore_hooks()",
        "        pass",
        (PING_PONG,),
    ),
    Fault(
        "a half draws random numbers of the other",
        "python/distca/thread_state.py",
        "        self.random.restore()",
        "        pass",
        (PING_PONG,),
    ),
    Fault(
        "halves share what autocast has cast for one of them",
        "python/distca/thread_state.py",
        "            torch.clear_autocast_cache()",
        "            pass",
        (PING_PONG,),
    ),
    Fault(
        "FSDP2 frees the weights of the half that comes later",
        "python/distca/ping_pong.py",
        "    module.set_reshard_after_forward(False, recurse=False)",
        "    pass",
        (PING_PONG,),
    ),
    Fault(
        "a half is labelled with rows of the other",
        "python/distca/halves.py",
        "            return whole.index_select(dim, rows)",
        "            return whole.narrow(dim, 0, len(rows))",
        ("tests/test_train_options.py", "tests/test_hf_ping_pong.py"),
    ),
    Fault(
        "the loss of a half is a mean over its own targets",
        "python/distca/integrations/hf_ping_pong.py",
        '            call["num_items_in_batch"] = max(targets, 1)',
        "            pass",
        ("tests/test_hf_ping_pong.py",),
    ),
    # ---- training
    Fault(
        "labels are not shifted",
        "python/distca/train/data.py",
        "content[first + 1 : last + 1]",
        "content[first:last]",
        ("tests/test_train.py::test_every_row_has_the_next_byte_of_its_document_as_target_across_all_cuts",),
    ),
    Fault(
        "the loss of a rank is a mean over its own share of targets",
        "python/distca/train/step.py",
        "(loss_sum * (dist.get_world_size() / max(_num_targets(work), 1))).backward()",
        "(loss_sum / max(_num_targets(work), 1)).backward()",
        ("tests/test_hf.py::test_two_ranks_have_the_loss_and_gradients_of_one_process_with_sdpa",),
    ),
    Fault(
        "a resumed run reads its documents from the start",
        "python/distca/train/data.py",
        "itertools.islice(packed, self._start, max(self._start, self._steps))",
        "itertools.islice(packed, self._steps - self._start)",
        ("tests/test_train_checkpoint.py::test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once",),
    ),
    Fault(
        "a resumed run begins its learning rates anew",
        "python/distca/train/checkpoint.py",
        'self.schedule.load_state_dict(state["schedule"])',
        "pass",
        ("tests/test_train_checkpoint.py::test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once",),
    ),
    # ---- the CUDA kernels, on the emulated machine
    Fault(
        "CUDA: values past the visible keys stay as they are in memory",
        "cuda/attention/cta_parts.h",
        "clear_rows<kChunks, kRows>(tile, last, kRows);",
        "clear_rows<kChunks, kRows>(tile, last, last);",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: cleared rows are not fenced",
        "cuda/attention/cta_parts.h",
        "    hopper::fence_shared();\n    hopper::sync_warp();\n    if (lane_of_warp() == 0) full.arrive();",
        "    hopper::sync_warp();\n    if (lane_of_warp() == 0) full.arrive();",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: a lane may come late to an empty stage",
        "cuda/attention/cta_parts.h",
        "  empty.wait(parity ^ 1);\n  hopper::sync_warp();",
        "  empty.wait(parity ^ 1);",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: signals are not awaited",
        "cuda/attention/cta_parts.h",
        "p.items[index].remote != 0",
        "p.items[index].remote > 1",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: an unchanged maximum rescales a row",
        "cuda/attention/forward_kernel.h",
        "hopper::product(row_max[r], p.scores.exponent_scale) - base)",
        "hopper::fused(row_max[r], p.scores.exponent_scale, -base))",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: keys are given back before the scores are there",
        "cuda/attention/forward_kernel.h",
        "      hopper::wait_groups<1>();",
        "      hopper::wait_groups<2>();",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: dS is not fenced",
        "cuda/attention/backward_kernel.h",
        "    if constexpr (kGradients) hopper::fence_shared();",
        "",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: dq is multiplied before the other warpgroup has written dS",
        "cuda/attention/backward_kernel.h",
        "    this->multiply_probabilities(dv);\n    hopper::sync_named(kScoresWritten, kConsumers);\n"
        "    this->multiply_gradients(dk);",
        "    this->multiply_probabilities(dv);\n    hopper::sync_named(kQueryTurn + this->warpgroup(), kWarpgroup);\n"
        "    this->multiply_gradients(dk);",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: dq is added without waiting for a turn",
        "cuda/attention/backward_kernel.h",
        "hopper::load_acquire(turn_of(facts)) != facts.blocks_before",
        "hopper::load_acquire(turn_of(facts)) < 0",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: a window is one key too wide",
        "cuda/attention/tables.h",
        "maximum(0, row - window + 1)",
        "maximum(0, row - window)",
        (CUDA_HOST,),
    ),
    Fault(
        "CUDA: one tile too few for a block of keys",
        "cuda/attention/tables.h",
        "ceil_div(rows.end - task.q_begin, p.tile_tokens)}",
        "ceil_div(rows.end - task.q_begin - 1, p.tile_tokens)}",
        (CUDA_HOST,),
    ),
    # ---- memory and traces
    Fault(
        "the name of a context leaks in every call",
        "cpp/torch/memory.h",
        "  ~Text() { torch_delete_string(handle_); }",
        "  ~Text() = default;",
        (MEMORY,),
    ),
    Fault(
        "the record of a step in parts is allocated anew",
        "cpp/torch/memory.h",
        "return std::allocate_shared<T>(Reusing<T>(), std::forward<Args>(args)...);",
        "return std::make_shared<T>(std::forward<Args>(args)...);",
        (MEMORY,),
    ),
    Fault(
        "rows that a rank copies itself count as hidden",
        "python/distca/timeline.py",
        "cover((*moving, *trace.copies), *here)",
        "cover(moving, *here)",
        (TIMELINE,),
    ),
    Fault(
        "a rank that is through early does not idle",
        "python/distca/timeline.py",
        "idle=_seconds(waits) + window.seconds - (step.end - step.begin),",
        "idle=_seconds(waits),",
        (TIMELINE,),
    ),
]


def tool(name: str) -> str:
    """The one installed beside this Python, else the one on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"{name} is missing; make build installs it")
    return found


class Copy:
    """A copy of the tree, with its own build."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.build_folder = folder / "build"
        made_by_tools = (".git", ".venv", "build", "dist", "runs", "*.so", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*made_by_tools))
        self.environment = {**os.environ, "PYTHONPATH": str(self.tree / "python"), "PYTHONDONTWRITEBYTECODE": "1"}

    def configure(self) -> None:
        ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
        python = f"-DPython_EXECUTABLE={sys.executable}"
        self._run([tool("cmake"), "-S", str(self.tree), "-B", str(self.build_folder), "-G", "Ninja", ninja, python])
        self.build()
        where = self._run([sys.executable, "-c", "import distca; print(distca.__file__)"])
        if not Path(where.strip()).is_relative_to(self.tree):
            raise SystemExit(f"the tests would import {where.strip()} instead of the copy in {self.tree}")

    def build(self) -> None:
        self._run([tool("cmake"), "--build", str(self.build_folder), "--parallel", "2"])
        self._run(
            [tool("cmake"), "--install", str(self.build_folder), "--prefix", str(self.tree / "python" / "distca")]
        )

    def _run(self, command: list[str]) -> str:
        ran = subprocess.run(
            command, cwd=self.tree, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if ran.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}")
        return ran.stdout

    def failing_test(self, tests: tuple[str, ...]) -> str:
        """The first test that fails, or what else went wrong; empty where all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"no answer in {LIMIT:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return ""
        if process.returncode in (4, 5):
            raise SystemExit(f"pytest found no tests in {' '.join(tests)}:\n{output}")
        named = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
        return named[1] if named else f"the end of pytest with code {process.returncode}"

    def plant(self, fault: Fault) -> str:
        """Changes the source; returns what it was."""
        path = self.tree / fault.file
        source = path.read_text()
        if source.count(fault.old) != 1:
            raise SystemExit(
                f"fault {fault.name!r}: this text stands {source.count(fault.old)} times in {fault.file}, "
                f"exactly once is expected; the fault has to follow the source:\n{fault.old}"
            )
        path.write_text(source.replace(fault.old, fault.new))
        return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="plant this fault (may be given again)")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{fault.name:<60} {fault.file}" for fault in FAULTS))
        return 0
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if not chosen:
        parser.error(f"no fault is called {options.only}; --list says which there are")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="distca-faults-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen:  # before anything takes time
            (copy.tree / fault.file).write_text(copy.plant(fault))
        copy.configure()
        files = sorted({test for fault in chosen for test in fault.tests})
        failure = copy.failing_test(tuple(files))
        if failure:
            print(f"the tests fail without any fault: {failure}")
            return 1
        print(f"{'fault':<60} {'file':<36} {'seconds':>7}  caught by", flush=True)
        for fault in chosen:
            source = copy.plant(fault)
            if fault.file.startswith("cpp/"):
                copy.build()
            begin = time.monotonic()
            caught = copy.failing_test(fault.tests) or copy.failing_test(("tests",))
            seconds = time.monotonic() - begin
            print(f"{fault.name:<60} {fault.file:<36} {seconds:7.1f}  {caught or 'NOTHING'}", flush=True)
            if not caught:
                survivors.append(fault)
            (copy.tree / fault.file).write_text(source)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
