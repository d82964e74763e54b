"""Faults of steps: of the protocol, of transports, of parts and ping-pong."""

from faults.fault import Fault

EXACT = "tests/runtime/test_exactness.py"
STEPS = "tests/runtime/test_steps.py"
DEATH = "tests/runtime/test_process_death.py"
TOLD = "tests/runtime/test_told_faults.py"
TRANSPORT = "tests/transport/test_shm.py"
TORCH_TRANSPORT = "tests/transport/test_torch_transport.py"
TORCH_FAULTS = "tests/transport/test_torch_transport_faults.py"
PARTS = "tests/runtime/test_steps_in_parts.py"
PARTS_MISTAKES = "tests/runtime/test_steps_in_parts_mistakes.py"
INTERRUPTS = "tests/runtime/test_interrupts.py"
UNFINISHED = "tests/runtime/test_steps_left_unfinished.py"
PING_PONG = "tests/operators/test_ping_pong.py"
PING_PONG_COMPILED = "tests/operators/test_ping_pong_compiled.py"
PING_PONG_WRAPPERS = "tests/operators/test_ping_pong_wrappers.py"
LATE = "tests/runtime/test_late_results.py"
STREAM_ORDER = "tests/runtime/test_stream_order.py"
DISPATCHER = "cpp/runtime/dispatcher.cpp"
PROTOCOL = "cpp/runtime/protocol.cpp"
PROTOCOL_FAULTS = "cpp/runtime/protocol_faults.cpp"
STREAM_TRANSPORT = "cpp/transport/stream_transport.cpp"

