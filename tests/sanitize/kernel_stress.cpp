// Random problems for the CPU kernel, to be run under sanitizers (`make sanitize`): every tensor is a heap block of its
// own of exactly its size, padding between rows is NaN, keys lie scattered over two sources, and threads are real.
// Results must be finite. A document must get the same bits alone on one thread, and on several threads in one problem
// with another document that has other scores.
//
// kernel_stress [ROUNDS]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <span>
#include <string_view>
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

attention::Scores random_scores() {
  constexpr float kScales[] = {0.3f, 0.1f, -0.3f, 0.f}, kCaps[] = {0.f, 0.f, 4.f, 1.5f};
  attention::Scores scores;
  if (pick(0, 4) == 0) scores.mask.kind = MaskKind::kFull;
  if (pick(0, 2) == 0) scores.mask.window = pick(1, 300);
  scores.scale = kScales[pick(0, 3)];
  scores.softcap = kCaps[pick(0, 3)];
  return scores;
}

/// A document with tasks for some of its rows.
struct Document {
  HeadShape heads;
  attention::Scores scores;
  std::vector<std::pair<int64_t, int64_t>> ranges;  // of the tasks
  std::vector<int64_t> blocks;
  std::vector<BidirectionalRows> bidirectional;
  std::vector<Tensor> k, v, q, dout;
  attention::KeyGroup group;  // without tasks, gradients and bidirectional rows

  Document(const HeadShape& h, const attention::Scores& s) : heads(h), scores(s) {
    const int64_t length = pick(1, 700);
    // A random cut, some pieces left out.
    for (int64_t row = 0; row < length;) {
      const int64_t end = std::min(length, row + pick(1, 300));
      if (pick(0, 3) > 0 || (end == length && ranges.empty())) ranges.emplace_back(row, end);
      row = end;
    }
    group.kv_heads = heads.kv_heads;
    for (int64_t row = pick(0, 1) == 0 ? length : 0; row < length;) {
      const int64_t begin = row + pick(0, 1) * pick(0, 90);
      row = std::min(length, begin + pick(1, 150));
      if (begin < row) bidirectional.push_back({begin, row});
    }
    const DocumentMask mask{scores.mask, bidirectional};
    group.kv_begin = mask.first_key(ranges.front().first);
    group.kv_end = mask.end_key(ranges.back().second - 1, length);
    group.first_block = group.kv_begin / kKeyBlockRows;

    // Blocks of keys in any order, in one of two sources; the first and the last are not whole.
    int64_t rows[2] = {0, 0};
    for (int64_t b = group.first_block; b * kKeyBlockRows < group.kv_end; ++b) {
      const int64_t start = b * kKeyBlockRows, first = std::max(start, group.kv_begin), source = pick(0, 1);
      blocks.push_back(2 * (rows[source] - (first - start)) + source);
      rows[source] += std::min(start + kKeyBlockRows, group.kv_end) - first;
    }
    for (int source : {0, 1}) {
      k.emplace_back(heads.dtype, rows[source], heads.kv_heads, heads.dim, pick(0, 9));
      v.emplace_back(heads.dtype, rows[source], heads.kv_heads, heads.v_dim);
      group.k[source] = k.back().view;
      group.v[source] = v.back().view;
    }
    for (const auto& [begin, end] : ranges) {
      q.emplace_back(heads.dtype, end - begin, heads.q_heads, heads.dim, pick(0, 5));
      dout.emplace_back(heads.dtype, end - begin, heads.q_heads, heads.v_dim, pick(0, 5));
    }
  }
};

/// What is computed of a document: out, lse, delta and dq of each task; then dk and dv.
using Results = std::vector<Tensor>;

