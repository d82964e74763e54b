// What is said and found of faults: of calls that differ, of peers that are gone, of waits that last too long.
#include <array>
#include <bit>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "runtime/protocol.h"

namespace distca::runtime {
namespace {

const char* phase_name(plan::Phase phase) { return phase == plan::Phase::kForward ? "forward" : "backward"; }

/// The word of a call: its number << 5 | slot << 4 | part << 1 | phase.
constexpr int kCallShift = 5;
static_assert(kNumSlots == 2);

/// "forward", or, of a call that does a part of it, "attend of forward (slot 1)".
std::string describe_call(uint64_t word) {
  constexpr std::array kParts = {"", "dispatch of ", "attend of ", "collect of ", "a replay up to "};
  const auto part = static_cast<size_t>(word >> 1 & 7);
  const std::string slot = part == 0 ? "" : message(" (slot ", word >> 4 & 1, ")");
  return kParts[part] + std::string(phase_name(static_cast<plan::Phase>(word & 1))) + slot;
}

std::string hex(uint64_t x) {
  std::ostringstream out;
  out << "0x" << std::hex << std::setw(16) << std::setfill('0') << x;
  return out.str();
}

std::string describe(uint64_t scale_and_softcap) {
  return message("scale ", std::bit_cast<float>(static_cast<uint32_t>(scale_and_softcap)), " and softcap ",
                 std::bit_cast<float>(static_cast<uint32_t>(scale_and_softcap >> 32)));
}

}  // namespace

std::string StepId::name() const { return message("step ", number, " (", phase_name(phase), ")"); }

uint64_t Protocol::call_word() const {
  return num_calls_ << kCallShift | static_cast<uint64_t>(at_.now.slot) << 4 | static_cast<uint64_t>(part_) << 1 |
         static_cast<uint64_t>(at_.now.phase);
}

void Protocol::watch() {
  check_faults();
  compare_with(waiting_.peer);
  check_departed();
  if (const auto gone = transport_->departed(static_cast<int>(waiting_.peer))) {
    // It may have sent what we wait for before it left.
    if (transport_->load(waiting_.word) >= waiting_.value) return;
    fault_details_ = {static_cast<uint64_t>(gone->peer), gone->orderly};
    throw PeerDiedError(message(where(), ": rank ", gone->peer, " closed its context while this rank waits for ",
                                waiting_.what, " of it"));
  }
}

void Protocol::check() {
  check_faults();
  check_departed();
  check_streams();
}

void Protocol::check_present(int64_t peer, const char* what) {
  const auto gone = transport_->departed(static_cast<int>(peer));
  if (!gone) return;
  fault_details_ = {static_cast<uint64_t>(peer), gone->orderly};
  throw PeerDiedError(
      message(where(), ": rank ", peer, gone->orderly ? " closed its context" : " died", " and owes this rank ", what));
}

void Protocol::check_streams() {
  const auto fault = stream_ ? stream_->fault() : std::nullopt;
  if (!fault) return;
  constexpr std::array kAwaited = {"nothing", "credit to send it rows", "rows for tasks served here",
                                   "rows that come home"};
  fault_details_[0] = static_cast<uint64_t>(fault->peer);
  throw PeerTimeoutError(message(where(), ": a step before this one waited ",
                                 static_cast<double>(timeout_.count()) / 1000.0, " s for rank ", fault->peer, ": ",
                                 kAwaited[static_cast<size_t>(fault->awaited)], ", round ", fault->round,
                                 "; seen step ", fault->seen >> 16, " round ", fault->seen & 0xffff, ", expected step ",
                                 fault->expected >> 16, " round ", fault->expected & 0xffff, "; rank ", fault->peer,
                                 " is at step ", transport_->peek(fault->peer, signals_.latest_step())));
}

void Protocol::look() noexcept {
  try {
    if (const auto fault = stream_->fault()) {
      // The details of this rank's own faults are those of its calls.
      tell_peers(FaultCode::kTimeout, {static_cast<uint64_t>(fault->peer)});
      return stream_->stop();
    }
    const auto gone = transport_->departed();
    bool stop = gone && !gone->orderly;
    for (int64_t p = 0; p < num_ranks(); ++p) stop = stop || transport_->load(signals_.fault_code(p)) != 0;
    if (stop) stream_->stop();
  } catch (const Error&) {
    // In a forked child there is no such thread; what else may fail here fails in the next call too.
  }
}

void Protocol::check_departed() {
  const auto gone = transport_->departed();
  if (!gone || gone->orderly) return;
  fault_details_[0] = static_cast<uint64_t>(gone->peer);
  throw PeerDiedError(
      message(where(), ": rank ", gone->peer, " died",
              waiting_.peer >= 0 ? message(" (this rank was waiting for rank ", waiting_.peer, ": ", waiting_.what, ")")
                                 : std::string()));
}

void Protocol::compare_with(int64_t peer) {
  const int p = static_cast<int>(peer);
  if (peer == rank()) return;
  const uint64_t call = num_calls_;
  const uint64_t theirs = transport_->peek(p, signals_.call(call));
  if (theirs >> kCallShift < call) return;
  if (theirs >> kCallShift == call) {
    std::array<uint64_t, Signals::kWords> words;
    if (!transport_->peek_words(p, signals_.digest(call), words)) return;  // that it is gone is found elsewhere
    const auto [digest, scores, sinks, still_theirs] = words;
    if (still_theirs == theirs) {
      if (theirs == call_word() && digest == at_.now.plan_digest) {
        if (scores == at_.now.scale_and_softcap && sinks == at_.now.sinks_digest) return;
        fault_details_ = {static_cast<uint64_t>(peer), theirs & 1, digest, at_.now.plan_digest};
        throw PlanMismatchError(message(where(), ": rank ", peer, " came to this step with ", describe(scores),
                                        ", this rank with ", describe(at_.now.scale_and_softcap),
                                        sinks == at_.now.sinks_digest ? "" : "; their attention sinks differ"));
      }
      fault_details_ = {static_cast<uint64_t>(peer), theirs & 1, digest, at_.now.plan_digest};
      throw PlanMismatchError(message(where(), ": rank ", peer, " came to this step with another ",
                                      theirs == call_word() ? "plan" : "call", ": it runs ", describe_call(theirs),
                                      " of plan ", hex(digest), ", this rank ", describe_call(call_word()), " of plan ",
                                      hex(at_.now.plan_digest),
                                      ". All ranks must make the same calls in the same order with the same plan"));
    }
  }
  // The peer is so far ahead that its history of this step is gone. Fine, unless we still wait for something of it.
  if (waiting_.peer == peer && transport_->load(waiting_.word) < waiting_.value) {
    fault_details_ = {static_cast<uint64_t>(peer), 0, 0, at_.now.plan_digest};
    throw PlanMismatchError(message(where(), ": rank ", peer, " is already at step ",
                                    transport_->peek(p, signals_.latest_step()), " and never gave ", waiting_.what,
                                    "; the ranks do not have the same plan (here ", hex(at_.now.plan_digest), ")"));
  }
}

void Protocol::time_out() {
  const int p = static_cast<int>(waiting_.peer);
  fault_details_[0] = static_cast<uint64_t>(waiting_.peer);
  const uint64_t seen = transport_->load(waiting_.word);
  throw PeerTimeoutError(message(where(), ": waited ", static_cast<double>(timeout_.count()) / 1000.0, " s for rank ",
                                 waiting_.peer, ": ", waiting_.what, ", round ", waiting_.round, "; seen step ",
                                 seen >> 16, " round ", seen & 0xffff, ", expected step ", waiting_.value >> 16,
                                 " round ", waiting_.round, "; rank ", waiting_.peer, " is at step ",
                                 transport_->peek(p, signals_.latest_step())));
}

void Protocol::check_faults() {
  for (int64_t p = 0; p < num_ranks(); ++p) {
    const auto code = static_cast<FaultCode>(transport_->load(signals_.fault_code(p)));
    if (code == FaultCode::kNone) continue;
    std::array<uint64_t, Signals::kFaultDetails> d;
    for (int64_t i = 0; i < Signals::kFaultDetails; ++i)
      d[static_cast<size_t>(i)] = transport_->load(signals_.fault_detail(p, i));
    fault_details_ = d;
    switch (code) {
      case FaultCode::kMismatch:
        throw PlanMismatchError(message(where(), ": rank ", p, " found that rank ", d[0],
                                        " came to the same step with another plan, scale, softcap or sinks: plan ",
                                        hex(d[2]), " on rank ", d[0], ", plan ", hex(d[3]), " on rank ", p));
      case FaultCode::kDied:
        throw PeerDiedError(message(where(), ": rank ", d[0], d[1] != 0 ? " closed its context" : " died", ", as rank ",
                                    p, " reports"));
      case FaultCode::kTimeout:
        throw PeerTimeoutError(message(where(), ": rank ", p, " gave up waiting for rank ", d[0]));
      case FaultCode::kUnfinished:
        throw PeerDiedError(message(where(), ": rank ", p, " left step ", d[0], " (",
                                    phase_name(static_cast<plan::Phase>(d[1])), ") unfinished"));
      default:
        throw PeerDiedError(message(where(), ": rank ", p, " abandoned this context after an error of its own"));
    }
  }
}

void Protocol::fail(const Error& error) noexcept {
  FaultCode code = FaultCode::kOther;
  if (std::strcmp(error.kind(), "PlanMismatchError") == 0) code = FaultCode::kMismatch;
  if (std::strcmp(error.kind(), "PeerDiedError") == 0) code = FaultCode::kDied;
  if (std::strcmp(error.kind(), "PeerTimeoutError") == 0) code = FaultCode::kTimeout;
  fail(error, code);
}

void Protocol::abandon(const StepId& step, const std::string& why) noexcept {
  if (!poison_.empty()) return;
  fault_details_ = {step.number, static_cast<uint64_t>(step.phase)};
  fail(InvalidArgumentError(message(step.name(), " of context \"", name_, "\" was dispatched on rank ", rank(),
                                    " and never collected", why)),
       FaultCode::kUnfinished);
}

void Protocol::fail(const Error& error, FaultCode code) noexcept {
  if (!poison_.empty()) return;
  poison_ = error.what();
  transport_->cancel();  // the tensors of a whole step that fails go with the error
  if (transport_->is_collective()) return transport_->abandon(error);
  tell_peers(code, fault_details_);
}

void Protocol::tell_peers(FaultCode code, const FaultDetails& details) noexcept {
  if (told_peers_.exchange(true)) return;
  try {
    for (int64_t p = 0; p < num_ranks(); ++p) {
      if (p == rank()) continue;
      for (int64_t i = 0; i < Signals::kFaultDetails; ++i)
        transport_->signal(static_cast<int>(p), signals_.fault_detail(rank(), i), details[static_cast<size_t>(i)]);
      transport_->signal(static_cast<int>(p), signals_.fault_code(rank()), static_cast<uint64_t>(code));
    }
  } catch (const Error&) {
    // In a forked child the transport refuses all use: the fault is the child's alone.
  }
}

}  // namespace distca::runtime
