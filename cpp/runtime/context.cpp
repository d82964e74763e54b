#include "runtime/context.h"

#include <algorithm>
#include <map>
#include <type_traits>

namespace distca::runtime {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Context>, std::less<>> contexts;
};

constexpr const char* kNoRetention =
    "a plan with retain_bytes keeps as many bytes as it needs from forward to backward, and a recording has the same "
    "tensors whatever the plan; make its plans without retain_bytes";

/// The one piece of global state of the library. It is never destroyed, because operators may run while the process
/// exits.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

HeapNeeds heap_needs(int64_t num_ranks, int64_t slot_bytes) {
  const int64_t arena_bytes = slot_bytes + MaxLogits::bytes(num_ranks);
  // The send arena takes any one message, however it is aligned. What does not fit at once is sent in parts.
  return {kNumSlots * arena_bytes, Signals(num_ranks).count(), arena_bytes + plan::kExtentAlignment};
}

Context::Context(std::unique_ptr<transport::Transport> transport, ContextOptions options,
                 std::shared_ptr<Backend> backend)
    : options_(std::move(options)),
      backend_(backend ? std::move(backend) : make_backend("cpu", "auto")),
      protocol_(std::move(transport), options_.name, options_.slot_bytes, options_.timeout),
      dispatcher_(protocol_, *backend_) {
  require(options_.slot_bytes > 0 && options_.slot_bytes % plan::kExtentAlignment == 0,
          "context: slot_bytes = ", options_.slot_bytes, "; positive multiples of ", plan::kExtentAlignment,
          " are allowed");
  require(static_cast<int64_t>(protocol_.transport().heap().size()) >= kNumSlots * arena_bytes(),
          "context: the heap is smaller than its slots");
}

Context::~Context() { protocol_.drain(); }

/// Makes this thread the one that is in a step of a healthy context, for the lifetime of the object.
class Context::Call {
 public:
  explicit Call(Context& context) : Call(context, std::unique_lock(context.in_step_, std::try_to_lock)) {}
  Call(Context& context, std::unique_lock<Flag> lock) : context_(context), lock_(std::move(lock)) {
    require(lock_.owns_lock(), "context \"", context.options_.name,
            "\" is in a step on another thread; one step at a time");
    context.settle_abandoned();
    context.protocol_.check_healthy();
  }
  // A step may be abandoned up to the moment at which the flag is given back.
  ~Call() {
    do {
      context_.settle_abandoned();
      lock_.unlock();
    } while (context_.has_abandoned_ && lock_.try_lock());
  }

 private:
  Context& context_;
  std::unique_lock<Flag> lock_;
};

template <class Body>
auto Context::guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    protocol_.fail(error);
    throw;
  }
}

void Context::check_captured_as_recorded() {
  const bool is_there = guarded([&] { return protocol_.is_captured(); });
  require(!is_there || is_captured(), "context \"", options_.name,
          "\": a CUDA graph is captured, and a launch of it would move the rows of this one batch again; only steps ",
          "inside of `with context.record()` can be captured, and the capture begins before it");
  require(is_there || !is_captured(), "context \"", options_.name,
          "\": the capture has ended, and the recording of its steps is still open; end the recording first");
}

void Context::check_may_begin(const plan::SliceView& slice) const {
  check_may_begin();
  require(!open_recording_ || slice.header().retains == 0, kNoRetention);
}

void Context::check_may_begin() const {
  require(planned_ == nullptr, "context \"", options_.name, "\": a recording was replanned, so its steps come next; ",
          "replay it first");
  dispatcher_.check_slot();
}

/// Begins a step by `make`, which gets a slice, what the slice leaves of the scores, threads and the owner, and returns
/// the number of the step. A recording keeps `make`, and calls it again with the slice of another plan, which may leave
/// more of the scores to the call, or less.
template <class Tensors, class Make>
uint64_t Context::begin_step(const plan::SliceView& slice, const Tensors& tensors, const ScoreOptions& scores,
                             const Parallel& parallel, std::shared_ptr<void> owner, const Make& make) {
  const Call call(*this);
  check_may_begin(slice);
  check_captured_as_recorded();
  const ScoreOptions accepted = accept(slice, scores);
  const uint64_t number = guarded([&] { return make(slice, accepted, parallel, owner); });
  constexpr bool kIsForward = std::is_same_v<Tensors, ForwardTensors>;
  if constexpr (kIsForward) num_without_max_logits_ += tensors.max_logits == nullptr ? 1 : 0;
  if (!open_recording_) return number;
  constexpr plan::Phase kPhase = kIsForward ? plan::Phase::kForward : plan::Phase::kBackward;
  const auto again = [make, this](Recording::Step& s) {
    s.number = make(s.slice, accept(s.slice, s.scores), Parallel(), nullptr);
  };
  open_recording_->add({slice.heads(), slice.header().num_rows, scores, number, kPhase, tensors.lse.data}, again,
                       std::move(owner));
  return number;
}

