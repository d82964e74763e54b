#include "emulation/queued_backend.h"

#include <array>
#include <utility>

#include "emulation/host_streams.h"
#include "emulation/problem_table.h"

namespace distca::emulation {

using namespace runtime;

namespace {

using transport::Table;
using transport::table_part;
using transport::table_value;
using transport::TablePart;

/// The arguments of row_delta.
struct RowDelta {
  HeadShape heads;
  int64_t num_rows;
  attention::DeltaRows rows;
};

/// The arguments of add_sinks.
struct AddSinks {
  HeadShape heads;
  int64_t num_rows;
  RowView out, lse;
  const float* sinks;
};

/// The arguments of largest, but for its terms.
struct Largest {
  int64_t n;
  float* to;
};

struct ReduceScalars {
  DType dtype;
  int32_t num_chunks;
};

class QueuedBackend final : public Backend {
 public:
  explicit QueuedBackend(std::shared_ptr<HostStreams> streams)
      : cpu_(make_backend("cpu", "auto")), streams_(std::move(streams)) {}

  std::string device() const override { return cpu_->device(); }
  std::string attention(const HeadShape& heads) const override { return cpu_->attention(heads); }
  bool plan_independent(const HeadShape& heads) const override { return cpu_->plan_independent(heads); }
  void check(const HeadShape& heads, float softcap) const override { cpu_->check(heads, softcap); }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return cpu_->allocate(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    run_one({.to = to, .from = from, .n = n});
  }
  void finish() override { streams_->join_host(); }
  void reduce(const ReduceTable& table, DType dtype) override {
    const ReduceScalars scalars = {dtype, table.num_chunks};
    const std::array parts = {table_value("scalars", scalars), table_part("sums", table.entries),
                              table_part("terms", table.terms)};
    queue("sum of gradients", parts, [this](const Table& t) {
      const ReduceScalars& s = t.get<ReduceScalars>(0)[0];
      const auto entries = t.get<ReduceEntry>(1);
      const auto terms = t.get<const std::byte*>(2);
      ReduceTable kept;
      kept.entries.assign(entries.begin(), entries.end());
      kept.terms.assign(terms.begin(), terms.end());
      kept.num_chunks = s.num_chunks;
      cpu_->reduce(kept, s.dtype);
    });
  }
  void fill(const RowView& rows, const RowExtent& n, Fill value) override {
    run_one({.kind = RowWork::Kind::kFill, .to = rows, .from = {}, .n = n, .fill = value});
  }
  void run(std::span<const RowWork> rows) override {
    queue("batch of rows", std::array{table_part("extents of rows", rows)},
          [this](const Table& t) { cpu_->run(t.get<RowWork>(0)); });
  }
  void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, const Parallel&) override {
    const RowDelta arguments = {heads, num_rows, rows};
    queue("row delta", std::array{table_value("arguments", arguments)}, [this](const Table& t) {
      const RowDelta& a = t.get<RowDelta>(0)[0];
      cpu_->row_delta(a.heads, a.num_rows, a.rows, Parallel());
    });
  }
  void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
                 const Parallel&) override {
    const AddSinks arguments = {heads, num_rows, out, lse, sinks};
    queue("sinks", std::array{table_value("arguments", arguments)}, [this](const Table& t) {
      const AddSinks& a = t.get<AddSinks>(0)[0];
      cpu_->add_sinks(a.heads, a.num_rows, a.out, a.lse, a.sinks, Parallel());
    });
  }
  void largest(std::span<const float* const> terms, int64_t n, float* to) override {
    const Largest arguments = {n, to};
    queue("largest scores", std::array{table_value("arguments", arguments), table_part("terms", terms)},
          [this](const Table& t) {
            const Largest& a = t.get<Largest>(0)[0];
            cpu_->largest(t.get<const float*>(1), a.n, a.to);
          });
  }
  // These ignore the Parallel, because the caller's threads may be gone when their turn comes.
  void forward(const attention::Problem& problem, const Parallel&) override {
    queue_attention("forward", problem, &Backend::forward);
  }
  void backward(const attention::Problem& problem, const Parallel&) override {
    queue_attention("backward", problem, &Backend::backward);
  }

 private:
  void queue(const char* operation, std::span<const TablePart> parts, HostStreams::Work work) {
    streams_->queue(transport::Streams::Stream::kWork, operation, parts, std::move(work));
  }
  void run_one(const RowWork& row) { run(std::span(&row, 1)); }

  using Attention = void (Backend::*)(const attention::Problem&, const Parallel&);
  void queue_attention(const char* operation, const attention::Problem& problem, Attention attention) {
    queue(operation, problem_parts_.of(problem), [this, attention](const Table& t) {
      const KeptProblem kept(t.layout(), t.host());
      if (!kept.problem.groups.empty()) ((*cpu_).*attention)(kept.problem, Parallel());
    });
  }

  std::shared_ptr<Backend> cpu_;
  std::shared_ptr<HostStreams> streams_;
  ProblemParts problem_parts_;
};

}  // namespace

Device make_host_device(std::chrono::milliseconds timeout) {
  auto streams = std::make_shared<HostStreams>(timeout);
  return {std::make_shared<QueuedBackend>(streams), streams};
}

}  // namespace distca::emulation
