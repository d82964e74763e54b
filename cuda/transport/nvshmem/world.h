// NVSHMEM in this process: begun once, by unique id, and never ended, since its end is collective and a peer may be
// gone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/nvshmem.h"

namespace distca::cuda {

/// Why NVSHMEM cannot begin here as that rank: another world has begun in this process, or the device is not there.
std::string joining_problem(const transport::NvshmemGroup& group);
/// Begins NVSHMEM with these ranks, unless it has: the group's ranks are its PEs. DeviceError where it does not begin.
void join_world(const transport::NvshmemGroup& group, const transport::NvshmemId& id);

/// Zero-filled symmetric memory, at the same offset on all ranks, who all call this with the same size. It lives as
/// long as the process: giving it back is collective too.
std::span<std::byte> allocate_symmetric(int64_t bytes);

/// Whether it is so on any rank; all call it.
bool is_so_on_any_rank(bool is_so_here);

}  // namespace distca::cuda
