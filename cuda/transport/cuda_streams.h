// The streams of a rank on a GPU.
#pragma once

#include <chrono>
#include <memory>

#include "runtime/cuda_library.h"
#include "runtime/device_queue.h"
#include "transport/streams.h"

namespace distca::cuda {

/// Makes the streams of a rank. Its work is on the stream that PyTorch has current in the calling thread; the transport
/// has a stream of its own.
std::shared_ptr<transport::Streams> make_cuda_streams(int device, runtime::CurrentStream current_stream,
                                                      std::chrono::milliseconds timeout, int put_blocks);

/// The queue of such streams; null for other streams.
std::shared_ptr<DeviceQueue> queue_of(const std::shared_ptr<transport::Streams>& streams);
/// The multiprocessors that their puts take; 0 for other streams.
int sms_of_puts(const std::shared_ptr<transport::Streams>& streams);

}  // namespace distca::cuda
