// The launcher of core attention on CUDA devices. It takes the same Problem as the CPU kernel, with device pointers in
// views and gradient runs and host memory for everything else.
//
// prepare_*() expands a problem on the host into tables. With these on the device, launch() starts the kernels; run()
// does both. Nothing waits for the device, and nothing of a Problem is needed after prepare_*().
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "attention/attention.h"
#include "attention/tables.h"
#include "runtime/device_table.h"

namespace distca::attention::cuda {

/// What kernels are written for: compute capability 9.0 alone, or 8.0 and later.
enum class KernelFamily { kHopper, kAmpere };
/// The kernels for a device of compute capability major.minor, which is 8.0 or later.
DISTCA_EXPORT KernelFamily family_of(int major, int minor);

/// The reason why kernels cannot compute heads of this shape; empty if they can. All masks, windows, scales and
/// softcaps can be computed, up to kMostScores different ones in a problem.
DISTCA_EXPORT std::string unsupported_reason(const HeadShape& heads, KernelFamily family);

struct HeadKernels;

/// Loads all kernels of a family for the current device, because otherwise their first start may wait for it. Throws
/// DeviceError.
DISTCA_EXPORT void load_kernels(KernelFamily family);

/// The common part of all problems of one kind: the kernels that are started, and their arguments besides tables.
class AttentionLaunch {
 public:
  /// The bytes of device memory that a start wants, aligned to 256 bytes. The memory belongs to this start alone until
  /// the stream has come past it.
  size_t scratch_bytes(const transport::TableLayout& tables) const;
  /// Starts the kernels. `tables` has the parts of CudaAttention::parts, these or others of this kind. Throws
  /// DeviceError where CUDA refuses.
  void operator()(const distca::cuda::DeviceTable& tables, void* scratch, cudaStream_t stream) const;
  /// The kind as 32-bit words, for comparisons.
  // With these parentheses GCC does not warn of a division by the size of another type.
  static constexpr size_t kScoreWords = sizeof(KernelParams::scores) / (sizeof(uint32_t));
  using Kind = std::array<uint32_t, 6 + kScoreWords>;
  Kind kind() const;

 private:
  friend class CudaAttention;
  /// The scratch memory, which starts as zeros.
  struct Scratch {
    int* next_item;
    int* turns;   // only where deterministic
    int* stored;  // only in backward
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

/// The launcher for one device. One call at a time. The numerics are those of attention.h, with one exception: a masked
/// element of a visible block takes part in products, multiplied by zero. Therefore a value that is not finite in a key
/// that one row sees may reach other rows of its tile.
class DISTCA_EXPORT CudaAttention {
 public:
  /// `device` must be current whenever run() is called. Without `family` the kernels for the device compute.
  explicit CudaAttention(int device, std::optional<KernelFamily> family = {});
  ~CudaAttention();
  CudaAttention(CudaAttention&&) noexcept;
  CudaAttention& operator=(CudaAttention&&) noexcept;

  /// Of problems during which rows travel, the kernels leave this many multiprocessors free, but never more than half.
  /// Their thread blocks stay until all is computed, and nothing else would begin before.
  void leave_room(int sms);

  /// `signals` has for each task a word that the device can read, and the value at which all rows of the task, keys
  /// included, have come. Empty: everything is there. Work that waits is done last. To give up a run whose rows will
  /// not come, raise its words. Throws InvalidArgumentError for what unsupported_reason() names, and for views that are
  /// not aligned to 16 bytes.
  void prepare_forward(const Problem& problem, std::span<const Signal> signals = {});
  /// With `deterministic`, dq has the same bits whatever the tasks are, and dk and dv are the same from run to run.
  void prepare_backward(const Problem& problem, bool deterministic, std::span<const Signal> signals = {});

  // The following is about what was prepared last, which may be started several times.
  std::span<const transport::TablePart> parts() const;
  const AttentionLaunch& launch() const;
  size_t scratch_bytes() const;
  /// Copies the tables and starts the kernels.
  void run(void* scratch, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace distca::attention::cuda
