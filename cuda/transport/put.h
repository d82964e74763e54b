// Puts to peers that load and store reach (over NVLink, or on the same GPU), and waits for what peers put, both in the
// order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <vector>

#include "runtime/device_table.h"
#include "transport/guard.h"
#include "transport/put_table.h"
#include "transport/streams.h"

namespace distca::cuda {

using transport::AwaitedMessage;
using transport::Guard;
using transport::PutEntry;
using transport::PutMessage;
using transport::SignalTo;

/// A PutTable as parts of a table. They are valid as long as the PutTable does not change.
class PutParts {
 public:
  std::span<const transport::TablePart> of(const transport::PutTable& table);

 private:
  int32_t num_chunks_ = 0;
  std::vector<uint32_t> zeros_;
  std::array<transport::TablePart, 4> parts_;
};

/// The thread blocks that keep the link of a GPU of that compute capability busy.
int32_t blocks_of_puts(int major, int minor);
/// For each message, waits for the peer's credit, copies the rows, 16 bytes a thread where they are aligned, and writes
/// the signal. `blocks` thread blocks share the chunks. Each block may wait; therefore all of them must fit on the GPU
/// at once.
void put_rows(const DeviceTable& table, const Guard& guard, int32_t blocks, cudaStream_t stream);
/// The multiprocessors that put_rows takes: as few as all its thread blocks fit on.
int32_t sms_of_puts(int32_t blocks);
/// Copies the rows of the table's messages and does nothing else, with as many blocks as keep the GPU's own memory
/// busy.
void copy_extents(const DeviceTable& table, cudaStream_t stream);

/// Writes words of peers. The table's one part is `SignalTo`s.
void write_signals(const DeviceTable& table, const Guard& guard, cudaStream_t stream);

/// Waits until each message's signal has come. What follows on the stream sees everything that was put before the
/// signals. The table's one part is `AwaitedMessage`s.
void await_messages(const DeviceTable& table, const Guard& guard, cudaStream_t stream);

void load_put_kernels();

/// Fills rows with NaN if the context has stopped, and does nothing otherwise. `head_bytes` is a multiple of 2.
void fill_nan_if_stopped(const RowView& rows, const RowExtent& n, const Guard& guard, cudaStream_t stream);

}  // namespace distca::cuda
