// Puts to peers that load and store reach (over NVLink, or on the same GPU), and waits for what peers put, in the order
// of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "transport/guard.h"
#include "transport/put_table.h"
#include "transport/streams.h"

namespace distca::cuda {

using transport::AwaitedMessage;
using transport::Guard;
using transport::PutEntry;
using transport::PutMessage;
using transport::SignalTo;

/// A PutTable in device memory.
struct DevicePutTable {
  const PutEntry* entries;
  const PutMessage* messages;
  uint32_t* chunks_done;  // one a message, 0 before and after
  int32_t num_entries, num_chunks;
};

/// For each message: waits for the peer's credit, copies the rows, 16 bytes a thread where they are aligned, and writes
/// the signal. `num_blocks` thread blocks share the chunks; each may wait, so all must fit on the GPU at once.
void put_rows(const DevicePutTable& table, const Guard& guard, int32_t num_blocks, cudaStream_t stream);
/// What one thread block of it has under way.
int64_t bytes_under_way_of_a_block();

/// Writes words of peers.
void write_signals(const SignalTo* signals, int32_t num_signals, const Guard& guard, cudaStream_t stream);

/// What follows on the stream sees what was put before each message's signal.
void await_messages(const AwaitedMessage* messages, int32_t num_messages, const Guard& guard, cudaStream_t stream);

/// Fills rows with NaN if the context has stopped, else does nothing. `head_bytes` is a multiple of 2.
void fill_nan_if_stopped(const RowView& rows, const RowExtent& n, const Guard& guard, cudaStream_t stream);

}  // namespace distca::cuda
