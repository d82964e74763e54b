#include "runtime/protocol.h"

#include <array>
#include <bit>
#include <cstring>
#include <iomanip>

#include "common/digest.h"

namespace distca::runtime {
namespace {

const char* phase_name(uint64_t phase) { return phase == 0 ? "forward" : "backward"; }

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

Protocol::Protocol(std::unique_ptr<transport::Transport> transport, std::string context_name, int64_t arena_bytes,
                   std::chrono::milliseconds timeout)
    : transport_(std::move(transport)),
      signals_(transport_->num_ranks()),
      name_(std::move(context_name)),
      arena_bytes_(arena_bytes),
      timeout_(timeout),
      watch_([this] { watch(); }),
      agree_([this] {
        for (int64_t p = 0; p < num_ranks(); ++p) compare_with(p);
      }) {}

std::byte* Protocol::arena() { return transport_->heap().data() + slot() * arena_bytes_; }

std::string Protocol::where() const {
  return message("context \"", name_, "\", rank ", rank(), " of ", num_ranks(), ", step ", step_, " (",
                 phase_name(static_cast<uint64_t>(phase_)), ")");
}

void Protocol::check_healthy() const {
  require<ContextPoisonedError>(poison_.empty(), "context \"", name_, "\" was abandoned after a fault; ",
                                "close it and make a new one with distca.init. The fault was: ", poison_);
}

uint64_t ScoreOptions::scale_and_softcap() const {
  return uint64_t{std::bit_cast<uint32_t>(softcap)} << 32 | std::bit_cast<uint32_t>(scale);
}

uint64_t ScoreOptions::sinks_digest() const {
  Digest d(sinks.size());
  for (float sink : sinks) d.add(std::bit_cast<uint32_t>(sink));
  return d.value();
}

void Protocol::begin(plan::Phase phase, uint64_t plan_digest, const ScoreOptions& scores) {
  ++step_;
  phase_ = phase;
  digest_ = plan_digest;
  scale_and_softcap_ = scores.scale_and_softcap();
  sinks_digest_ = scores.sinks_digest();
  // Taken back while it changes, so that nobody reads the digest of one step under the number of another.
  transport_->publish(signals_.step(step_), 0);
  transport_->publish(signals_.digest(step_), plan_digest);
  transport_->publish(signals_.scale_and_softcap(step_), scale_and_softcap_);
  transport_->publish(signals_.sinks(step_), sinks_digest_);
  transport_->publish(signals_.step(step_), published_step());
  transport_->publish(signals_.latest_step(), step_);
  check_faults();
  check_departed();
  // If all ranks do not agree, some two neighbours do not, and the later one of them sees it here. Over a collective
  // transport all see it in the first exchange.
  if (num_ranks() > 1) {
    compare_with((rank() + 1) % num_ranks());
    compare_with((rank() + num_ranks() - 1) % num_ranks());
  }
}

void Protocol::grant(std::span<const plan::WaitRow> waits) {
  if (transport_->is_collective()) return;
  for (const plan::WaitRow& w : waits) {
    if (w.round == 0) transport_->signal(static_cast<int>(w.peer), signals_.credit(slot(), rank()), sequence(step_, 0));
  }
}

void Protocol::grant_round(std::span<const plan::WaitRow> waits, int64_t round) {
  if (transport_->is_collective()) return;
  for (const plan::WaitRow& w : waits) {
    if (w.direction == static_cast<int64_t>(plan::Direction::kOut) && w.round == round)
      transport_->signal(static_cast<int>(w.peer), signals_.credit(slot(), rank()), sequence(step_, round));
  }
}

void Protocol::await_credit(plan::Direction direction, int64_t peer, int64_t round) {
  if (transport_->is_collective()) return;
  const bool in = direction == plan::Direction::kIn;
  wait({in ? "credit to send rows to its server arena" : "credit to send rows home", peer,
        signals_.credit(slot(), peer), sequence(step_, round), round});
}

void Protocol::put(int64_t peer, int64_t target, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& source,
                   const RowExtent& extent) {
  // The transport checks against the heap; a slot is only a part of it.
  const int64_t bytes = (extent.num_rows - 1) * dst_row_stride + extent.num_heads * dst_head_stride;
  if (target < 0 || target > arena_bytes_ || bytes > arena_bytes_ - target) {  // where() allocates
    throw PlanFormatError(message(where(), ": a put of ", bytes, " bytes at offset ", target,
                                  " does not fit into rank ", peer, "'s arena of ", arena_bytes_, " bytes"));
  }
  transport_->put(static_cast<int>(peer), slot() * arena_bytes_ + target, dst_row_stride, dst_head_stride, source,
                  extent);
}

void Protocol::announce(plan::Direction direction, int64_t peer, int64_t round) {
  transport_->signal(static_cast<int>(peer), signals_.arrived(static_cast<int64_t>(direction), slot(), rank()),
                     sequence(step_, round));
}

bool Protocol::exchange(bool more) {
  try {
    return transport_->exchange(more, agree_);
  } catch (const PeerDiedError& error) {
    throw PeerDiedError(message(where(), ": ", error.what()));
  } catch (const PeerTimeoutError& error) {
    throw PeerTimeoutError(message(where(), ": ", error.what()));
  }
}

void Protocol::await_rows(plan::Direction direction, int64_t peer, int64_t round) {
  const bool in = direction == plan::Direction::kIn;
  wait({in ? "rows for tasks served here" : "rows that come home", peer,
        signals_.arrived(static_cast<int64_t>(direction), slot(), peer), sequence(step_, round), round});
}

void Protocol::end() { transport_->quiet(); }

void Protocol::wait(const Wait& w) {
  waiting_ = w;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (!transport_->wait(w.word, w.value, deadline, watch_)) time_out();
  waiting_ = {};
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
  const uint64_t theirs = transport_->peek(p, signals_.step(step_));
  if (theirs >> 1 < step_) return;
  if (theirs >> 1 == step_) {
    const uint64_t digest = transport_->peek(p, signals_.digest(step_));
    const uint64_t scores = transport_->peek(p, signals_.scale_and_softcap(step_));
    const uint64_t sinks = transport_->peek(p, signals_.sinks(step_));
    if (transport_->peek(p, signals_.step(step_)) == theirs) {
      if (theirs == published_step() && digest == digest_) {
        if (scores == scale_and_softcap_ && sinks == sinks_digest_) return;
        fault_details_ = {static_cast<uint64_t>(peer), theirs & 1, digest, digest_};
        throw PlanMismatchError(message(where(), ": rank ", peer, " came to this step with ", describe(scores),
                                        ", this rank with ", describe(scale_and_softcap_),
                                        sinks == sinks_digest_ ? "" : "; their attention sinks differ"));
      }
      fault_details_ = {static_cast<uint64_t>(peer), theirs & 1, digest, digest_};
      throw PlanMismatchError(message(where(), ": rank ", peer, " came to this step with another plan: it runs ",
                                      phase_name(theirs & 1), " of plan ", hex(digest), ", this rank ",
                                      phase_name(static_cast<uint64_t>(phase_)), " of plan ", hex(digest_),
                                      ". All ranks must make the same calls in the same order with the same plan"));
    }
  }
  // The peer is so far ahead that its history of this step is gone. Fine, unless we still wait for something of it.
  if (waiting_.peer == peer && transport_->load(waiting_.word) < waiting_.value) {
    fault_details_ = {static_cast<uint64_t>(peer), 0, 0, digest_};
    throw PlanMismatchError(message(where(), ": rank ", peer, " is already at step ",
                                    transport_->peek(p, signals_.latest_step()), " and never gave ", waiting_.what,
                                    "; the ranks do not have the same plan (here ", hex(digest_), ")"));
  }
}

void Protocol::time_out() {
  const int p = static_cast<int>(waiting_.peer);
  fault_details_[0] = static_cast<uint64_t>(waiting_.peer);
  const uint64_t seen = transport_->load(waiting_.word);
  throw PeerTimeoutError(message(where(), ": waited ", static_cast<double>(timeout_.count()) / 1000.0, " s for rank ",
                                 waiting_.peer, ": ", waiting_.what, ", round ", waiting_.round, "; seen step ",
                                 seen >> 16, " round ", seen & 0xffff, ", expected step ", step_, " round ",
                                 waiting_.round, "; rank ", waiting_.peer, " is at step ",
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
      default:
        throw PeerDiedError(message(where(), ": rank ", p, " abandoned this context after an error of its own"));
    }
  }
}

void Protocol::fail(const Error& error) noexcept {
  if (!poison_.empty()) return;
  poison_ = error.what();
  FaultCode code = FaultCode::kOther;
  if (std::strcmp(error.kind(), "PlanMismatchError") == 0) code = FaultCode::kMismatch;
  if (std::strcmp(error.kind(), "PeerDiedError") == 0) code = FaultCode::kDied;
  if (std::strcmp(error.kind(), "PeerTimeoutError") == 0) code = FaultCode::kTimeout;
  if (transport_->is_collective()) return transport_->abandon(error);
  try {
    for (int64_t p = 0; p < num_ranks(); ++p) {
      if (p == rank()) continue;
      for (int64_t i = 0; i < Signals::kFaultDetails; ++i)
        transport_->signal(static_cast<int>(p), signals_.fault_detail(rank(), i),
                           fault_details_[static_cast<size_t>(i)]);
      transport_->signal(static_cast<int>(p), signals_.fault_code(rank()), static_cast<uint64_t>(code));
    }
  } catch (const Error&) {
    // In a forked child the transport refuses all use: the fault is the child's alone.
  }
}

}  // namespace distca::runtime
