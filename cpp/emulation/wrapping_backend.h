// A backend that leaves to another backend what it does not do itself.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "runtime/backend.h"

namespace distca::emulation {

class WrappingBackend : public runtime::Backend {
 public:
  explicit WrappingBackend(std::shared_ptr<runtime::Backend> inner) : inner_(std::move(inner)) {}

  std::string device() const override { return inner_->device(); }
  std::string attention(const HeadShape& heads) const override { return inner_->attention(heads); }
  bool plan_independent(const HeadShape& heads) const override { return inner_->plan_independent(heads); }
  bool takes_gradient_of_lse() const override { return inner_->takes_gradient_of_lse(); }
  void check(const HeadShape& heads, float softcap) const override { inner_->check(heads, softcap); }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return inner_->allocate(bytes); }
  std::shared_ptr<std::byte> scratch(int64_t bytes) override { return inner_->scratch(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override { inner_->copy(to, from, n); }
  void finish() override { inner_->finish(); }
  void reduce(const runtime::ReduceTable& table, DType dtype) override { inner_->reduce(table, dtype); }
  void fill(const RowView& rows, const RowExtent& n, runtime::Fill value) override { inner_->fill(rows, n, value); }
  void run(std::span<const runtime::RowWork> rows) override { inner_->run(rows); }
  void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows,
                 const Parallel& parallel) override {
    inner_->row_delta(heads, num_rows, rows, parallel);
  }
  void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
                 const Parallel& parallel) override {
    inner_->add_sinks(heads, num_rows, out, lse, sinks, parallel);
  }
  bool finds_max_logits() const override { return inner_->finds_max_logits(); }
  void largest(std::span<const float* const> terms, int64_t n, float* to) override { inner_->largest(terms, n, to); }
  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    inner_->forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    inner_->backward(problem, parallel);
  }

 private:
  std::shared_ptr<runtime::Backend> inner_;
};

}  // namespace distca::emulation