/// Computes documents as one problem. Each has its own entry of the problem's scores. Key gradients are in `dtype`. A
/// document that comes again adds its own to those of the first time, which must be in fp32.
std::vector<Results> compute(attention::CpuAttention& kernel, std::span<const Document* const> documents, DType dtype,
                             const Parallel& parallel, int round) {
  std::vector<attention::Scores> scores;
  std::vector<attention::KeyGroup> groups;
  std::vector<attention::Task> tasks;
  std::vector<attention::KeyGradRun> runs;
  std::vector<Results> results;
  runs.reserve(documents.size());  // spans into it are taken below
  const HeadShape& heads = documents[0]->heads;
  for (const Document* d : documents) {
    Results& r = results.emplace_back();
    attention::KeyGroup group = d->group;
    group.blocks = d->blocks;
    group.bidirectional = d->bidirectional;
    group.scores = std::ssize(scores);
    scores.push_back(d->scores);
    group.task_begin = std::ssize(tasks);
    for (size_t t = 0; t < d->ranges.size(); ++t) {
      const auto [begin, end] = d->ranges[t];
      const int64_t n = end - begin;
      r.emplace_back(heads.dtype, n, heads.q_heads, heads.v_dim);
      r.emplace_back(DType::kFloat32, n, heads.q_heads, 1);
      r.emplace_back(DType::kFloat32, n, heads.q_heads, 1);
      r.emplace_back(heads.dtype, n, heads.q_heads, heads.dim);
      const Tensor* const of_task = &r.back() - 3;
      tasks.push_back({std::ssize(groups), begin, end, d->q[t].view, of_task[0].view, of_task[1].view, d->dout[t].view,
                       of_task[2].view, of_task[3].view});
    }
    group.task_end = std::ssize(tasks);
    const int64_t num_keys = group.kv_end - group.kv_begin;
    r.emplace_back(dtype, num_keys, heads.kv_heads, heads.dim);
    r.emplace_back(dtype, num_keys, heads.kv_heads, heads.v_dim);
    const auto first = static_cast<size_t>(std::ranges::find(documents, d) - documents.begin());
    runs.push_back({group.kv_begin, group.kv_end, dtype, (&r.back() - 1)->view, r.back().view});
    if (first < groups.size()) {
      runs.back() = runs[first];
      runs.back().is_added = true;
    }
    group.grads = std::span(runs).last(1);
    groups.push_back(group);
  }
  const attention::Problem problem{heads, scores, groups, tasks};
  kernel.forward(problem, parallel);
  for (const attention::Task& task : tasks)
    attention::row_delta(heads, task.q_end - task.q_begin, {task.out, task.dout, {}, task.delta}, parallel);
  kernel.backward(problem, parallel);
  for (size_t i = 0; i < documents.size(); ++i) {
    const Document& d = *documents[i];
    const Results& r = results[i];
    for (size_t t = 0; t < d.ranges.size(); ++t) {
      const int64_t n = d.ranges[t].second - d.ranges[t].first;
      check(all_finite(r[4 * t], heads.dtype, n, heads.q_heads, heads.v_dim), "out is not finite", round);
      check(all_finite(r[4 * t + 3], heads.dtype, n, heads.q_heads, heads.dim), "dq is not finite", round);
    }
    const int64_t num_keys = d.group.kv_end - d.group.kv_begin;
    check(all_finite(r[r.size() - 2], dtype, num_keys, heads.kv_heads, heads.dim), "dk is not finite", round);
    check(all_finite(r.back(), dtype, num_keys, heads.kv_heads, heads.v_dim), "dv is not finite", round);
  }
  return results;
}

void run_round(int round, attention::CpuAttention& kernel) {
  constexpr int64_t kDims[] = {8, 24, 32, 64, 72, 136};
  const int64_t kv_heads = pick(1, 3), q_heads = kv_heads * pick(1, 3);
  const auto dtype = static_cast<DType>(pick(0, 2));
  HeadShape heads{q_heads, kv_heads, kDims[pick(0, 5)], kDims[pick(0, 5)], dtype};
  if (round % 16 == 9) heads.dim = kMostHeadDim;
  if (round % 32 == 25) heads.v_dim = kMostHeadDim;
  const attention::Scores scores = random_scores();
  attention::Scores others;
  do {
    others = random_scores();
  } while (others == scores);
  const Document one(heads, scores), other(heads, others);
  const Document* const both[] = {&one, &other};
  const Parallel several = threads(static_cast<int>(pick(2, 5)));
  const std::vector<Results> together = compute(kernel, both, dtype, several, round);
  for (size_t i = 0; i < 2; ++i) {
    const Results alone = compute(kernel, std::span(both).subspan(i, 1), dtype, threads(1), round)[0];
    for (size_t t = 0; t < alone.size(); ++t)
      check(alone[t].bytes == together[i][t].bytes, "threads, or another document, change bits", round);
  }
}