FAULTS = [
    # ---- results that leave late
    Fault(
        "a slot is free before its results have left",
        PROTOCOL,
        "transport_->signal_after(put_[static_cast<size_t>(slot())], ",
        "transport_->signal_after(0, ",
        (LATE,),
    ),
    Fault(
        "a step begins before the results of its slot have left",
        PROTOCOL,
        "    transport_->quiet_until(put_[static_cast<size_t>(step.slot)]);",
        "    static_cast<void>(put_);",
        (LATE,),
    ),
    Fault(
        "a step ends before its tensors have been read",
        PROTOCOL,
        "    transport_->quiet_until(dispatched_[static_cast<size_t>(slot())]);",
        "    static_cast<void>(dispatched_);",
        (LATE,),
    ),
    Fault(
        "a queued step ends when everything has left",
        STREAM_TRANSPORT,
        "void StreamTransport::await_reads(int64_t slot) { streams_->wait_for(Stream::kWork, read_of(slot)); }",
        "void StreamTransport::await_reads(int64_t slot) {\n  streams_->record(read_of(slot), Stream::kTransfer);\n"
        "  streams_->wait_for(Stream::kWork, read_of(slot));\n}",
        (STREAM_ORDER,),
    ),
    Fault(
        "a queued step ends before its tensors have been read",
        STREAM_TRANSPORT,
        "{ streams_->wait_for(Stream::kWork, read_of(slot)); }",
        "{ static_cast<void>(slot); }",
        (STREAM_ORDER,),
    ),
    Fault(
        "a queued step begins before the results of its slot have left",
        STREAM_TRANSPORT,
        "  streams_->wait_for(Stream::kWork, sent_of(slot));\n  has_sent_ = false;",
        "  has_sent_ = false;",
        (STREAM_ORDER,),
    ),
    Fault(
        "a replay does not wait for results of steps before it",
        PROTOCOL,
        "  stream_->join();",
        "",
        (STREAM_ORDER,),
    ),
    Fault(
        "to check a plan queues what a replan needs",
        PROTOCOL,
        "  stream_->set_tape(std::move(tape));\n",
        "  if (is_complete) stream_->join();\n  stream_->set_tape(std::move(tape));\n",
        (STREAM_ORDER,),
    ),
    Fault(
        "a context is closed while its rows are on the way to other hosts",
        STREAM_TRANSPORT,
        "streams_->quiet(heaps_.sender);\n  } catch",
        "static_cast<void>(heaps_);\n  } catch",
        (STREAM_ORDER,),
    ),
    Fault(
        "memory of a backward step is given back when a longer one comes",
        DISPATCHER,
        "    s.deltas.push_back(backend_.allocate(s.delta_bytes));",
        "    s.deltas = {backend_.allocate(s.delta_bytes)};",
        ("tests/runtime/test_kept_memory.py",),
    ),
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
        "cpp/runtime/server_tasks.cpp",
        "scores.deterministic};",
        "false};",
        ("tests/attention/test_deterministic.py",),
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
        "    protocol_.await_credit(Direction::kOut, peer, round);",
        "",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "credit is granted for the step after next too",
        PROTOCOL,
        "transport_->signal(static_cast<int>(peer), word, given);",
        "transport_->signal(static_cast<int>(peer), word, sequence(at_.now.number + 2, round));",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "credit is granted for all rounds at once",
        PROTOCOL,
        "transport_->signal(static_cast<int>(peer), word, given);",
        "transport_->signal(static_cast<int>(peer), word, sequence(at_.now.number, 99));",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "a slot is said to be free a step too early",
        PROTOCOL,
        "signals_.freed(slot(), rank()), sequence(at_.now.number, 0));",
        "signals_.freed(slot(), rank()), sequence(at_.now.number + 2, 0));",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "that a slot is free is not awaited",
        PROTOCOL,
        "      wait(freed);",
        "",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "credit alone lets rows leave",
        PROTOCOL,
        "      if (last == at_.credits.before(slot())) return compare_with(peer);",
        "",
        (PARTS,),
    ),
    Fault(
        "peers that need no credit are not compared with",
        PROTOCOL,
        "  compare_with_early_senders(slot());",
        "",
        ("tests/runtime/test_faults.py",),
    ),
    Fault(
        "rows for other hosts are packed over those that are on their way",
        "cpp/transport/stream_transport.cpp",
        "  if (sends_late) streams_->quiet(heaps_.sender);",
        "",
        ("tests/transport/test_stream_hosts.py", "tests/runtime/test_recording.py"),
    ),
    Fault(
        "credit waits behind what a full send arena sends",
        "cpp/transport/stream_transport.cpp",
        "  send(slot_);\n",
        "  auto later = std::exchange(early_sends_, {});\n  send(slot_);\n  early_sends_ = std::move(later);\n",
        ("tests/transport/test_stream_hosts.py",),
    ),
    Fault(
        "what goes to another host awaits no credit",
        "cpp/transport/stream_transport.cpp",
        "               .credit = next_.credit,",
        "               .credit = nullptr,",
        ("tests/transport/test_stream_hosts.py", "tests/runtime/test_recording.py"),
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
        "  protocol_.await_rows(step.slice.waits(step.phase), Direction::kOut, {round, round + 1});",
        "",
        (STEPS, TRANSPORT),
    ),
    Fault(
        "a peer that refused a call and left is looked at once",
        PROTOCOL_FAULTS,
        "    compare_with(waiting_.peer);\n    compare_earlier_calls(waiting_.peer);",
        "    compare_earlier_calls(waiting_.peer);",
        ("tests/runtime/test_told_faults.py",),
    ),
    Fault(
        "what a peer refused before this rank's call is not looked for",
        PROTOCOL_FAULTS,
        "    compare_earlier_calls(waiting_.peer);\n",
        "",
        ("tests/runtime/test_told_faults.py",),
    ),
    Fault(
        "a signal does not wait for earlier puts",
        "cpp/emulation/reordering.cpp",
        "  if (const Write& drawn = held_[pick]; drawn.is_signal) {",
        "  if (const Write& drawn = held_[pick]; drawn.is_signal && drawn.value == 0) {",
        (STEPS, TRANSPORT),
    ),
    # ---- faults of peers
    Fault(
        "the digest of a plan is not compared",
        PROTOCOL_FAULTS,
        "      if (theirs == call_word() && digest == at_.now.plan_digest) {",
        "      if (theirs == call_word()) {",
        ("tests/runtime/test_faults.py",),
    ),
    Fault(
        "the layer of a call is not compared",
        PROTOCOL_FAULTS,
        "  if (may_be_one_layer(layer, at_.now.layer)) return;",
        "  return;",
        ("tests/runtime/test_call_mismatch.py",),
    ),
    Fault(
        "a backward is published without its layer",
        "python/distca/caller.py",
        "        return _OperatorCall(self, operator, compares, forward_step)",
        '        return _OperatorCall(self, operator, compares and not operator.endswith("backward"), forward_step)',
        ("tests/runtime/test_call_mismatch.py",),
    ),
    Fault(
        "the forward step of a backward is not compared",
        PROTOCOL_FAULTS,
        "  if (forward_step == own || forward_step == 0 || own == 0) return;",
        "  return;",
        ("tests/runtime/test_call_mismatch.py",),
    ),
    Fault(
        "a backward in parts does not know its forward step",
        "python/distca/steps.py",
        'calls("dispatch_backward", forward_step=self.number)',
        'calls("dispatch_backward")',
        ("tests/runtime/test_call_mismatch.py",),
    ),
    Fault(
        "forward steps are compared in ticks, where ranks are in different ones",
        PROTOCOL,
        "plan.label[0] == 0 ? forward_step_.load() : 0",
        "forward_step_.load()",
        ("tests/runtime/test_call_mismatch.py",),
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
        PROTOCOL_FAULTS,
        "  if (!gone || gone->orderly) return;",
        "  return;",
        (DEATH,),
    ),
    Fault(
        "a fault that was told before a rank left is not looked for",
        PROTOCOL_FAULTS,
        "  if (gone) check_faults();",
        "",
        (TOLD,),
    ),
    Fault(
        "a call that a rank refuses is not told",
        "cpp/runtime/context.cpp",
        "      protocol_.refuse(why);",
        "      continue;",
        (TOLD,),
    ),
    Fault(
        "who is told of a fault tells the others that it is its own",
        PROTOCOL_FAULTS,
        "static_cast<uint64_t>(fault.found_by < 0 ? rank() : fault.found_by));",
        "static_cast<uint64_t>(rank()));",
        (TOLD,),
    ),
    Fault(
        "a forked child keeps the sockets",
        "cpp/common/fork_guard.cpp",
        "                     for (const int fd : watch().open) ::close(fd);",
        "",
        (f"{DEATH}::test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent",),
    ),
    Fault(
        "a rank that misses a peer while it connects names no other",
        "cpp/transport/shm_mesh.cpp",
        'or the address is of an earlier run", others_gone(to),',
        'or the address is of an earlier run",',
        (f"{DEATH}::test_a_rank_whose_peers_end_one_after_the_other_while_it_connects_names_the_first",),
    ),
    Fault(
        "a wait lets no handler of a signal run",
        "cpp/transport/transport.cpp",
        "if (next_check != Clock::time_point{}) check_interrupt();",
        "",
        (INTERRUPTS,),
    ),
    Fault(
        "what a handler of a signal raised is never raised",
        "cpp/python/interrupt.cpp",
        "{ Py_AddPendingCall(&raise_pending_call, nullptr); }",
        "{}",
        (INTERRUPTS,),
    ),
    Fault(
        "what a handler of a signal raised comes up where the job is told, and ends there",
        "cpp/python/contexts.cpp",
        "  const RaiseAfterwards afterwards;",
        "",
        (f"{INTERRUPTS}::test_the_rest_of_the_job_is_told_what_a_handler_has_raised",),
    ),
    Fault(
        "a rank that connects lets no handler of a signal run",
        "cpp/transport/shm_mesh.cpp",
        "    check_interrupt();",
        "",
        (INTERRUPTS,),
    ),
    Fault(
        "heaps of different sizes are not noticed",
        "cpp/transport/shm_mesh.cpp",
        "    require(hello.heap_bytes == group_.heap_bytes,",
        "    require(true,",
        (TRANSPORT,),
    ),
    Fault(
        "queued steps compare with their neighbours alone",
        PROTOCOL,
        "  if (stream_ && !transport_->peek_asks())",
        "  if (false)",
        ("tests/runtime/test_streams.py",),
    ),
    # ---- exchanges of all ranks
    Fault(
        "ranks of an exchange do not compare their plans",
        PROTOCOL,
        "        for (int64_t p = 0; p < num_ranks(); ++p) compare_with(p);",
        "",
        (TORCH_FAULTS,),
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
        (TORCH_FAULTS,),
    ),
    Fault(
        "a rank that fails leaves its group without a word",
        "python/distca/connect/exchange.py",
        "            self._report(kind, text)",
        "            pass",
        (TORCH_FAULTS,),
    ),
    # ---- errors
    Fault(
        "a backward does not know its layer",
        "python/distca/ops.py",
        "        out.grad_fn.metadata[_LAYER] = layer_backward",
        "        pass",
        ("tests/runtime/test_call_mismatch.py",),
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
        PROTOCOL_FAULTS,
        "static_cast<uint64_t>(part_) << 1 |",
        "",
        (PARTS_MISTAKES,),
    ),
    Fault(
        "peers are not told of a step that is given up",
        "python/distca/context.py",
        "            self._core.abandon(step, why)",
        "            pass",
        (UNFINISHED,),
    ),
    Fault(
        "inputs may change while a step is under way",
        "python/distca/steps.py",
        "        if (name := self._call.changed_input()) is not None:",
        "        if (name := None) is not None:",
        (UNFINISHED,),
    ),
    Fault(
        "a half runs under the saved-tensor hooks of the other",
        "python/distca/pingpong/thread_state.py",
        "        self._restore_hooks()",
        "        pass",
        (PING_PONG,),
    ),
    Fault(
        "a half draws random numbers of the other",
        "python/distca/pingpong/thread_state.py",
        "        self.random.restore()",
        "        pass",
        (PING_PONG,),
    ),
    Fault(
        "halves share what autocast has cast for one of them",
        "python/distca/pingpong/thread_state.py",
        "            torch.clear_autocast_cache()",
        "            pass",
        (PING_PONG,),
    ),
    Fault(
        "FSDP2 frees the weights of the half that comes later",
        "python/distca/pingpong/ping_pong.py",
        "    module.set_reshard_after_forward(False, recurse=False)",
        "    pass",
        (PING_PONG_WRAPPERS,),
    ),
    Fault(
        "compiled code in a half gives no turn away",
        "python/distca/ops.py",
        "    if plan.in_parts or in_half():",
        "    if not torch.compiler.is_compiling() and (plan.in_parts or in_half()):",
        (PING_PONG_COMPILED,),
    ),
    Fault(
        "compiled code that finds its plan elsewhere gives no turn away",
        "python/distca/ops.py",
        "    if plan.in_parts or in_half():",
        "    if plan.in_parts or (not torch.compiler.is_compiling() and in_half()):",
        (PING_PONG_COMPILED,),
    ),
    Fault(
        "a half does not count what compiled layers call",
        "python/distca/pingpong/turns.py",
        "        half.calls += 1",
        "        half.calls += 0",
        (PING_PONG_COMPILED,),
    ),
    Fault(
        "a half is labelled with rows of the other",
        "python/distca/planner/halves.py",
        "        taken = whole.index_select(dim, rows)",
        "        taken = whole.narrow(dim, 0, len(rows))",
        ("tests/apps/test_train_options.py", "tests/integrations/test_hf_ping_pong.py"),
    ),
    Fault(
        "the loss of a half is a mean over its own targets",
        "python/distca/integrations/hf_ping_pong.py",
        '            call["num_items_in_batch"] = max(targets, 1)',
        "            pass",
        ("tests/integrations/test_hf_ping_pong.py",),
    ),
    Fault(
        "ranks whose heaps differ in size write into each other's all the same",
        "cpp/transport/shared_heaps.cpp",
        'require(offer.heap_bytes == heap_bytes, "rank "',
        'require(offer.heap_bytes > 0, "rank "',
        ("tests/connect/test_agreement.py",),
    ),
]
