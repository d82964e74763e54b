// Who does the work of one rank: on the host, the CPU kernel and plain loops; on a GPU, what the operators' library and
// libdistca_cuda bring. All that a step does with rows goes through here.
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

/// One thing that is done with rows.
struct RowWork {
  enum class Kind { kCopy, kFill };

  Kind kind = Kind::kCopy;
  RowView to, from;  // kFill has no `from`
  RowExtent n;
  Fill fill = Fill::kZero;
};

/// One call at a time. Work may go on after a call; `finish` ends it.
class DISTCA_EXPORT Backend : public Memory {
 public:
  /// What computes attention over such heads, for people to read.
  virtual std::string attention(const HeadShape& heads) const = 0;
  /// Whether it is a kernel of this library: out, lse and, if deterministic, dq of a row have the same bits whatever
  /// the plan.
  virtual bool plan_independent(const HeadShape& heads) const = 0;
  /// Throws the error that names what is supported, unless attention over such heads is.
  virtual void check(const HeadShape& heads, float softcap) const = 0;

  /// Memory of any content, aligned to 256 bytes, for what the calling thread queues next on a GPU's current stream: it
  /// may let go of the memory as soon as that is queued, for only later work of the same stream gets it again. On the
  /// host work is done when a call returns.
  virtual std::shared_ptr<std::byte> scratch(int64_t bytes) { return allocate(bytes); }

  /// The sums of a round; returned tensors are of `dtype`.
  virtual void reduce(const ReduceTable& table, DType dtype) = 0;
  virtual void fill(const RowView& rows, const RowExtent& n, Fill value) = 0;
  /// All of it, one after another.
  virtual void run(std::span<const RowWork> rows);
  /// As attention::row_dot.
  virtual void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout,
                       const RowView& delta, const Parallel& parallel) = 0;
  /// As attention::CpuAttention. `sinks` of the problem's groups and its tables lie on the host.
  virtual void forward(const attention::Problem& problem, const Parallel& parallel) = 0;
  virtual void backward(const attention::Problem& problem, const Parallel& parallel) = 0;
};

/// Who computes attention: "own" is this library's kernels, "flash" ATen's flash attention, and "auto" is "own" on the
/// CPU and "flash" on a GPU, where the own kernels have not been verified yet. The result is "own" or "flash": what
/// `argument` says, or without one DISTCA_ATTENTION, which is about GPUs alone, or without that "auto".
/// InvalidArgumentError for any other word.
DISTCA_EXPORT std::string chosen_attention(std::optional<std::string_view> argument, std::string_view device);

/// `attention` is one of these words. Work is queued on `streams`; where they are null, on the device's current stream.
using MakeBackend = std::function<std::shared_ptr<Backend>(const std::string& device, const std::string& attention,
                                                           std::shared_ptr<transport::Streams> streams)>;

/// The streams of a rank on a GPU; `put_blocks` as in CudaLibrary. Null where libdistca_cuda is missing.
using MakeStreams = std::function<std::shared_ptr<transport::Streams>(
    const std::string& device, std::chrono::milliseconds timeout, int put_blocks)>;

/// Makes the backend of one rank. InvalidArgumentError or DeviceError where there is none such.
DISTCA_EXPORT std::shared_ptr<Backend> make_backend(const std::string& device, const std::string& attention);
/// What makes all backends but the CPU's own.
struct Makers {
  MakeBackend backend;
  MakeStreams streams;
};
/// Of the library of operators, when it is loaded. Returns those before.
DISTCA_EXPORT Makers set_makers(Makers makers);

/// What steps of one rank are queued on, and the backend that queues its work there. Null streams where libdistca_cuda
/// is missing: such a device's steps are the host's.
struct Device {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<transport::Streams> streams;
};
/// InvalidArgumentError for the CPU.
DISTCA_EXPORT Device make_device(const std::string& device, const std::string& attention,
                                 std::chrono::milliseconds timeout, int put_blocks);

}  // namespace distca::runtime
