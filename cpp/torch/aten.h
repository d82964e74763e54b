// ATen's operators by name, through the stable dispatcher. Arguments that a later PyTorch has appended to a schema stay
// None.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "common/error.h"
#include "torch/gpu.h"

namespace distca::ops::aten {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// The arguments of a call and, after it, its results. Words beyond the given arguments are zero, which is None.
using Stack = std::array<StableIValue, 32>;

template <class... Args>
Stack call(const char* name, const char* overload, const Args&... args) {
  static_assert(sizeof...(Args) <= std::tuple_size_v<Stack>);
  Stack stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}

/// Takes a result over. It may be called once for each result.
inline Tensor tensor(StableIValue result) { return torch::stable::detail::to<Tensor>(result); }

inline Tensor unary(const char* name, const Tensor& x) { return tensor(call(name, "", x)[0]); }
inline Tensor binary(const char* name, const char* overload, const Tensor& a, const Tensor& b) {
  return tensor(call(name, overload, a, b)[0]);
}
inline Tensor multiply(const Tensor& a, const Tensor& b) { return binary("aten::mul", "Tensor", a, b); }
inline Tensor divide(const Tensor& a, const Tensor& b) { return binary("aten::div", "Tensor", a, b); }
inline Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

inline Tensor narrow_rows(Tensor t, int64_t begin, int64_t count) { return torch::stable::narrow(t, 0, begin, count); }
inline void assign(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }
inline Tensor cast(const Tensor& t, ScalarType dtype) { return torch::stable::to(t, dtype); }

inline Tensor select_rows(const Tensor& t, const Tensor& index) {
  return tensor(call("aten::index_select", "", t, int64_t{0}, index)[0]);
}
/// Sets to[index[i]] = rows[i]. No row may be given twice.
inline void scatter_rows(const Tensor& to, const Tensor& index, const Tensor& rows) {
  tensor(call("aten::index_copy_", "", to, int64_t{0}, index, rows)[0]);
}

/// The words as a vector on the device of `like`. The host does not wait for the copy: it is made from page-locked
/// memory, which PyTorch keeps until the copy is done. A captured graph would copy from there at each launch; therefore
/// a capture is refused.
template <class Word>
Tensor vector_on_device_of(const Tensor& like, std::span<const Word> words) {
  constexpr ScalarType dtype = sizeof(Word) == 8                ? ScalarType::Long
                               : std::is_floating_point_v<Word> ? ScalarType::Float
                                                                : ScalarType::Int;
  const int64_t sizes[] = {static_cast<int64_t>(words.size())};
  const bool queued = like.is_cuda();
  require(
      !queued || !gpu_is_capturing(like.get_device_index()), "PyTorch's flash attention takes the rows of tasks from ",
      "memory that is gone when a graph is launched; only recorded steps of a context with attention=\"own\" can be ",
      "captured into a CUDA graph");
  const Tensor host =
      torch::stable::empty(sizes, dtype, std::nullopt, std::nullopt, queued ? std::optional<bool>(true) : std::nullopt);
  std::copy(words.begin(), words.end(), static_cast<Word*>(host.data_ptr()));
  Tensor device = torch::stable::new_empty(like, sizes, dtype);
  torch::stable::copy_(device, host, queued);
  return device;
}

}  // namespace distca::ops::aten
