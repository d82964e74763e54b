// NVSHMEM in this process: begun once, by unique id, and never ended, since its end is collective and a peer may be
// gone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "transport/nvshmem.h"

namespace distca::cuda {

/// Begins NVSHMEM with these ranks, or checks that it has begun with them. The group's ranks are its PEs.
void join_world(const transport::NvshmemGroup& group);

/// Zero-filled symmetric memory, at the same offset on all ranks, who all call this with the same size. It lives as
/// long as the process: giving it back is collective too.
std::span<std::byte> allocate_symmetric(int64_t bytes);

}  // namespace distca::cuda
