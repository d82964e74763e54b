// Rounds: the order in which gradients come home, and the memory that they take there.
#pragma once

#include <cstdint>
#include <span>

#include "plan/arrangement.h"

namespace distca::plan {

/// Gives every gradient that comes to `home` its round and its place. Servers come in ascending order. A round has as
/// many messages as fit into the size of the largest single message, or into what the home's arena has left of
/// `slot_bytes`, where that is more.
void place_gradients(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t home,
                     int64_t slot_bytes);

/// Places gradients anew in as few rounds as arenas of `slot_bytes` allow. Few rounds are better, because those after
/// the first travel one after another, when the home is ready for them, and overlap with nothing.
void merge_rounds(Arrangement& arrangement, const HeadShape& heads, std::span<const Task> tasks, int64_t slot_bytes);

}  // namespace distca::plan
