// Turns torch tensors into the core's views, with the checks at the boundary, and the core's errors into torch's.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "common/dtype.h"
#include "common/error.h"
#include "common/parallel.h"
#include "common/rows.h"

namespace distca::ops {

using torch::stable::Tensor;

/// Runs an operator's body. An error of the core becomes a RuntimeError "distca <kind>: <message>", from which the
/// Python package makes the typed one.
template <class Body>
auto guarded(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw std::runtime_error(message("distca ", error.kind(), ": ", error.what()));
  }
}

inline std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline std::string device_name(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}

inline DType dtype_of(const Tensor& t, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType type = t.scalar_type();
  require(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
          " has dtype number ", static_cast<int>(type), "; float32, bfloat16 and float16 are supported");
  return type == ScalarType::Float ? DType::kFloat32 : type == ScalarType::Half ? DType::kFloat16 : DType::kBFloat16;
}

/// Throws unless `t` is on the device of `like`. Where any tensor is on a GPU, operators also get tensors of other
/// devices.
inline void check_device_of(const Tensor& like, const Tensor& t, const char* name) {
  require(t.device() == like.device(), name, " is on ", device_name(t), ", q on ", device_name(like));
}

/// Whether the last of three dimensions is contiguous. Strides of a tensor without elements do not count.
inline bool has_dense_rows(const Tensor& t) { return t.stride(2) == 1 || t.size(2) == 1 || t.numel() == 0; }

/// A [rows, heads, dim] view of a tensor. The last dimension must be contiguous; other strides are free.
inline RowView rows_of(const Tensor& t, const char* name) {
  require(t.dim() == 3, name, " has shape ", shape_of(t), "; [tokens, heads, dim] is expected");
  require(has_dense_rows(t), name, ": the last dimension must be contiguous, its stride is ", t.stride(2), "; pass ",
          name, ".contiguous()");
  const auto bytes = static_cast<int64_t>(t.element_size());
  return {static_cast<std::byte*>(t.data_ptr()), t.stride(0) * bytes, t.stride(1) * bytes};
}

/// A view of a [rows, heads] fp32 tensor (the log-sum-exp), with one element a head.
inline RowView scalars_of(const Tensor& t, const char* name) {
  require(t.dim() == 2 && t.scalar_type() == torch::headeronly::ScalarType::Float, name, " has shape ", shape_of(t),
          "; a float32 tensor [tokens, heads] is expected");
  return {static_cast<std::byte*>(t.data_ptr()), t.stride(0) * 4, t.stride(1) * 4};
}

/// A view of the gradient of lse, or no rows where lse has none.
inline RowView gradient_of_lse(const std::optional<Tensor>& dlse, const Tensor& lse) {
  if (!dlse.has_value()) return {};
  const RowView rows = scalars_of(*dlse, "dlse");
  require(dlse->size(0) == lse.size(0) && dlse->size(1) == lse.size(1), "dlse has shape ", shape_of(*dlse),
          ", and lse ", shape_of(lse));
  check_device_of(lse, *dlse, "dlse");
  return rows;
}

/// The words of an int64 CPU tensor, whatever its shape. `advice` ends the message of an error.
inline std::span<const int64_t> words_of(const Tensor& t, const char* name, const char* advice = "") {
  require(t.is_cpu() && t.scalar_type() == torch::headeronly::ScalarType::Long && t.is_contiguous(), name,
          " must be a contiguous int64 CPU tensor", advice);
  return {static_cast<const int64_t*>(t.data_ptr()), static_cast<size_t>(t.numel())};
}

inline std::span<const int64_t> plan_words(const Tensor& plan, const char* name) {
  return words_of(plan, name, "; pass the Python object distca.Plan, or its .tensor unmoved");
}

