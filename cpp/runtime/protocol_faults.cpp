// Finds faults and tells of them: calls that differ, peers that are gone, waits that last too long.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <iomanip>
#include <sstream>
#include <string_view>
#include <thread>

#include "runtime/protocol.h"

namespace distca::runtime {
namespace {

const char* phase_name(plan::Phase phase) { return phase == plan::Phase::kForward ? "forward" : "backward"; }

/// The word of a call: its number << 5 | slot << 4 | part << 1 | phase.
constexpr int kCallShift = 5;
static_assert(kNumSlots == 2);
Part part_of(uint64_t word) { return static_cast<Part>(word >> 1 & 7); }

/// "forward", or "attend of forward (slot 1)" for a call that does a part of a step.
std::string describe_call(uint64_t word) {
  constexpr std::array kParts = {"", "dispatch of ", "attend of ", "collect of ", "a replay up to ", "nothing of "};
  const auto part = static_cast<size_t>(part_of(word));
  const std::string slot = part == 0 ? "" : message(" (slot ", word >> 4 & 1, ")");
  return kParts[part] + std::string(phase_name(static_cast<plan::Phase>(word & 1))) + slot;
}

std::string hex(uint64_t x) {
  std::ostringstream out;
  out << "0x" << std::hex << std::setw(16) << std::setfill('0') << x;
  return out.str();
}

std::string describe_options(uint64_t word) {
  const bool finds_max_logits = word >> 63 != 0;
  return message("scale ", std::bit_cast<float>(static_cast<uint32_t>(word)), " and softcap ",
                 std::bit_cast<float>(static_cast<uint32_t>(word >> 32 & 0x7fffffffu)),
                 finds_max_logits ? " and asks for max_logits" : "");
}

/// "the backward pass of step 4 on rank 1, of step 3 on rank 0"
std::string describe_forward_steps(uint64_t a, int64_t rank_a, uint64_t b, int64_t rank_b) {
  return message("the backward pass of step ", a, " on rank ", rank_a, ", of step ", b, " on rank ", rank_b);
}

/// The kinds of faults outside of a context, by their numbers.
constexpr std::array<std::string_view, 4> kKindsElsewhere = {"PeerLeftError", "PeerDiedError", "PeerTimeoutError",
                                                             "PlanMismatchError"};

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
  if (const auto gone = departed(waiting_.peer)) {
    // Before it left, the peer may have sent what this rank waits for, or refused this call.
    if (transport_->load(waiting_.word) >= waiting_.value) return;
    compare_with(waiting_.peer);
    compare_earlier_calls(waiting_.peer);
    fault_ = {FaultCode::kLeft, {static_cast<uint64_t>(gone->peer)}};
    throw PeerLeftError(message(where(), ": ", name_of(gone->peer), " closed its context while this rank waits for ",
                                waiting_.what, " of it"));
  }
}

void Protocol::check() {
  check_faults();
  check_departed();
  check_streams();
}

std::optional<transport::Departure> Protocol::departed(int64_t peer) {
  const auto gone = peer < 0 ? transport_->departed() : transport_->departed(static_cast<int>(peer));
  if (gone) check_faults();
  return gone;
}

void Protocol::check_present(int64_t peer, const char* what) {
  const auto gone = departed(peer);
  if (!gone) return;
  if (!is_silent_) {  // it may have refused this call, or one before it, and then left; recorded steps are no calls
    compare_with(peer);
    compare_earlier_calls(peer);
  }
  fault_ = {gone->orderly ? FaultCode::kLeft : FaultCode::kDied, {static_cast<uint64_t>(peer)}};
  const std::string owes = message(" and owes this rank ", what);
  if (gone->orderly) throw PeerLeftError(message(where(), ": ", name_of(peer), " closed its context", owes));
  throw PeerDiedError(message(where(), ": ", name_of(peer), " died", owes));
}

void Protocol::check_streams() {
  const auto fault = stream_ ? stream_->fault() : std::nullopt;
  if (!fault) return;
  constexpr std::array kAwaited = {"nothing", "credit to send it rows", "rows for tasks served here",
                                   "rows that come home"};
  fault_ = {FaultCode::kTimeout, {static_cast<uint64_t>(fault->peer)}};
  throw PeerTimeoutError(
      message(where(), ": a step before this one waited ", static_cast<double>(timeout_.count()) / 1000.0, " s for ",
              name_of(fault->peer), ": ", kAwaited[static_cast<size_t>(fault->awaited)], ", round ", fault->round,
              "; seen step ", fault->seen >> 16, " round ", fault->seen & 0xffff, ", expected step ",
              fault->expected >> 16, " round ", fault->expected & 0xffff, "; ", step_of(fault->peer)));
}

void Protocol::look() noexcept {
  try {
    if (const auto fault = stream_->fault()) {
      // fault_ is not set here: it belongs to the thread that makes the calls.
      tell_peers({FaultCode::kTimeout, {static_cast<uint64_t>(fault->peer)}});
      return stream_->stop();
    }
    const auto gone = transport_->departed();
    bool stop = has_heard_ || (gone && !gone->orderly);
    for (int64_t p = 0; p < num_ranks(); ++p) stop = stop || transport_->load(signals_.fault_code(p)) != 0;
    if (stop) stream_->stop();
  } catch (const Error&) {
    // A forked child has no such thread. Other errors that occur here occur in the next call too.
  }
}

void Protocol::check_departed() {
  const auto gone = departed(/*peer=*/-1);
  if (!gone || gone->orderly) return;
  fault_ = {FaultCode::kDied, {static_cast<uint64_t>(gone->peer)}};
  throw PeerDiedError(message(
      where(), ": ", name_of(gone->peer), " died",
      waiting_.peer >= 0 ? message(" (this rank was waiting for ", name_of(waiting_.peer), ": ", waiting_.what, ")")
                         : std::string()));
}

void Protocol::compare_with(int64_t peer) {
  const int p = static_cast<int>(peer);
  if (peer == rank()) return;
  const uint64_t call = num_calls_;
  const uint64_t theirs = transport_->peek(p, signals_.call(call));
  if (theirs >> kCallShift < call) return;
  if (theirs >> kCallShift == call && part_of(theirs) == Part::kRefused) {
    fault_ = {FaultCode::kRefused, {static_cast<uint64_t>(peer)}, text_of(peer)};
    throw PeerLeftError(message(where(), ": ", name_of(peer), " refused this call: ", fault_.text));
  }
  if (theirs >> kCallShift == call) {
    std::array<uint64_t, Signals::kWords> words;
    if (!transport_->peek_words(p, signals_.digest(call), words)) return;  // that the peer is gone is found elsewhere
    const auto [digest, scores, layer, forward_step, still_theirs] = words;
    if (still_theirs == theirs) {
      if (theirs == call_word() && digest == at_.now.plan_digest) {
        if (scores == at_.now.options_word) {
          compare_layer(peer, layer);
          return compare_forward_step(peer, forward_step);
        }
        fault_ = {FaultCode::kMismatch, {static_cast<uint64_t>(peer), digest, at_.now.plan_digest}};
        throw PlanMismatchError(message(where(), ": ", name_of(peer), " came to this step with ",
                                        describe_options(scores), ", this rank with ",
                                        describe_options(at_.now.options_word)));
      }
      const std::string difference = difference_to(peer, digest);
      fault_ = {FaultCode::kMismatch, {static_cast<uint64_t>(peer), digest, at_.now.plan_digest}, difference};
      throw PlanMismatchError(message(where(), ": ", name_of(peer), " came to this step with another ",
                                      theirs == call_word() ? "plan" : "call", ": it runs ", describe_call(theirs),
                                      " of plan ", hex(digest), ", this rank ", describe_call(call_word()), " of plan ",
                                      hex(at_.now.plan_digest), difference,
                                      ". All ranks must make the same calls in the same order with the same plan"));
    }
  }
  // The peer is so far ahead that its history of this call is gone. That is an error only if this rank still waits for
  // something of it.
  if (waiting_.peer == peer && transport_->load(waiting_.word) < waiting_.value) {
    fault_ = {FaultCode::kMismatch, {static_cast<uint64_t>(peer), 0, at_.now.plan_digest}};
    throw PlanMismatchError(message(where(), ": ", step_of(peer), " and never gave ", waiting_.what,
                                    "; the ranks do not have the same plan (here ", hex(at_.now.plan_digest), ")"));
  }
}

void Protocol::compare_earlier_calls(int64_t peer) {
  const auto refused = [this](int64_t p, uint64_t call) {
    const uint64_t word = transport_->peek(static_cast<int>(p), signals_.call(call));
    return word >> kCallShift == call && part_of(word) == Part::kRefused;
  };
  for (uint64_t n = 1; n < Signals::kHistory && n < num_calls_; ++n) {
    const uint64_t call = num_calls_ - n;
    if (!refused(peer, call) || refused(rank(), call)) continue;
    fault_ = {FaultCode::kRefused, {static_cast<uint64_t>(peer)}, text_of(peer)};
    throw PeerLeftError(
        message(where(), ": ", name_of(peer), " refused a call that this rank has made: ", fault_.text));
  }
}

void Protocol::compare_layer(int64_t peer, uint64_t layer) {
  if (may_be_one_layer(layer, at_.now.layer)) return;
  fault_ = {FaultCode::kLayer, {static_cast<uint64_t>(peer), layer, at_.now.layer}};
  throw PlanMismatchError(message(where(), ": ", name_of(peer), " came to this step in another layer: ",
                                  describe_layers(layer, peer, at_.now.layer, rank()),
                                  ". All ranks must call the same layers in the same order"));
}

void Protocol::compare_forward_step(int64_t peer, uint64_t forward_step) {
  const uint64_t own = at_.now.forward_step;
  if (forward_step == own || forward_step == 0 || own == 0) return;
  fault_ = {FaultCode::kForwardStep, {static_cast<uint64_t>(peer), forward_step, own}};
  throw PlanMismatchError(message(where(), ": ", name_of(peer), " came to this step for ",
                                  describe_forward_steps(forward_step, peer, own, rank()),
                                  ". All ranks must run the backward passes of their forwards in the same order"));
}

std::string Protocol::difference_to(int64_t peer, uint64_t plan_digest) const {
  if (plan_digest == at_.now.plan_digest) return "";
  const auto ours = std::find_if(described_.begin(), described_.end(),
                                 [&](const auto& described) { return described.first == at_.now.plan_digest; });
  if (ours == described_.end()) return "";  // a replay, whose digest is over all its calls
  for (int64_t i = 0; i < Signals::kDescribedPlans; ++i) {
    std::array<uint64_t, Signals::kPlanWords> words = {};
    if (!transport_->peek_words(static_cast<int>(peer), signals_.described_plan(i), words)) return "";
    if (words[0] != plan_digest || transport_->peek(static_cast<int>(peer), signals_.described_plan(i)) != plan_digest)
      continue;
    plan::Origin theirs;
    std::copy(words.begin() + 1, words.end(), theirs.begin());
    return message(" (", plan::difference({theirs, peer}, {ours->second, rank()}), ")");
  }
  return "";
}

void Protocol::time_out() {
  fault_ = {FaultCode::kTimeout, {static_cast<uint64_t>(waiting_.peer)}};
  const uint64_t seen = transport_->load(waiting_.word);
  throw PeerTimeoutError(message(where(), ": waited ", static_cast<double>(timeout_.count()) / 1000.0, " s for ",
                                 name_of(waiting_.peer), ": ", waiting_.what, ", round ", waiting_.round,
                                 "; seen step ", seen >> 16, " round ", seen & 0xffff, ", expected step ",
                                 waiting_.value >> 16, " round ", waiting_.round, "; ", step_of(waiting_.peer)));
}

std::string Protocol::step_of(int64_t peer) const {
  std::array<uint64_t, 1> step = {};
  if (transport_->peek_words(static_cast<int>(peer), signals_.latest_step(), step))
    return message(name_of(peer), " is at step ", step[0]);
  return message(name_of(peer), " does not answer the question at which step it is");
}

void Protocol::check_faults() {
  if (has_heard_) {
    const std::lock_guard lock(heard_mutex_);
    fault_ = heard_;
    throw_elsewhere(fault_);
  }
  for (int64_t p = 0; p < num_ranks(); ++p) {
    const auto code = static_cast<FaultCode>(transport_->load(signals_.fault_code(p)));
    if (code == FaultCode::kNone) continue;
    Fault& f = fault_;
    f = {code, {}, text_of(p), static_cast<int64_t>(transport_->load(signals_.fault_detail(p, 0)))};
    for (size_t i = 0; i < f.details.size(); ++i)
      f.details[i] = transport_->load(signals_.fault_detail(p, 1 + static_cast<int64_t>(i)));
    const auto& d = f.details;
    if (code == FaultCode::kElsewhere) throw_elsewhere(f);
    const auto who = static_cast<int64_t>(d[0]);  // where the details begin with a rank
    const std::string by = message(where(), ": ", name_of(f.found_by));
    switch (code) {
      case FaultCode::kMismatch:
        if (d[1] == d[2])
          throw PlanMismatchError(message(by, " found that ", name_of(who),
                                          " came to the same step with another call, ",
                                          "scale or softcap, or one of the two asks for max_logits", f.text));
        throw PlanMismatchError(message(by, " found that ", name_of(who),
                                        " came to the same step with another plan: ", hex(d[1]), " on rank ", d[0],
                                        ", ", hex(d[2]), " on rank ", f.found_by, f.text));
      case FaultCode::kLayer:
        throw PlanMismatchError(message(by, " found that ", name_of(who), " came to the same step in another layer: ",
                                        describe_layers(d[1], who, d[2], f.found_by)));
      case FaultCode::kForwardStep:
        throw PlanMismatchError(message(by, " found that ", name_of(who), " came to the same step for ",
                                        describe_forward_steps(d[1], who, d[2], f.found_by)));
      case FaultCode::kDied:
        throw PeerDiedError(message(where(), ": ", name_of(who), " died, as ", name_of(f.found_by), " reports"));
      case FaultCode::kLeft:
        throw PeerLeftError(
            message(where(), ": ", name_of(who), " closed its context, as ", name_of(f.found_by), " reports"));
      case FaultCode::kTimeout:
        throw PeerTimeoutError(message(by, " gave up waiting for ", name_of(who)));
      case FaultCode::kUnfinished:
        throw PeerLeftError(
            message(by, " left step ", d[0], " (", phase_name(static_cast<plan::Phase>(d[1])), ") unfinished", f.text));
      case FaultCode::kRefused:
        throw PeerLeftError(message(where(), ": ", name_of(who), " refused a call that other ranks made: ", f.text));
      default:
        throw PeerLeftError(message(by, " abandoned this context after an error of its own: ", f.text));
    }
  }
}

void Protocol::throw_elsewhere(const Fault& fault) const {
  const std::string text = message(where(), ": ", fault.text);
  const std::string_view kind = kKindsElsewhere.at(fault.details[0]);
  if (kind == "PeerDiedError") throw PeerDiedError(text);
  if (kind == "PeerTimeoutError") throw PeerTimeoutError(text);
  if (kind == "PlanMismatchError") throw PlanMismatchError(text);
  throw PeerLeftError(text);
}

void Protocol::hear(const std::string& kind, const std::string& text) noexcept {
  // What has no kind of its own among peers is, to them, a peer that left.
  const auto known = std::find(kKindsElsewhere.begin(), kKindsElsewhere.end(), kind);
  const auto number = known == kKindsElsewhere.end() ? 0 : known - kKindsElsewhere.begin();
  const Fault fault{FaultCode::kElsewhere, {static_cast<uint64_t>(number)}, text};
  {
    const std::lock_guard lock(heard_mutex_);
    if (has_heard_) return;
    heard_ = fault;
    has_heard_ = true;
  }
  if (!transport_->is_collective()) tell_peers(fault);  // otherwise the next call of this rank tells them
}

void Protocol::abandon(const StepId& step, const std::string& why) noexcept {
  if (!poison_.empty()) return;
  fault_ = {FaultCode::kUnfinished, {step.number, static_cast<uint64_t>(step.phase)}, why};
  fail(InvalidArgumentError(message(step.name(), " of context \"", name_, "\" was dispatched on ", name_of(rank()),
                                    " and never collected", why)));
}

void Protocol::refuse(const std::string& why) noexcept {
  if (!poison_.empty()) return;
  const uint64_t call = ++num_calls_;
  if (num_ranks() == 1) return;
  try {
    bool is_fault = transport_->is_collective();  // the others wait in an exchange, or will
    if (!is_fault) {
      for (int64_t p = 0; p < num_ranks(); ++p) send_text(p, why);
      if (!stream_) transport_->quiet();  // peers read the reason as soon as they see the word
      transport_->publish(signals_.call(call), call << kCallShift | static_cast<uint64_t>(Part::kRefused) << 1);
      // As in `publish`: if one of two neighbours refuses the call, at least one of them sees it here. A peer whose
      // history of this call is gone has made it.
      for (const int64_t p : {(rank() + 1) % num_ranks(), (rank() + num_ranks() - 1) % num_ranks()}) {
        const uint64_t theirs = transport_->peek(static_cast<int>(p), signals_.call(call));
        is_fault = is_fault || theirs >> kCallShift > call ||
                   (theirs >> kCallShift == call && part_of(theirs) != Part::kRefused);
      }
    }
    if (!is_fault) return;
    fault_ = {FaultCode::kRefused, {static_cast<uint64_t>(rank())}, why};
    fail(InvalidArgumentError(message(name_of(rank()), " refused a call that other ranks made: ", why)));
  } catch (const Error&) {
    // In a forked child the transport refuses all use.
  }
}

void Protocol::fail(const std::exception& error) noexcept {
  if (!poison_.empty()) return;
  poison_ = error.what();
  if (fault_.code == FaultCode::kNone) fault_ = {FaultCode::kOther, {}, error.what()};
  transport_->cancel();  // the tensors of a whole step may be freed once its error is thrown
  const auto* const ours = dynamic_cast<const Error*>(&error);
  if (transport_->is_collective()) {
    transport_->abandon(ours ? *ours : OperatingSystemError(error.what()));
  } else if (has_heard_) {
    // What `hear` told may have been cancelled, or it may still be telling: then the words must be the same.
    const std::lock_guard lock(heard_mutex_);
    told_peers_ = false;
    tell_peers(heard_);
  } else {
    tell_peers(fault_);
  }
  if (on_fault_ && fault_.code != FaultCode::kElsewhere) on_fault_(ours ? ours->kind() : "", poison_);
}

void Protocol::tell_peers(const Fault& fault) noexcept {
  if (told_peers_.exchange(true)) return;
  try {
    for (int64_t p = 0; p < num_ranks(); ++p) {
      if (p == rank()) continue;
      const auto tell = [&](int64_t word, uint64_t value) { transport_->signal(static_cast<int>(p), word, value); };
      tell(signals_.fault_detail(rank(), 0), static_cast<uint64_t>(fault.found_by < 0 ? rank() : fault.found_by));
      for (size_t i = 0; i < fault.details.size(); ++i)
        tell(signals_.fault_detail(rank(), 1 + static_cast<int64_t>(i)), fault.details[i]);
      send_text(p, fault.text);
      tell(signals_.fault_code(rank()), static_cast<uint64_t>(fault.code));
    }
  } catch (const Error&) {
    // In a forked child the transport refuses all use: the fault is the child's alone.
  }
}

/// Sends the text as ASCII. A long text is cut.
void Protocol::send_text(int64_t peer, const std::string& text) {
  if (peer == rank()) return;
  std::array<char, Signals::kTextWords * sizeof(uint64_t)> bytes = {};
  const size_t size = std::min(text.size(), bytes.size() - 1);
  std::transform(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(size), bytes.begin(),
                 [](char c) { return static_cast<unsigned char>(c) < 0x80 ? c : '?'; });
  if (size < text.size()) std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(size) - 3, 3, '.');
  const auto words = std::bit_cast<std::array<uint64_t, Signals::kTextWords>>(bytes);
  for (int64_t i = 0; i < Signals::kTextWords; ++i) {
    const uint64_t word = words[static_cast<size_t>(i)];
    transport_->signal(static_cast<int>(peer), signals_.fault_text(rank(), i), word);
    if (word == 0) return;  // the end of the text is in this word or before it
  }
}

std::string Protocol::text_of(int64_t peer) const {
  std::array<uint64_t, Signals::kTextWords> words = {}, before;
  // The peer may be writing another text over this one: two calls that it refused, or a refused call and a fault.
  int tries = 50;
  do {
    before = words;
    for (int64_t i = 0; i < Signals::kTextWords; ++i)
      words[static_cast<size_t>(i)] = transport_->load(signals_.fault_text(peer, i));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (words != before && --tries > 0);
  const auto bytes = std::bit_cast<std::array<char, sizeof(words)>>(words);
  return {bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0')};
}

}  // namespace distca::runtime
