// Core attention on CUDA devices: the same Problem as on the CPU, with device pointers in its views, sinks and gradient
// runs, host memory for everything else.
//
// prepare_*() expands a problem on the host and says how much device memory it wants; run() copies the tables and
// starts the kernels on a stream. Neither waits for the device. Nothing of a Problem is needed after prepare_*().
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <string>

#include "attention/attention.h"
#include "attention/tables.h"

namespace distca::attention::cuda {

/// Why heads of this shape cannot be computed on a device of compute capability major.minor; empty if they can. All
/// masks, windows, softcaps and sinks can.
DISTCA_EXPORT std::string unsupported_reason(const HeadShape& heads, int major, int minor);

/// One call at a time. The numerics are those of attention.h, but a masked element of a visible block takes part in
/// products, multiplied by zero: what is not finite in a key that one row sees may reach other rows of its tile.
class DISTCA_EXPORT CudaAttention {
 public:
  /// For one device, which is current whenever run() is called.
  explicit CudaAttention(int device);
  ~CudaAttention();
  CudaAttention(CudaAttention&&) noexcept;
  CudaAttention& operator=(CudaAttention&&) noexcept;

  /// `signals`: of each task the word in memory that the device can read, and the value at which all its rows, keys
  /// included, have come; empty: everything is there. Work that waits is done last. To give up a run whose rows will
  /// not come, raise its words. InvalidArgumentError for what unsupported_reason() names, and for views that are not
  /// aligned to 16 bytes. Returns the bytes of scratch for run().
  size_t prepare_forward(const Problem& problem, std::span<const Signal> signals = {});
  /// `deterministic`: dq is the same bits whatever the tasks, dk and dv are the same from run to run.
  size_t prepare_backward(const Problem& problem, bool deterministic, std::span<const Signal> signals = {});

  /// Starts what was prepared last, which may be done several times. `scratch` is device memory, aligned to 256 bytes,
  /// nobody else's until the stream has come past. OperatingSystemError where CUDA refuses.
  void run(void* scratch, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace distca::attention::cuda
