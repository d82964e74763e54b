// Random problems for the CPU kernel, to be run under sanitizers (`make sanitize`): every tensor is a heap block of its
// own of exactly its size, padding between rows is NaN, keys lie scattered over two sources, and threads are real.
// Results must be finite, and the same bits for one thread and for several.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "attention/attention.h"

using namespace distca;
using attention::kKeyBlockRows;

namespace {

std::mt19937 generator;
int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

/// [rows, heads, dim] with `gap` elements of NaN after each row.
struct Tensor {
  std::vector<std::byte> bytes;
  RowView view;

  Tensor(DType dtype, int64_t rows, int64_t heads, int64_t dim, int64_t gap = 0) {
    const int64_t size = dtype_bytes(dtype), row = (heads * dim + gap) * size;
    bytes.assign(static_cast<size_t>(std::max<int64_t>(rows * row - gap * size, 0)), std::byte{0xff});
    view = {bytes.data(), row, dim * size};
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * heads * dim; ++i) {
      std::byte* at = view.at(i / (heads * dim), i / dim % heads) + i % dim * size;
      const float x = normal(generator);
      const uint16_t half = dtype == DType::kBFloat16 ? float_to_bf16(x) : float_to_fp16(x);
      if (dtype == DType::kFloat32)
        std::memcpy(at, &x, 4);
      else
        std::memcpy(at, &half, 2);
    }
  }
};

Parallel threads(int n) {
  Parallel parallel;
  parallel.num_workers = n;
  parallel.run = [](int workers, const std::function<void(int)>& body) {
    std::vector<std::thread> pool;
    for (int i = 1; i < workers; ++i) pool.emplace_back(body, i);
    body(0);
    for (std::thread& t : pool) t.join();
  };
  return parallel;
}

void check(bool condition, const char* what, int round) {
  if (condition) return;
  std::fprintf(stderr, "round %d: %s\n", round, what);
  std::exit(1);
}

bool all_finite(const Tensor& t, DType dtype, int64_t rows, int64_t heads, int64_t dim) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) {
        const std::byte* at = t.view.at(i, h) + d * dtype_bytes(dtype);
        float x;
        uint16_t half;
        if (dtype == DType::kFloat32)
          std::memcpy(&x, at, 4);
        else
          std::memcpy(&half, at, 2), x = dtype == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
        if (!std::isfinite(x)) return false;
      }
    }
  }
  return true;
}

