// A backend does the work of one rank. All that a step does with rows goes through it. On the host it is the CPU kernel
// and plain loops. On a GPU it is what the operators' library and libdistca_cuda bring.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "attention/attention.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "runtime/reduce_table.h"
#include "transport/streams.h"

namespace distca::runtime {

enum class Fill { kZero, kNan, kMinusInfinity };  // the last one for fp32 rows

/// One copy or fill of rows.
struct RowWork {
  enum class Kind { kCopy, kFill };

  Kind kind = Kind::kCopy;
  RowView to, from;  // unused for kFill
  RowExtent n;
  Fill fill = Fill::kZero;
};

/// Its functions are called one at a time. Work may go on after a call has returned; `finish` returns when it is done.
class DISTCA_EXPORT Backend : public Memory {
 public:
  /// Says, for people to read, what computes attention over such heads.
  virtual std::string attention(const HeadShape& heads) const = 0;
  /// Whether attention over such heads is a kernel of this library. If it is, the bits of a row's out and lse do not
  /// depend on the plan; with `deterministic`, nor do those of its dq.
  virtual bool plan_independent(const HeadShape& heads) const = 0;
  /// Whether backward takes a gradient of lse. It does not where attention makes delta itself, of out and dout.
  virtual bool takes_gradient_of_lse() const { return true; }
  /// Throws an error that names what is supported, unless attention over such heads is.
  virtual void check(const HeadShape& heads, float softcap) const = 0;

  /// Memory of any content, aligned to 256 bytes, for the work that the calling thread queues next on a GPU's current
  /// stream. The caller may let go of it as soon as that work is queued, because only later work of the same stream
  /// gets it again. On the host work is done when a call returns.
  virtual std::shared_ptr<std::byte> scratch(int64_t bytes) { return allocate(bytes); }

  /// Adds the sums of a round. The returned tensors are of `dtype`.
  virtual void reduce(const ReduceTable& table, DType dtype) = 0;
  virtual void fill(const RowView& rows, const RowExtent& n, Fill value) = 0;
  /// Does all of it, one after another.
  virtual void run(std::span<const RowWork> rows);
  /// Does what attention::row_delta does.
  virtual void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows,
                         const Parallel& parallel) = 0;
  /// Does what attention::add_sinks does. The sinks lie on the device.
  virtual void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse,
                         const float* sinks, const Parallel& parallel) = 0;
  /// Whether forward raises the max_logits of tasks.
  virtual bool finds_max_logits() const { return true; }
  /// Sets to[i], for i < n, to the largest of all terms[j][i], or to NaN if one of them is NaN. There is a term.
  virtual void largest(std::span<const float* const> terms, int64_t n, float* to) = 0;
  /// These do what attention::CpuAttention does. The tables of the problem lie on the host.
  virtual void forward(const attention::Problem& problem, const Parallel& parallel) = 0;
  virtual void backward(const attention::Problem& problem, const Parallel& parallel) = 0;
};

/// Chooses who computes attention, and returns "own" or "flash": this library's kernels or ATen's flash attention. The
/// choice is what `argument` says. Without an argument it is what the variable DISTCA_ATTENTION says, which is about
/// GPUs alone. Without either it is "auto", which is "own" on the CPU and on GPUs that this library has kernels for, if
/// they take such heads, and otherwise "flash". Throws InvalidArgumentError for any other word.
DISTCA_EXPORT std::string chosen_attention(std::optional<std::string_view> argument, std::string_view device,
                                           const HeadShape& heads);

/// `attention` is one of these words. The backend queues its work on `streams`, or on the device's current stream if
/// they are null.
using MakeBackend = std::function<std::shared_ptr<Backend>(const std::string& device, const std::string& attention,
                                                           std::shared_ptr<transport::Streams> streams)>;

/// Makes the streams of a rank on a GPU; `put_blocks` is explained in CudaLibrary. Returns null if libdistca_cuda is
/// missing.
using MakeStreams = std::function<std::shared_ptr<transport::Streams>(
    const std::string& device, std::chrono::milliseconds timeout, int put_blocks)>;

/// Makes the backend of one rank. `cpu_isa` is the instruction set of the CPU's own kernel, as CpuAttention takes it.
/// Throws InvalidArgumentError or DeviceError if there is no such backend.
DISTCA_EXPORT std::shared_ptr<Backend> make_backend(const std::string& device, const std::string& attention,
                                                    std::string_view cpu_isa = {});
/// The functions that make backends and streams of all devices but the CPU's own.
struct DeviceFactory {
  MakeBackend backend;
  MakeStreams streams;
};
/// Called by the library of operators when it is loaded. Returns the factory that was set before.
DISTCA_EXPORT DeviceFactory set_device_factory(DeviceFactory factory);

/// The streams on which steps of one rank are queued, and the backend that queues its work there. The streams are null
/// if libdistca_cuda is missing; the host then does the steps of such a device.
struct Device {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<transport::Streams> streams;
};
/// Throws InvalidArgumentError for the CPU.
DISTCA_EXPORT Device make_device(const std::string& device, const std::string& attention,
                                 std::chrono::milliseconds timeout, int put_blocks);

}  // namespace distca::runtime