/// The head shape of q [T, H, D], k [T', Hkv, D], v [T', Hkv, Dv], checked against one another.
inline HeadShape heads_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const auto& [t, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}}) {
    rows_of(*t, name);
    check_device_of(q, *t, name);
  }
  const DType dtype = dtype_of(q, "q");
  require(dtype_of(k, "k") == dtype && dtype_of(v, "v") == dtype,
          "q, k and v have different dtypes: ", dtype_name(dtype), ", ", dtype_name(dtype_of(k, "k")), ", ",
          dtype_name(dtype_of(v, "v")));
  require(k.size(0) == v.size(0), "k ", shape_of(k), " and v ", shape_of(v), " have different lengths");
  require(k.size(1) == v.size(1), "k ", shape_of(k), " and v ", shape_of(v), " have different head counts");
  require(q.size(2) == k.size(2), "q ", shape_of(q), " and k ", shape_of(k), " have different head dims");
  require(k.size(1) >= 1 && q.size(1) >= 1 && q.size(1) % k.size(1) == 0, "q has ", q.size(1), " heads, k has ",
          k.size(1), "; the query heads must be a multiple of the key/value heads");
  for (int64_t dim : {q.size(2), v.size(2)})
    require(is_head_dim(dim), "head dim ", dim, "; multiples of 8 from 8 to ", kMostHeadDim, " are supported");
  return {q.size(1), k.size(1), q.size(2), v.size(2), dtype};
}

/// Throws unless `t` looks like the output: [rows, H, Dv] in the dtype of q.
inline void check_like_out(const Tensor& t, const char* name, const HeadShape& heads, int64_t rows) {
  require(dtype_of(t, name) == heads.dtype, name, " has another dtype than q");
  require(t.dim() == 3 && t.size(0) == rows && t.size(1) == heads.q_heads && t.size(2) == heads.v_dim, name,
          " has shape ", shape_of(t), "; [", rows, ", ", heads.q_heads, ", ", heads.v_dim, "] is expected");
}

inline Tensor empty_rows(const Tensor& like, int64_t rows, int64_t heads, int64_t dim) {
  const int64_t sizes[] = {rows, heads, dim};
  return torch::stable::new_empty(like, sizes);
}
inline Tensor empty_scalars(const Tensor& like, int64_t rows, int64_t heads) {
  const int64_t sizes[] = {rows, heads};
  return torch::stable::new_empty(like, sizes, torch::headeronly::ScalarType::Float);
}

inline Tensor empty_floats(const Tensor& like, int64_t count) {
  const int64_t sizes[] = {count};
  return torch::stable::new_empty(like, sizes, torch::headeronly::ScalarType::Float);
}
inline float* floats_of(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<float*>(t->data_ptr()) : nullptr;
}

inline Tensor empty_bytes(const Tensor& like, int64_t bytes) {
  const int64_t sizes[] = {bytes};
  return torch::stable::new_empty(like, sizes, torch::headeronly::ScalarType::Byte);
}
inline std::byte* bytes_of(const Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); }

/// A gradient of autograd with a contiguous last dimension. An expanded one is copied.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.dim() != 3 || has_dense_rows(t) ? t : torch::stable::contiguous(t);
}

inline float scale_or_default(std::optional<double> scale, const HeadShape& heads) {
  const double s = scale.value_or(1.0 / std::sqrt(static_cast<double>(heads.dim)));
  const auto rounded = static_cast<float>(s);
  require(std::isfinite(rounded), "scale = ", s, "; a finite float32 is expected");
  return rounded;
}

inline float checked_softcap(double softcap) {
  const auto rounded = static_cast<float>(softcap);
  require(std::isfinite(rounded) && softcap >= 0.0 && (rounded > 0.f || softcap == 0.0), "softcap = ", softcap,
          "; 0 (none) or a positive finite float32 is expected");
  return rounded;
}

inline void check_sinks(const Tensor& sinks, const HeadShape& heads) {
  require(sinks.scalar_type() == torch::headeronly::ScalarType::Float, "sinks must be float32");
  require(sinks.dim() == 1 && sinks.size(0) == heads.q_heads && sinks.is_contiguous(), "sinks has shape ",
          shape_of(sinks), "; a contiguous tensor [", heads.q_heads, "] is expected");
}

/// The sinks, one float32 for each query head, on the device of `like`; null if there are none.
inline const float* sinks_of(const std::optional<Tensor>& sinks, const Tensor& like, const HeadShape& heads) {
  if (!sinks.has_value()) return nullptr;
  check_sinks(*sinks, heads);
  check_device_of(like, *sinks, "sinks");
  return static_cast<const float*>(sinks->data_ptr());
}

/// PyTorch's own thread pool. No other threads compute beside it.
inline Parallel torch_threads() {
  Parallel parallel;
  parallel.num_workers = static_cast<int>(torch::stable::get_num_threads());
  parallel.run = [](int n, const std::function<void(int)>& body) {
    torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
    });
  };
  return parallel;
}

}  // namespace distca::ops
