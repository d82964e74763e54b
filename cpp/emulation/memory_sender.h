// Stands for a network between ranks of one process: a thread of each rank carries its messages, while its streams go
// on.
#pragma once

#include <memory>
#include <vector>

#include "transport/send_table.h"
#include "transport/stream_transport.h"

namespace distca::emulation {

/// Makes the sender of a rank. `ranks` has the memory of all ranks, as this process addresses it.
std::shared_ptr<transport::Sender> make_memory_sender(int rank, std::vector<transport::DeviceMemory> ranks);

}  // namespace distca::emulation