void run_round(int round, attention::CpuAttention& kernel) {
  constexpr int64_t kDims[] = {8, 24, 32, 64, 72, 136};
  const int64_t kv_heads = pick(1, 3), q_heads = kv_heads * pick(1, 3);
  const auto dtype = static_cast<DType>(pick(0, 2));
  const HeadShape heads{q_heads, kv_heads, kDims[pick(0, 5)], kDims[pick(0, 5)], dtype};
  Mask mask{pick(0, 4) == 0 ? MaskKind::kFull : MaskKind::kCausal, 0};
  if (mask.kind == MaskKind::kCausal && pick(0, 2) == 0) mask.window = pick(1, 300);
  const int64_t length = pick(1, 700);

  // Tasks: a random cut, some pieces left out.
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t row = 0; row < length;) {
    const int64_t end = std::min(length, row + pick(1, 300));
    if (pick(0, 3) > 0 || (end == length && ranges.empty())) ranges.emplace_back(row, end);
    row = end;
  }
  const int64_t kv_begin = mask.first_key(ranges.front().first);
  const int64_t kv_end = mask.kind == MaskKind::kFull ? length : ranges.back().second;

  // Blocks of keys in any order, in one of two sources; the first and the last are not whole.
  const int64_t first_block = kv_begin / kKeyBlockRows, num_blocks = (kv_end - 1) / kKeyBlockRows + 1 - first_block;
  int64_t rows[2] = {0, 0};
  std::vector<int64_t> blocks(static_cast<size_t>(num_blocks));
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t start = (first_block + b) * kKeyBlockRows, begin = std::max(start, kv_begin);
    const int64_t source = pick(0, 1);
    blocks[static_cast<size_t>(b)] = 2 * (rows[source] - (begin - start)) + source;
    rows[source] += std::min(start + kKeyBlockRows, kv_end) - begin;
  }
  const Tensor k[2] = {{dtype, rows[0], kv_heads, heads.dim, pick(0, 9)},
                       {dtype, rows[1], kv_heads, heads.dim, pick(0, 9)}};
  const Tensor v[2] = {{dtype, rows[0], kv_heads, heads.v_dim}, {dtype, rows[1], kv_heads, heads.v_dim}};

  std::vector<std::vector<Tensor>> results[2];
  std::vector<Tensor> qs, douts;
  for (const auto& [begin, end] : ranges) {
    qs.emplace_back(dtype, end - begin, q_heads, heads.dim, pick(0, 5));
    douts.emplace_back(dtype, end - begin, q_heads, heads.v_dim, pick(0, 5));
  }
  attention::KeyGroup group;
  group.kv_heads = kv_heads;
  group.kv_begin = kv_begin;
  group.kv_end = kv_end;
  group.first_block = first_block;
  group.blocks = blocks;
  for (int s : {0, 1}) group.k[s] = k[s].view, group.v[s] = v[s].view;
  group.task_end = std::ssize(ranges);
  attention::Problem problem{heads, mask, 0.3f, {}, {}, pick(0, 2) == 0 ? 4.f : 0.f};

  for (int run : {0, 1}) {
    const Parallel parallel = threads(run == 0 ? 1 : static_cast<int>(pick(2, 5)));
    std::vector<attention::Task> tasks;
    for (size_t t = 0; t < ranges.size(); ++t) {
      const auto [begin, end] = ranges[t];
      const int64_t n = end - begin;
      std::vector<Tensor>& r = results[run].emplace_back();
      r.emplace_back(dtype, n, q_heads, heads.v_dim);
      r.emplace_back(DType::kFloat32, n, q_heads, 1);
      r.emplace_back(DType::kFloat32, n, q_heads, 1);
      r.emplace_back(dtype, n, q_heads, heads.dim);
      tasks.push_back({0, begin, end, qs[t].view, r[0].view, r[1].view, douts[t].view, r[2].view, r[3].view});
    }
    std::vector<Tensor>& of_keys = results[run].emplace_back();
    of_keys.emplace_back(dtype, kv_end - kv_begin, kv_heads, heads.dim);
    of_keys.emplace_back(DType::kFloat32, kv_end - kv_begin, kv_heads, heads.v_dim);
    Tensor dv_rounded(dtype, kv_end - kv_begin, kv_heads, heads.v_dim);
    const attention::KeyGradRun grads[] = {{kv_begin, kv_end, dtype, of_keys[0].view, dv_rounded.view}};
    group.grads = grads;
    problem.groups = {&group, 1};
    problem.tasks = tasks;
    kernel.forward(problem, parallel);
    for (size_t t = 0; t < ranges.size(); ++t)
      attention::row_dot(heads, ranges[t].second - ranges[t].first, tasks[t].out, tasks[t].dout, tasks[t].delta,
                         parallel);
    kernel.backward(problem, parallel);
    of_keys[1] = std::move(dv_rounded);
    for (size_t t = 0; t < ranges.size(); ++t) {
      const int64_t n = ranges[t].second - ranges[t].first;
      check(all_finite(results[run][t][0], dtype, n, q_heads, heads.v_dim), "out is not finite", round);
      check(all_finite(results[run][t][3], dtype, n, q_heads, heads.dim), "dq is not finite", round);
    }
    check(all_finite(of_keys[0], dtype, kv_end - kv_begin, kv_heads, heads.dim), "dk is not finite", round);
    check(all_finite(of_keys[1], dtype, kv_end - kv_begin, kv_heads, heads.v_dim), "dv is not finite", round);
  }
  for (size_t t = 0; t < results[0].size(); ++t)
    for (size_t i = 0; i < results[0][t].size(); ++i)
      check(results[0][t][i].bytes == results[1][t][i].bytes, "threads change bits", round);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  int kernels = 0;
  for (const char* isa : {"avx512_bf16", "avx512", "avx2", "plain"}) {
    try {
      attention::CpuAttention kernel(isa);
      generator.seed(1);
      for (int round = 0; round < rounds; ++round) run_round(round, kernel);
      ++kernels;
    } catch (const InvalidArgumentError& error) {
      std::printf("not here: %s\n", error.what());
    }
  }
  std::printf("%d instruction sets, %d problems each\n", kernels, rounds);
}
