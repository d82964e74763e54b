// What stands for a network between ranks of one process: a thread of the rank's carries its messages, while its
// streams go on.
#pragma once

#include <memory>
#include <vector>

#include "transport/send_table.h"
#include "transport/stream_transport.h"

namespace distca::emulation {

/// `ranks`: the memory of all of them, where this process has it.
std::shared_ptr<transport::Sender> make_memory_sender(int rank, std::vector<transport::DeviceMemory> ranks);

}  // namespace distca::emulation