/// Makes the call `make` about a step that is under way. A recording keeps `make`, as above.
template <class Make>
std::shared_ptr<void> Context::go_on(Part part, uint64_t step, std::optional<plan::Phase> phase,
                                     const Parallel& parallel, const Make& make) {
  const Call call(*this);
  check_captured_as_recorded();
  Dispatcher::Step& s = dispatcher_.step_for(part, step, phase);
  auto owner = guarded([&] { return make(s, parallel); });
  if (open_recording_) {
    open_recording_->add(
        step, [=, this](Recording::Step& again) { make(dispatcher_.step_for(part, again.number), Parallel()); });
  }
  return owner;
}

void Context::forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                      const Parallel& parallel, std::shared_ptr<void> owner) {
  begin_step(slice, tensors, scores, parallel, std::move(owner),
             [=, this](const auto& s, const ScoreOptions& accepted, const Parallel& p, const auto&) {
               return dispatcher_.forward(s, tensors, accepted, p);
             });
}

void Context::backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                       const Parallel& parallel, std::shared_ptr<void> owner) {
  begin_step(slice, tensors, scores, parallel, std::move(owner),
             [=, this](const auto& s, const ScoreOptions& accepted, const Parallel& p, const auto&) {
               return dispatcher_.backward(s, tensors, accepted, p);
             });
}

uint64_t Context::dispatch(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                           std::shared_ptr<void> owner) {
  return begin_step(slice, tensors, scores, Parallel(), std::move(owner),
                    [=, this](const auto& s, const ScoreOptions& accepted, const Parallel&, auto o) {
                      return dispatcher_.dispatch(s, tensors, accepted, o);
                    });
}

uint64_t Context::dispatch(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                           const Parallel& parallel, std::shared_ptr<void> owner) {
  return begin_step(slice, tensors, scores, parallel, std::move(owner),
                    [=, this](const auto& s, const ScoreOptions& accepted, const Parallel& p, auto o) {
                      return dispatcher_.dispatch(s, tensors, accepted, p, o);
                    });
}

void Context::attend(uint64_t step, const Parallel& parallel) {
  go_on(Part::kAttend, step, {}, parallel, [this](Dispatcher::Step& s, const Parallel& p) {
    dispatcher_.attend(s, p);
    return nullptr;
  });
}

std::shared_ptr<void> Context::collect(uint64_t step, plan::Phase phase, const Parallel& parallel) {
  return go_on(Part::kCollect, step, phase, parallel,
               [this](Dispatcher::Step& s, const Parallel& p) { return dispatcher_.collect(s, p); });
}

std::shared_ptr<Recording> Context::begin_recording(double headroom, int64_t rounds) {
  const Call call(*this);
  require(headroom >= 1 && headroom <= 1000, "record: headroom = ", headroom, "; 1 to 1000 is allowed");
  require(rounds >= 1 && rounds <= 1000, "record: rounds = ", rounds, "; 1 to 1000 is allowed");
  require(open_recording_ == nullptr, "record: a recording of context \"", options_.name, "\" is open already");
  check_may_begin();
  require(dispatcher_.is_idle(), "record: a step is under way; collect it first");
  auto recording = std::make_shared<Recording>(headroom, rounds);
  protocol_.set_tape(recording->tape(), /*is_complete=*/false);
  dispatcher_.set_recording(recording.get());
  open_recording_ = recording;
  return recording;
}

void Context::end_recording() {
  const Call call(*this);
  require(open_recording_ != nullptr, "record: no recording of context \"", options_.name, "\" is open");
  const bool is_idle = dispatcher_.is_idle();
  const std::shared_ptr<Recording> recording = open_recording_;
  drop_recording();
  require(is_idle, "record: a step was dispatched and not collected; a recording has whole steps");
  require(!recording->steps().empty(), "record: no step was recorded");
  recording->complete();
}

void Context::drop_recording() noexcept {
  if (!open_recording_) return;
  open_recording_ = nullptr;
  dispatcher_.set_recording(nullptr);
  protocol_.take_back();
}

