// Sends messages through NVSHMEM to peers that load and store do not reach.
#pragma once

#include <memory>

#include "transport/send_table.h"

namespace distca::cuda {

std::shared_ptr<transport::Sender> make_nvshmem_sender();

}  // namespace distca::cuda
