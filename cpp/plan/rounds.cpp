// The order in which gradients come home, and the memory that they take there.
#include <algorithm>

#include "common/align.h"
#include "common/error.h"
#include "plan/arrangement.h"

namespace distca::plan {
namespace {

constexpr auto kPhase = static_cast<size_t>(Phase::kBackward);

/// The gradients that come to one home.
class Homecoming {
 public:
  Homecoming(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t home)
      : a_(arrangement),
        heads_(heads),
        tasks_(tasks),
        tasks_of_home_(a_.remote_of_home[home]),
        gradients_of_home_(a_.gradients_of_home[home]) {}

  /// Calls visit(tasks, gradients) for each server in ascending order. Both lists are sorted by server already.
  template <class Visit>
  void for_each_server(const Visit& visit) const {
    for (size_t t = 0, g = 0; t < tasks_of_home_.size() || g < gradients_of_home_.size();) {
      const int64_t server = std::min(t < tasks_of_home_.size() ? server_of_task(tasks_of_home_[t]) : INT64_MAX,
                                      g < gradients_of_home_.size() ? server_of(gradients_of_home_[g]) : INT64_MAX);
      const size_t first_task = t, first_gradient = g;
      while (t < tasks_of_home_.size() && server_of_task(tasks_of_home_[t]) == server) ++t;
      while (g < gradients_of_home_.size() && server_of(gradients_of_home_[g]) == server) ++g;
      visit(tasks_of_home_.subspan(first_task, t - first_task),
            gradients_of_home_.subspan(first_gradient, g - first_gradient));
    }
  }

  /// Appends a message to the part of the arena that has `used` bytes so far, and tells place_task and place_gradient
  /// the offsets.
  template <class PlaceTask, class PlaceGradient>
  void append(int64_t& used, std::span<const uint32_t> tasks, std::span<const uint32_t> gradients,
              const PlaceTask& place_task, const PlaceGradient& place_gradient) const {
    const auto take = [&](TensorKind kind, int64_t heads, int64_t rows) {
      const RowFormat format = row_format(heads_.with_kv_heads(heads), Phase::kBackward, Direction::kOut, kind);
      const int64_t offset = used, bytes = rows * format.row_stride();
      used += round_up(bytes, kExtentAlignment);
      return offset;
    };
    for (uint32_t i : tasks) {
      RemoteTask& r = a_.remote[i];
      const Task& t = tasks_[r.task];
      place_task(r, take(TensorKind::kDq, t.kv_head_end - t.kv_head_begin, t.num_rows()));
    }
    for (uint32_t i : gradients) {
      KeyGradient& g = a_.gradients[i];
      const int64_t heads = a_.groups[g.group].num_kv_heads(), rows = g.end - g.begin;
      const int64_t dk = take(g.dk_kind(), heads, rows);
      place_gradient(g, dk, take(g.dv_kind(), heads, rows));
    }
  }

  int64_t message_bytes(std::span<const uint32_t> tasks, std::span<const uint32_t> gradients) const {
    int64_t used = 0;
    append(used, tasks, gradients, [](RemoteTask&, int64_t) {}, [](KeyGradient&, int64_t, int64_t) {});
    return used;
  }

 private:
  int64_t server_of_task(uint32_t i) const { return tasks_[a_.remote[i].task].server; }
  int64_t server_of(uint32_t i) const { return a_.groups[a_.gradients[i].group].server; }

  Arrangement& a_;
  const HeadShape heads_;
  const std::span<const Task> tasks_;
  const std::span<const uint32_t> tasks_of_home_, gradients_of_home_;
};

}  // namespace

void place_gradients(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t home,
                     int64_t slot_bytes) {
  const Homecoming all(arrangement, heads, tasks, home);
  ArenaBytes& arena = arrangement.arenas[kPhase][static_cast<size_t>(home)];
  const int64_t first = arena.server_in + arena.scratch;
  int64_t round_bytes = slot_bytes - first;
  all.for_each_server([&](auto of_tasks, auto of_gradients) {
    round_bytes = std::max(round_bytes, all.message_bytes(of_tasks, of_gradients));
  });
  int64_t round = 0, used = 0, most = 0;
  all.for_each_server([&](auto of_tasks, auto of_gradients) {
    if (used + all.message_bytes(of_tasks, of_gradients) > round_bytes) {
      ++round;
      used = 0;
    }
    all.append(
        used, of_tasks, of_gradients,
        [&](RemoteTask& r, int64_t dq) {
          r.round = round;
          r.home_dq = first + dq;
        },
        [&](KeyGradient& g, int64_t dk, int64_t dv) {
          g.round = round;
          g.home_dk = first + dk;
          g.home_dv = first + dv;
        });
    most = std::max(most, used);
  });
  require<CapacityError>(round < kMaxRounds, "plan: rank ", home, " would need ", round + 1,
                         " rounds of gradients; at most ", kMaxRounds, " are allowed");
  arrangement.num_rounds[static_cast<size_t>(home)] = round + 1;
  arena.home_in = most;
}

void merge_rounds(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t slot_bytes) {
  for (size_t home = 0; home < arrangement.num_rounds.size(); ++home)
    if (arrangement.num_rounds[home] > 1)
      place_gradients(arrangement, heads, tasks, static_cast<int64_t>(home), slot_bytes);
}

}  // namespace distca::plan
