#include "runtime/protocol.h"

#include <algorithm>
#include <array>
#include <bit>

#include "common/digest.h"
#include "common/interrupt.h"

namespace distca::runtime {
namespace {

/// The number of the first step that only joins a tape.
constexpr uint64_t kFirstRecorded = uint64_t{1} << 40;
constexpr const char* kOwnRows = "its own rows to arrive";

}  // namespace

Protocol::Protocol(std::unique_ptr<transport::Transport> transport, std::string context_name, int64_t slot_bytes,
                   std::chrono::milliseconds timeout)
    : transport_(std::move(transport)),
      stream_(transport_->stream_order()),
      signals_(transport_->num_ranks()),
      name_(std::move(context_name)),
      arena_bytes_(slot_bytes + MaxLogits::bytes(transport_->num_ranks())),
      timeout_(timeout),
      watch_([this] { watch(); }),
      agree_([this] {
        for (int64_t p = 0; p < num_ranks(); ++p) compare_with(p);
      }) {
  at_.credits = Credits(num_ranks());
  if (stream_) stream_->watch([this] { look(); });
}

Protocol::~Protocol() {
  drain();  // before the watch ends: a fault may be all that ends the streams' waits
  if (stream_) stream_->watch(nullptr);
}

void Protocol::drain() noexcept {
  if (stream_) transport_->quiet();
}

std::string Protocol::where() const {
  return message("context \"", name_, "\", rank ", rank(), " of ", num_ranks(), global_name(rank()), ", ",
                 at_.now.name());
}

std::string Protocol::global_name(int64_t rank) const {
  return global_ranks_.empty() ? "" : message(" (global rank ", global_ranks_.at(static_cast<size_t>(rank)), ")");
}

std::string Protocol::name_of(int64_t rank) const { return message("rank ", rank, global_name(rank)); }

void Protocol::set_job(std::vector<int64_t> global_ranks, OnFault on_fault) {
  require(global_ranks.empty() || static_cast<int64_t>(global_ranks.size()) == num_ranks(), "context \"", name_,
          "\": ", global_ranks.size(), " global ranks for ", num_ranks(), " ranks");
  global_ranks_ = std::move(global_ranks);
  on_fault_ = std::move(on_fault);
}

int64_t Protocol::free_slot() const {
  for (int64_t i = 1; i <= kNumSlots; ++i) {
    const int64_t slot = (at_.last_slot + i) % kNumSlots;
    if (!busy_[static_cast<size_t>(slot)]) return slot;
  }
  return -1;
}

void Protocol::check_healthy() const {
  require<ContextPoisonedError>(poison_.empty(), "context \"", name_, "\" was abandoned after a fault; ",
                                "close it and make a new one with distca.init. The fault was: ", poison_);
}

uint64_t ScoreOptions::options_word() const {
  const uint64_t cap = std::bit_cast<uint32_t>(softcap + 0.f);  // without a sign
  return uint64_t{finds_max_logits} << 63 | cap << 32 | std::bit_cast<uint32_t>(scale);
}

void Protocol::describe_plan(const plan::Header& plan) {
  const auto digest = static_cast<uint64_t>(plan.plan_digest);
  const auto known = std::find_if(described_.begin(), described_.end(),
                                  [&](const auto& described) { return described.first == digest; });
  if (known != described_.end() && !transport_->is_collective()) return;
  const auto index =
      known != described_.end() ? known - described_.begin() : num_described_++ % Signals::kDescribedPlans;
  auto& [known_digest, origin] = described_[static_cast<size_t>(index)];
  known_digest = digest;
  origin = plan::origin_of(plan);
  const int64_t word = signals_.described_plan(index);
  transport_->publish(word, 0);
  for (size_t i = 0; i < origin.size(); ++i) transport_->publish(word + 1 + static_cast<int64_t>(i), origin[i]);
  transport_->publish(word, digest);
}

StepId Protocol::begin(plan::Phase phase, const plan::Header& plan, const ScoreOptions& scores, Part part) {
  describe_plan(plan);
  at_.last_slot = free_slot();
  busy_[static_cast<size_t>(at_.last_slot)] = true;
  // Plans of ticks have labels. Ranks may be in different micro-batches there, and thus in different forward steps.
  const StepId step{++at_.num_steps,
                    at_.last_slot,
                    phase,
                    static_cast<uint64_t>(plan.plan_digest),
                    scores.options_word(),
                    layer_,
                    plan.label[0] == 0 ? forward_step_.load() : 0};
  at_.credits.use(step.slot, step.number);
  enter(step, part);
  const Timer timer(*this, kOwnRows, /*is_wait=*/true);
  if (stream_)
    stream_->reuse(step.slot);
  else
    transport_->quiet_until(put_[static_cast<size_t>(step.slot)]);
  return step;
}

void Protocol::resume(const StepId& step, Part part) {
  enter(step, part);
  for (int64_t slot = 0; slot < kNumSlots; ++slot)
    if (!busy_[static_cast<size_t>(slot)]) compare_with_early_senders(slot);
}

void Protocol::enter(const StepId& step, Part part) {
  at_.now = step;
  part_ = part;
  if (is_silent_) {
    for (const uint64_t word : {call_word(), step.plan_digest, step.options_word})
      calls_.add(static_cast<int64_t>(word));
  } else {
    publish();
  }
}

void Protocol::publish() {
  const uint64_t call = ++num_calls_;
  const StepId& step = at_.now;
  // The call word is 0 while the others change, so that nobody reads the digest of one call under the number of
  // another.
  transport_->publish(signals_.call(call), 0);
  transport_->publish(signals_.digest(call), step.plan_digest);
  transport_->publish(signals_.options_word(call), step.options_word);
  transport_->publish(signals_.layer(call), step.layer);
  transport_->publish(signals_.forward_step(call), step.forward_step);
  transport_->publish(signals_.call(call), call_word());
  transport_->publish(signals_.latest_step(), at_.num_steps);
  check();
  // If not all ranks agree, some two neighbours differ, and the later one of them sees it here. Over a collective
  // transport all ranks see it in the first exchange.
  if (num_ranks() > 1) {
    compare_with((rank() + 1) % num_ranks());
    compare_with((rank() + num_ranks() - 1) % num_ranks());
  }
  // The waits of queued steps compare nothing. Of two ranks that exchange rows, the later one therefore compares here,
  // before it sends any. That is left out where it would cost a question to each rank.
  if (stream_ && !transport_->peek_asks())
    for (int64_t i = 2; i < num_ranks() - 1; ++i) compare_with((rank() + i) % num_ranks());
}

void Protocol::set_tape(std::shared_ptr<transport::Tape> tape, bool is_complete) {
  require(stream_ != nullptr, "steps over transport '", transport_->name(), "' are done by the host, not queued on a ",
          "device: they cannot be recorded");
  try {
    stream_->set_tape(std::move(tape));
  } catch (...) {  // the device may lack memory for it; steps that come now are to be done
    stream_->set_tape(nullptr);
    throw;
  }
  before_ = at_;
  calls_ = Digest();
  is_silent_ = true;
  at_.last_slot = kNumSlots - 1;
  if (!is_complete) at_.num_steps = kFirstRecorded + num_recorded_;
}

void Protocol::take_back() {
  stream_->set_tape(nullptr);
  if (at_.num_steps >= kFirstRecorded) num_recorded_ = at_.num_steps - kFirstRecorded;
  at_ = before_;
  busy_ = {};
  is_silent_ = false;
}

void Protocol::announce_replay() {
  stream_->set_tape(nullptr);
  stream_->join();
  is_silent_ = false;
  at_.now.plan_digest = calls_.value();
  part_ = Part::kReplay;
  publish();
}

void Protocol::replay(const transport::Tape& tape) { stream_->replay(tape); }

void Protocol::grant(std::span<const plan::WaitRow> waits) {
  if (transport_->is_collective()) return;
  for (const plan::WaitRow& w : waits) {
    if (stream_) check_present(w.peer, rows_wait(static_cast<plan::Direction>(w.direction), w.peer, w.round).what);
    const bool in = w.direction == static_cast<int64_t>(plan::Direction::kIn);
    if (in && at_.credits.receives(slot(), w.peer)) continue;  // the peer sends in several rounds
    const bool has_it = in && is_freed_early() && at_.credits.received_before(slot(), w.peer);
    if ((in || w.round == 0) && !has_it) give_credit(w.peer, 0, /*after_work=*/false);
    if (in) at_.credits.receive(slot(), w.peer);
  }
  compare_with_early_senders(slot());
}

/// Compares with peers that may send rows into the slot although this rank expects none of them. With the same plan
/// they send none. Of two ranks that differ the other one compares too, before it sends (await_credit); therefore one
/// of them notices before rows are used.
void Protocol::compare_with_early_senders(int64_t slot) {
  if (!is_freed_early()) return;
  for (int64_t p = 0; p < num_ranks(); ++p)
    if (busy_[static_cast<size_t>(slot)] ? at_.credits.received_before(slot, p) : at_.credits.receives(slot, p))
      compare_with(p);
}

void Protocol::grant_round(std::span<const plan::WaitRow> waits, int64_t round) {
  if (transport_->is_collective()) return;
  for (const plan::WaitRow& w : waits) {
    if (w.direction == static_cast<int64_t>(plan::Direction::kOut) && w.round == round)
      give_credit(w.peer, round, /*after_work=*/true);
  }
}

/// Gives credit for a round once, also to a peer that sends both rows for tasks and rows home. Otherwise the second
/// signal could arrive after that of a later round and take it back.
void Protocol::give_credit(int64_t peer, int64_t round, bool after_work) {
  const uint64_t given = sequence(at_.now.number, round);
  if (!at_.credits.give(slot(), peer, given)) return;
  const int64_t word = signals_.credit(slot(), rank());
  if (stream_)
    stream_->grant(static_cast<int>(peer), word, given, slot(), after_work);
  else
    transport_->signal(static_cast<int>(peer), word, given);
}

Protocol::Wait Protocol::credit_wait(plan::Direction direction, int64_t peer, int64_t round) const {
  const bool in = direction == plan::Direction::kIn;
  return {in ? "credit to send rows to its server arena" : "credit to send rows home", peer,
          signals_.credit(slot(), peer), sequence(at_.now.number, round), round};
}

Protocol::Arrival Protocol::arrival_of(plan::Direction direction, int64_t from, int64_t round) const {
  if (direction == plan::Direction::kIn) return {signals_.arrived(slot(), round, from), sequence(at_.now.number, 0)};
  return {signals_.arrived_home(slot(), from), sequence(at_.now.number, round)};
}

Protocol::Wait Protocol::rows_wait(plan::Direction direction, int64_t peer, int64_t round) const {
  const bool in = direction == plan::Direction::kIn;
  const Arrival arrival = arrival_of(direction, peer, round);
  return {in ? "rows for tasks served here" : "rows that come home", peer, arrival.word, arrival.value, round};
}

void Protocol::await_credit(plan::Direction direction, int64_t peer, int64_t round) {
  if (transport_->is_collective()) return;
  const Wait w = credit_wait(direction, peer, round);
  if (is_freed_early() && direction == plan::Direction::kIn) {
    if (at_.credits.sends(slot(), peer)) return;  // awaited for an earlier round
    // The `freed` word is awaited also where more credit is needed, because no two signals to one word may be under
    // way.
    if (const uint64_t last = at_.credits.send(slot(), peer); last != 0) {
      Wait freed = w;
      freed.word = signals_.freed(slot(), peer);
      freed.value = sequence(last, 0);
      wait(freed);
      if (last == at_.credits.before(slot())) return compare_with(peer);
    }
  }
  if (!stream_) return wait(w);
  check_present(peer, w.what);
  stream_->await_credit({static_cast<int>(peer), w.word, w.value, transport::Awaited::kCredit, round});
}

void Protocol::put(int64_t peer, int64_t target, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& source,
                   const RowExtent& extent) {
  // The transport checks against the heap, of which a slot is only a part.
  const int64_t bytes = (extent.num_rows - 1) * dst_row_stride + extent.num_heads * dst_head_stride;
  if (target < 0 || target > arena_bytes_ || bytes > arena_bytes_ - target) {  // where() allocates
    throw PlanFormatError(message(where(), ": a put of ", bytes, " bytes at offset ", target,
                                  " does not fit into the arena of ", name_of(peer), ", which has ", arena_bytes_,
                                  " bytes"));
  }
  const bool is_copy = trace_.is_on() && transport_->copies_in_put();
  const int64_t begin_ns = is_copy ? Trace::now() : 0;
  transport_->put(static_cast<int>(peer), slot() * arena_bytes_ + target, dst_row_stride, dst_head_stride, source,
                  extent);
  if (is_copy) trace_.add(Copy{peer, extent.bytes(), begin_ns, Trace::now()});
  put_[static_cast<size_t>(slot())] = transport_->mark();
}

void Protocol::end_dispatch() {
  if (stream_)
    stream_->end_reads(slot());
  else
    dispatched_[static_cast<size_t>(slot())] = put_[static_cast<size_t>(slot())];
}

void Protocol::announce(plan::Direction direction, int64_t peer, int64_t round) {
  const Arrival arrival = arrival_of(direction, rank(), round);
  if (stream_)
    stream_->announce(static_cast<int>(peer), arrival.word, arrival.value);
  else
    transport_->signal(static_cast<int>(peer), arrival.word, arrival.value);
}

bool Protocol::flush(bool more) {
  if (stream_) {
    stream_->send(slot());
    return more;
  }
  if (!transport_->is_collective()) return more;
  const Timer timer(*this, "all ranks to exchange rows", /*is_wait=*/true);
  try {
    return transport_->exchange(more, agree_);
  } catch (const PeerDiedError& error) {
    throw PeerDiedError(message(where(), ": ", error.what()));
  } catch (const PeerLeftError& error) {
    throw PeerLeftError(message(where(), ": ", error.what()));
  } catch (const PeerTimeoutError& error) {
    throw PeerTimeoutError(message(where(), ": ", error.what()));
  }
}

void Protocol::await_rows(std::span<const plan::WaitRow> waits, plan::Direction direction, Rounds rounds) {
  const bool in = direction == plan::Direction::kIn;
  stream_waits_.clear();
  for (const plan::WaitRow& row : waits) {
    if (row.direction != static_cast<int64_t>(direction) || row.round < rounds.begin || row.round >= rounds.end)
      continue;
    const Wait w = rows_wait(direction, row.peer, row.round);
    if (stream_)
      stream_waits_.push_back({static_cast<int>(w.peer), w.word, w.value,
                               in ? transport::Awaited::kRowsIn : transport::Awaited::kRowsHome, row.round});
    else
      wait(w);
  }
  if (stream_) stream_->await_rows(stream_waits_, slot());
}

void Protocol::poison(const RowView& rows, const RowExtent& n) {
  if (stream_) stream_->poison(rows, n);
}

void Protocol::settle() {
  const Timer timer(*this, kOwnRows, /*is_wait=*/true);
  if (stream_)
    stream_->await_reads(slot());
  else
    transport_->quiet_until(dispatched_[static_cast<size_t>(slot())]);
}

void Protocol::end() {
  if (stream_) stream_->end(slot());
  if (is_freed_early()) {
    for (int64_t p = 0; p < num_ranks(); ++p) {
      if (at_.credits.receives(slot(), p)) {
        transport_->signal_after(put_[static_cast<size_t>(slot())], static_cast<int>(p), signals_.freed(slot(), rank()),
                                 sequence(at_.now.number, 0));
      }
    }
  }
  busy_[static_cast<size_t>(slot())] = false;
}

void Protocol::wait(const Wait& w) {
  waiting_ = w;
  const Timer timer(*this, w.what, /*is_wait=*/true, w.peer);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  try {
    if (!transport_->wait(w.word, w.value, deadline, watch_)) time_out();
  } catch (const Interrupted& interrupted) {
    throw Interrupted(
        message(where(), ": ", interrupted.what(), " while it waited for ", name_of(w.peer), ": ", w.what));
  }
  waiting_ = {};
  compare_with(w.peer);  // also if nothing was left to wait for
}

void Protocol::record(const Timer& timer) {
  if (is_silent_) return;
  trace_.add(Span{timer.name_, timer.is_wait_, at_.now.number, at_.now.slot, static_cast<int64_t>(at_.now.phase),
                  timer.peer_, timer.begin_ns_, Trace::now()});
}

}  // namespace distca::runtime
