// Core attention on CUDA devices: the same Problem as on the CPU, with device pointers in its views and gradient runs,
// host memory for everything else.
//
// prepare_*() expands a problem on the host into tables; with these on the device, launch() starts the kernels, and
// run() does both. Nothing waits for the device, and nothing of a Problem is needed after prepare_*().
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <span>
#include <string>

#include "attention/attention.h"
#include "attention/tables.h"
#include "runtime/device_table.h"

namespace distca::attention::cuda {

/// Why heads of this shape cannot be computed on a device of compute capability major.minor; empty if they can. All
/// masks, windows, softcaps and sinks can.
DISTCA_EXPORT std::string unsupported_reason(const HeadShape& heads, int major, int minor);

struct HeadKernels;

/// Loads all kernels for the current device: their first start may wait for it otherwise. DeviceError.
DISTCA_EXPORT void load_kernels();

/// What is the same in all problems of one kind: what kernels are started, and with what besides tables.
class AttentionLaunch {
 public:
  /// Device memory that a start wants, aligned to 256 bytes, nobody else's until the stream has come past.
  size_t scratch_bytes(const transport::TableLayout& tables) const;
  /// `tables` has the parts of CudaAttention::parts, these or others of this kind. DeviceError where CUDA
  /// refuses.
  void operator()(const distca::cuda::DeviceTable& tables, void* scratch, cudaStream_t stream) const;
  /// In 32-bit words, to be compared.
  using Kind = std::array<uint32_t, 16>;
  Kind kind() const;

 private:
  friend class CudaAttention;
  /// What starts as zeros.
  struct Scratch {
    int* next_item;
    int* turns;  // only where deterministic
    float* dq_sums;
    size_t bytes;
  };
  Scratch scratch(const transport::TableLayout& tables, std::byte* base) const;
  void set(const HeadKernels& kernels, const KernelParams& params, bool is_backward, bool is_deterministic,
           int num_sms);

  const HeadKernels* kernels_ = nullptr;
  KernelParams params_ = {};  // without pointers
  bool is_backward_ = false, is_deterministic_ = false;
  int num_sms_ = 0;
};

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
  /// aligned to 16 bytes.
  void prepare_forward(const Problem& problem, std::span<const Signal> signals = {});
  /// `deterministic`: dq is the same bits whatever the tasks, dk and dv are the same from run to run.
  void prepare_backward(const Problem& problem, bool deterministic, std::span<const Signal> signals = {});

  // Of what was prepared last, which may be started several times:
  std::span<const transport::TablePart> parts() const;
  const AttentionLaunch& launch() const;
  size_t scratch_bytes() const;
  /// Copies the tables and starts it.
  void run(void* scratch, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace distca::attention::cuda