/// A document that comes twice has twice the key gradients, to the last bit.
void run_twice(int round, attention::CpuAttention& kernel) {
  const int64_t kv_heads = pick(1, 3);
  const int64_t v_dim = round % 16 == 12 ? kMostHeadDim : 40;
  const Document one({kv_heads * pick(1, 2), kv_heads, 24, v_dim, static_cast<DType>(pick(0, 2))}, random_scores());
  const Document* const twice[] = {&one, &one};
  const Results of_both = compute(kernel, twice, DType::kFloat32, threads(static_cast<int>(pick(2, 5))), round)[0];
  const Results alone = compute(kernel, std::span(twice).first(1), DType::kFloat32, threads(1), round)[0];
  for (size_t t = alone.size() - 2; t < alone.size(); ++t) {
    const std::vector<std::byte>&a = alone[t].bytes, &b = of_both[t].bytes;
    for (size_t at = 0; at + 4 <= a.size(); at += 4) {
      float x, y;
      std::memcpy(&x, a.data() + at, 4);
      std::memcpy(&y, b.data() + at, 4);
      check(y == 2.f * x || std::isnan(x), "a document that comes twice has not twice the key gradients", round);
    }
  }
}

/// Problems whose scores are wrong, which the kernel refuses.
void run_wrong_scores(attention::CpuAttention& kernel) {
  const auto is_refused = [&](size_t num_scores, int64_t scores_of_group, const Mask& mask) {
    const std::vector<attention::Scores> scores(num_scores, {mask});
    attention::KeyGroup group;
    group.kv_heads = 1;
    group.scores = scores_of_group;
    try {
      kernel.forward({{1, 1, 8, 8, DType::kFloat32}, scores, std::span(&group, 1), {}}, threads(1));
    } catch (const InvalidArgumentError&) {
      return true;
    }
    return false;
  };
  constexpr auto kMost = static_cast<size_t>(distca::kMostScores);
  check(!is_refused(kMost, 31, {}), "as many scores as there may be are refused", 0);
  check(is_refused(kMost + 1, 0, {}), "too many scores are taken", 0);
  check(is_refused(0, 0, {}), "a group without scores is taken", 0);
  check(is_refused(2, 2, {}), "a group with scores past the last ones is taken", 0);
  check(is_refused(2, -1, {}), "a group with scores before the first ones is taken", 0);
  check(is_refused(1, 0, {MaskKind::kFull, -5}), "a negative window of the full mask is taken", 0);
  check(is_refused(1, 0, {MaskKind::kCausal, -5}), "a negative window is taken", 0);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  int kernels = 0;
  for (const char* isa : {"amx", "amx_emulated", "avx512_bf16", "avx512_bf16_emulated", "avx512", "avx2", "plain"}) {
    try {
      attention::CpuAttention kernel(isa);
      run_wrong_scores(kernel);
      generator.seed(1);
      // Emulated instructions are slow.
      const int all = std::string_view(isa).ends_with("_emulated") ? (rounds + 7) / 8 : rounds;
      for (int round = 0; round < all; ++round) {
        run_round(round, kernel);
        if (round % 4 == 0) run_twice(round, kernel);
      }
      ++kernels;
    } catch (const InvalidArgumentError& error) {
      std::printf("not here: %s\n", error.what());
    }
  }
  std::printf("%d instruction sets, %d problems each, an eighth where they are emulated\n", kernels, rounds);
}
