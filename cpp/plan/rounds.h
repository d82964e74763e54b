// Rounds: the order in which gradients come home, and the room that they take there.
#pragma once

#include <cstdint>
#include <span>

#include "plan/arrangement.h"

namespace distca::plan {

/// Gives every gradient that comes to `home` its round and its place: servers in ascending order, as many a round as
/// fit into the largest single message, or into what the home's arena has left of `slot_bytes` where that is more.
void place_gradients(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t home,
                     int64_t slot_bytes);

/// As few rounds as arenas of `slot_bytes` allow. Rounds after the first travel one after another, when the home is
/// ready for them, and hide behind nothing.
void merge_rounds(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t slot_bytes);

}  // namespace distca::plan
