// Attention over tasks by ATen's flash attention with variable lengths. It runs on every NVIDIA GPU from compute
// capability 8.0 on, and follows torch.nn.attention.activate_flash_attention_impl. Results are held to the error bound
// of PyTorch's attention. They are not bitwise the same for all ways to cut tasks.
//
// Forward reads shared keys where they are. ATen's backward cannot share keys between tasks. There each task gets a
// copy of its keys, and the partial gradients are added in fp32 in the order of the tasks.
#pragma once

#include <optional>
#include <span>
#include <tuple>

#include "common/dtype.h"
#include "common/mask.h"
#include "torch/local_tasks.h"

namespace distca::ops {

/// Everything besides q and k that scores depend on.
struct FlashOptions {
  Mask mask;
  float scale = 1.f;
  /// If set, in place of the mask: how many keys a row sees before and after the one that lies as far from its task's
  /// last key as the row from its task's last row. It sees that key too. `keys_after` not set: all after it.
  std::optional<int64_t> keys_before = std::nullopt, keys_after = std::nullopt;

  bool operator==(const FlashOptions&) const = default;
};

/// Throws InvalidArgumentError or DeviceError unless flash attention takes such heads on the device of q. The error
/// names what is supported.
void check_flash(const Tensor& q, const HeadShape& heads, float softcap);

/// Attention over `tasks` (in any order; query rows do not overlap) of q [T, H, D], k and v [T', Hkv, D]: out like q,
/// and lse [T, H] fp32. Rows of no task have out 0 and lse -inf.
std::tuple<Tensor, Tensor> flash_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                         std::span<const LocalTask> tasks, const FlashOptions& options);

/// Returns dq like q, and dk, dv of the shape of k, v. These are in the dtype of k and v, or in fp32 where tasks share
/// keys.
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& lse,
                                                  std::span<const LocalTask> tasks, const FlashOptions& options);

/// What is said where lse has a gradient: ATen makes delta itself, of out and dout.
inline constexpr const char* kNoGradientOfLse =
    "the gradient of lse needs distca's own kernels (attention=\"own\"): PyTorch's flash attention takes none; "
    "use lse.detach()";
/// What is said where the largest scores are asked for.
inline constexpr const char* kNoMaxLogits =
    "max_logits need distca's own kernels (attention=\"own\"): PyTorch's flash attention does not tell them";
/// The gradient of lse, if a backend takes one. Else none; throws if it is not zero, for which a GPU's host waits.
std::optional<Tensor> taken_gradient_of_lse(bool backend_takes_it, const std::optional<Tensor>& dlse);

/// Does what attention::add_sinks does, to out [T, H, D] and lse [T, H] in place. The sinks, [H] fp32, lie on their
/// device.
void add_sinks(const Tensor& out, const Tensor& lse, const Tensor& sinks);

/// The same rows. They are copied where the kernels of a GPU could not load 16 bytes of them at once.
Tensor aligned_rows(const Tensor& t);

/// distca.attention and its backward, computed so, with their checks. Forward always is deterministic. Backward is
/// where torch.use_deterministic_algorithms is on; ATen's kernels ask for that themselves.
std::tuple<Tensor, Tensor> attention_by_flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                              const std::optional<Tensor>& sinks, const LocalOptions& options);
std::tuple<Tensor, Tensor, Tensor> attention_by_flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                               const Tensor& v, const Tensor& out, const Tensor& lse,
                                                               const Tensor& tasks, const std::optional<Tensor>& sinks,
                                                               const LocalOptions& options,
                                                               const std::optional<Tensor>& dlse);

}  // namespace distca::ops