void Context::replan(const std::shared_ptr<Recording>& recording, std::span<const std::span<const int64_t>> plans,
                     bool check_only) {
  const std::span<const Recording::Step> steps = recording->steps();
  require(plans.size() == 1 || plans.size() == steps.size(), "replan: ", plans.size(), " plans for ", steps.size(),
          " recorded steps; one for each, or one for all, is expected");
  std::vector<plan::SliceView> slices;
  for (size_t i = 0; i < steps.size(); ++i) {
    slices.push_back(accept(plans[plans.size() == 1 ? 0 : i], steps[i].heads, steps[i].num_rows));
    accept(slices[i], steps[i].scores);
  }
  for (size_t i = 0; i < steps.size(); ++i)
    if (const size_t forward = recording->forward_of(i); forward < i) check_same_problem(slices[forward], slices[i]);
  const Call call(*this);
  require(open_recording_ == nullptr, "replan: a recording of context \"", options_.name, "\" is open; end it first");
  check_may_begin();
  check_captured_as_recorded();
  require(dispatcher_.is_idle(), "replan: a step is under way; collect it first");
  for (const plan::SliceView& slice : slices) require(slice.header().retains == 0, kNoRetention);
  if (!check_only) recording->tape()->await_readers();
  fill_again(*recording, slices, check_only);
  if (check_only) return;
  guarded([&] { protocol_.announce_replay(); });
  recording->tape()->commit();
  if (!recording->tape()->is_captured()) planned_ = recording;
}

/// A plan that does not fit changes nothing. Any other error is a fault.
void Context::fill_again(Recording& recording, std::span<const plan::SliceView> slices, bool check_only) {
  const auto take_back = [&] {
    dispatcher_.set_recording(nullptr);
    protocol_.take_back();
  };
  protocol_.set_tape(recording.tape(), /*is_complete=*/true);
  dispatcher_.set_recording(&recording);
  try {
    recording.refill(slices);
  } catch (const CapacityError&) {
    take_back();
    throw;
  } catch (...) {
    take_back();
    guarded([] { throw; });
  }
  if (check_only) return take_back();
  dispatcher_.set_recording(nullptr);
}

void Context::replay(const std::shared_ptr<Recording>& recording) {
  const Call call(*this);
  require(!recording->tape()->is_captured(), "replay: the steps were captured into a graph; launch that instead");
  check_captured_as_recorded();
  require(planned_ == recording,
          "replay: the recording has no plan for its next steps; call replan before each replay");
  planned_ = nullptr;
  guarded([&] { protocol_.replay(*recording->tape()); });
}

void Context::check() {
  std::unique_lock lock(in_step_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // whoever is in a step finds the fault, and must not be waited for
  const Call call(*this, std::move(lock));
  protocol_.check_healthy();
  guarded([&] { protocol_.check(); });
}

void Context::abandon(uint64_t step, const std::string& why) noexcept {
  {
    const std::lock_guard lock(abandoned_mutex_);
    abandoned_.emplace_back(step, why);
    has_abandoned_ = true;
  }
  while (has_abandoned_ && in_step_.try_lock()) {  // otherwise the thread that is in a step deals with it
    settle_abandoned();
    in_step_.unlock();
  }
}

void Context::refuse(const std::string& why) noexcept {
  ++num_refused_;
  abandon(0, why);
}

void Context::settle_abandoned() noexcept {
  while (has_abandoned_) {
    std::vector<std::pair<uint64_t, std::string>> abandoned;
    {
      const std::lock_guard lock(abandoned_mutex_);
      has_abandoned_ = false;
      abandoned.swap(abandoned_);
    }
    // Telling peers may run Python, whose garbage collection may abandon another step in this thread.
    // Nobody waits for a recorded step, and its recording cannot end without it.
    for (const auto& [step, why] : abandoned) {
      if (step == 0)
        protocol_.refuse(why);
      else if (const Dispatcher::Step* const s = dispatcher_.find(step); s != nullptr && !open_recording_)
        protocol_.abandon(s->id, why);
    }
  }
}

void add_context(std::shared_ptr<Context> context) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const std::string name = context->options().name;
  require(r.contexts.emplace(name, std::move(context)).second, "context \"", name,
          "\" exists already; close it first, or choose another name");
}

std::shared_ptr<Context> find_context(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = r.contexts.find(name);
  if (found != r.contexts.end()) return found->second;
  std::string names;
  for (const auto& [other, context] : r.contexts) names += (names.empty() ? "\"" : ", \"") + other + "\"";
  throw InvalidArgumentError(
      message("no context \"", name, "\"; call distca.init first (there are: ", names.empty() ? "none" : names, ")"));
}

void refuse(std::string_view name, const std::string& why) noexcept {
  std::shared_ptr<Context> context;
  {
    Registry& r = registry();
    const std::lock_guard lock(r.mutex);
    if (const auto found = r.contexts.find(name); found != r.contexts.end()) context = found->second;
  }
  if (context) context->refuse(why);
}

bool remove_context(const std::string& name) {
  Registry& r = registry();
  std::shared_ptr<Context> removed;  // destroyed after the lock is released
  const std::lock_guard lock(r.mutex);
  const auto found = r.contexts.find(name);
  if (found == r.contexts.end()) return false;
  removed = std::move(found->second);
  r.contexts.erase(found);
  return true;
}

}  // namespace distca::runtime
