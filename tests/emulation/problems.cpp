#include "problems.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

namespace problems {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t pick(std::mt19937& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Array random_array(DType dtype, int64_t rows, int64_t heads, int64_t dim, std::mt19937& random) {
  Array a(rows, heads, dim);
  std::normal_distribution<double> normal;
  for (double& x : a.x) {
    std::byte bits[4];
    write(dtype, bits, normal(random));
    x = read(dtype, bits);
  }
  return a;
}

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

/// Adds `factor` times `a` to `to`.
void add(double factor, const double* a, int64_t size, double* to) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) to[i] += factor * a[i];
}

bool sees(const Case& c, int64_t row, int64_t key) {
  const Mask& mask = c.scores.mask;
  if (mask.is_full()) return mask.window == 0 || std::abs(row - key) < mask.window;
  for (const auto& [begin, end] : c.bidirectional)
    if (begin <= row && row < key && key < end) return true;
  return key <= row && (mask.window == 0 || key > row - mask.window);
}

}  // namespace

float read(DType dtype, const std::byte* p) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return dtype == DType::kBFloat16 ? distca::bf16_to_float(bits) : distca::fp16_to_float(bits);
}

void write(DType dtype, std::byte* p, double x) {
  const auto f = static_cast<float>(x);
  const uint16_t bits = dtype == DType::kBFloat16 ? distca::float_to_bf16(f) : distca::float_to_fp16(f);
  if (dtype == DType::kFloat32)
    std::memcpy(p, &f, 4);
  else
    std::memcpy(p, &bits, 2);
}

Case random_case(HeadShape heads, int64_t most_rows, std::mt19937& random) {
  Case c;
  c.heads = heads;
  c.length = pick(random, 1, most_rows);
  auto& [mask, scale, softcap] = c.scores;
  if (pick(random, 0, 3) == 0) mask.kind = MaskKind::kFull;
  if (pick(random, 0, 2) == 0) mask.window = pick(random, 1, most_rows);
  const bool all_keys = mask.is_full() && mask.window == 0;
  c.keys = all_keys && pick(random, 0, 1) == 0 ? pick(random, 1, most_rows) : c.length;
  for (int64_t row = pick(random, 0, 1) == 0 ? c.length : 0; row < c.length;) {
    const int64_t begin = row + pick(random, 0, 1) * pick(random, 0, 90);
    row = std::min(c.length, begin + pick(random, 1, 150));
    if (begin < row) c.bidirectional.push_back({begin, row});
  }
  scale = 1.f / std::sqrt(static_cast<float>(heads.dim));
  if (pick(random, 0, 4) == 0) scale = -scale;
  if (pick(random, 0, 2) == 0) softcap = 1.5f;
  c.q = random_array(heads.dtype, c.length, heads.q_heads, heads.dim, random);
  c.k = random_array(heads.dtype, c.keys, heads.kv_heads, heads.dim, random);
  c.v = random_array(heads.dtype, c.keys, heads.kv_heads, heads.v_dim, random);
  c.dout = random_array(heads.dtype, c.length, heads.q_heads, heads.v_dim, random);
  return c;
}

Answer answer(const Case& c, const std::vector<bool>& covered, bool gradients) {
  const HeadShape& heads = c.heads;
  const float scale = c.scores.scale, softcap = c.scores.softcap;
  Answer a{Array(c.length, heads.q_heads, heads.v_dim), Array(c.length, heads.q_heads, 1),
           Array(c.length, heads.q_heads, heads.dim),   Array(c.keys, heads.kv_heads, heads.dim),
           Array(c.keys, heads.kv_heads, heads.v_dim),  Array(1, heads.q_heads, 1)};
  std::fill(a.max_logits.x.begin(), a.max_logits.x.end(), -kInfinity);
  std::vector<int64_t> seen;
  std::vector<double> scores, slopes;
  for (int64_t row = 0; row < c.length; ++row) {
    if (!covered[static_cast<size_t>(row)]) continue;
    seen.clear();
    for (int64_t key = 0; key < c.keys; ++key)
      if (sees(c, row, key)) seen.push_back(key);
    scores.assign(seen.size(), 0);
    slopes.assign(seen.size(), scale);
    for (int64_t head = 0; head < heads.q_heads; ++head) {
      const int64_t kv_head = head / heads.group_heads();
      double sum = 0.;
      for (size_t i = 0; i < seen.size(); ++i) {
        double s = scale * dot(c.q.at(row, head), c.k.at(seen[i], kv_head), heads.dim);
        if (softcap != 0.f) {
          const double t = std::tanh(s / softcap);
          s = softcap * t;
          slopes[i] = scale * (1 - t * t);
        }
        scores[i] = s;
        sum += std::exp(s);
      }
      a.lse.at(row, head)[0] = std::log(sum);
      double& largest = a.max_logits.at(0, head)[0];
      largest = std::max(largest, *std::max_element(scores.begin(), scores.end()));
      double* out = a.out.at(row, head);
      for (size_t i = 0; i < seen.size(); ++i) {
        const double p = std::exp(scores[i]) / sum;
        add(p, c.v.at(seen[i], kv_head), heads.v_dim, out);
      }
      if (!gradients) continue;
      const double* dout = c.dout.at(row, head);
      const double delta = dot(out, dout, heads.v_dim);
      for (size_t i = 0; i < seen.size(); ++i) {
        const int64_t key = seen[i];
        const double p = std::exp(scores[i]) / sum;
        const double ds = p * (dot(c.v.at(key, kv_head), dout, heads.v_dim) - delta) * slopes[i];
        add(p, dout, heads.v_dim, a.dv.at(key, kv_head));
        add(ds, c.k.at(key, kv_head), heads.dim, a.dq.at(row, head));
        add(ds, c.q.at(row, head), heads.dim, a.dk.at(key, kv_head));
      }
    }
  }
  return a;
}

namespace {

/// Fresh memory, not a number anywhere, for [rows, heads, dim] with some more after each row.
RowView fresh(Placement& p, DType dtype, int64_t rows, int64_t heads, int64_t dim, std::mt19937& random) {
  const int64_t size = distca::dtype_bytes(dtype), head_stride = (dim * size + 15) / 16 * 16;
  const int64_t row_stride = heads * head_stride + 16 * pick(random, 0, 2);
  auto& bytes = p.memory.emplace_back(static_cast<size_t>(rows * row_stride + 64), std::byte{0xff});
  auto base = reinterpret_cast<uintptr_t>(bytes.data());
  return {reinterpret_cast<std::byte*>((base + 15) / 16 * 16), row_stride, head_stride};
}

void copy_in(DType dtype, const Array& from, int64_t row, int64_t head, int64_t rows, int64_t heads, RowView to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < from.dim; ++d)
        write(dtype, to.at(i, h) + d * distca::dtype_bytes(dtype), from.at(row + i, head + h)[d]);
}

void cut_tasks(PlacedCase& of, std::mt19937& random) {
  const Case& c = *of.c;
  for (int64_t row = 0; row < c.length;) {
    const int64_t end = std::min(c.length, row + pick(random, 1, c.length));
    if (pick(random, 0, 3) > 0 || (end == c.length && of.tasks.empty())) of.tasks.push_back({row, end});
    row = end;
  }
  of.keys.assign(static_cast<size_t>(c.keys), true);
  of.covered.assign(static_cast<size_t>(c.length), false);
  for (const auto& t : of.tasks) std::fill(of.covered.begin() + t.begin, of.covered.begin() + t.end, true);
}

using Range = PlacedCase::Range;

/// The range of keys that rows of some tasks see.
Range keys_of(const Case& c, const std::vector<Range>& tasks) {
  Range keys{c.keys, 0};
  for (const Range& t : tasks) {
    for (int64_t key = 0; key < c.keys; ++key) {
      if (!sees(c, t.begin, key) && !sees(c, t.end - 1, key)) continue;
      keys.begin = std::min(keys.begin, key);
      keys.end = std::max(keys.end, key + 1);
    }
  }
  return keys;
}

/// Where the gradients of some keys go, and whether a group has been told so.
struct GradPlace {
  attention::KeyGradRun run;
  bool is_written = false;
};

/// Some tasks of one head range of the case as a group, its tasks after those that are there. It has keys of its own,
/// and adds to the gradients of `places` that a group before it has written.
void place_group(const PlacedCase& of, const std::vector<Range>& tasks, int64_t first_head, int64_t kv_heads,
                 bool remote, std::vector<GradPlace>& places, Placement& p, std::mt19937& random) {
  constexpr int64_t kRows = attention::kKeyBlockRows;
  const Case& c = *of.c;
  const DType dtype = c.heads.dtype;
  const int64_t per_group = c.heads.group_heads(), q_heads = kv_heads * per_group;
  Range keys = keys_of(c, tasks);
  // A document may have the rows later than another one, and none of those before them.
  const int64_t shift = p.may_shift && pick(random, 0, 1) == 0 ? pick(random, 1, 300) : 0;
  keys = {keys.begin + shift, keys.end + shift};
  p.first_heads.push_back(first_head);
  p.shifts.push_back(shift);
  attention::KeyGroup& group = p.groups.emplace_back();
  group.kv_heads = kv_heads;
  group.scores = static_cast<int64_t>(p.scores.size()) - 1;
  auto& bidirectional = p.bidirectional.emplace_back(c.bidirectional);
  for (distca::BidirectionalRows& rows : bidirectional) rows = {rows.begin + shift, rows.end + shift};
  group.bidirectional = bidirectional;
  group.kv_begin = keys.begin;
  group.kv_end = keys.end;
  group.first_block = keys.begin / kRows;

  // Blocks in any order, in one of two sources; between them rows that belong to nobody.
  auto& blocks = p.blocks.emplace_back();
  int64_t rows[2] = {0, 0};
  const int64_t num_blocks = (keys.end - 1) / kRows + 1 - group.first_block;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t start = (group.first_block + b) * kRows, begin = std::max(start, keys.begin);
    const int64_t source = pick(random, 0, 1);
    rows[source] += pick(random, 0, 3) == 0 ? pick(random, 1, 70) : 0;
    blocks.push_back(2 * (rows[source] - (begin - start)) + source);
    rows[source] += std::min(start + kRows, keys.end) - begin;
  }
  group.blocks = blocks;
  for (int s = 0; s < 2; ++s) {
    group.k[s] = fresh(p, dtype, rows[s], kv_heads, c.heads.dim, random);
    group.v[s] = fresh(p, dtype, rows[s], kv_heads, c.heads.v_dim, random);
  }
  std::vector<std::function<void()>> copies;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int64_t start = (group.first_block + b) * kRows, begin = std::max(start, keys.begin);
    const int64_t end = std::min(start + kRows, keys.end), word = blocks[static_cast<size_t>(b)];
    const RowView k = group.k[word & 1].from_row((word >> 1) + begin - start);
    const RowView v = group.v[word & 1].from_row((word >> 1) + begin - start);
    copies.emplace_back([&c, dtype, row = begin - shift, rows = end - begin, first_head, kv_heads, k, v] {
      copy_in(dtype, c.k, row, first_head, rows, kv_heads, k);
      copy_in(dtype, c.v, row, first_head, rows, kv_heads, v);
    });
  }

  group.task_begin = static_cast<int64_t>(p.task_table.size());
  for (const Range& range : tasks) {
    const int64_t n = range.end - range.begin;
    attention::Task& task = p.task_table.emplace_back();
    task.group = static_cast<int64_t>(p.groups.size()) - 1;
    task.q_begin = range.begin + shift;
    task.q_end = range.end + shift;
    task.q = fresh(p, dtype, n, q_heads, c.heads.dim, random);
    task.dout = fresh(p, dtype, n, q_heads, c.heads.v_dim, random);
    const bool in_place = c.heads.dim == c.heads.v_dim && pick(random, 0, 1) == 0;
    task.out = in_place ? task.q : fresh(p, dtype, n, q_heads, c.heads.v_dim, random);
    task.dq = in_place ? task.dout : fresh(p, dtype, n, q_heads, c.heads.dim, random);
    task.lse = fresh(p, DType::kFloat32, n, q_heads, 1, random);
    task.delta = fresh(p, DType::kFloat32, n, q_heads, 1, random);
    task.max_logits = p.max_logits.emplace_back(std::make_unique<float[]>(static_cast<size_t>(q_heads))).get();
    std::fill_n(task.max_logits, q_heads, -std::numeric_limits<float>::infinity());
    copies.emplace_back([&c, dtype, range, n, first_head, per_group, q_heads, q = task.q, dout = task.dout] {
      copy_in(dtype, c.q, range.begin, first_head * per_group, n, q_heads, q);
      copy_in(dtype, c.dout, range.begin, first_head * per_group, n, q_heads, dout);
    });
  }
  group.task_end = static_cast<int64_t>(p.task_table.size());

  auto& runs = p.runs.emplace_back();
  for (GradPlace& place : places) {
    attention::KeyGradRun run = place.run;
    run.begin += shift;
    run.end += shift;
    if (run.begin < keys.begin || run.end > keys.end) continue;
    run.is_added = std::exchange(place.is_written, true);
    if (const int64_t rows = run.end - run.begin; run.is_added && rows > 1 && pick(random, 0, 1) == 0) {
      const int64_t first = pick(random, 1, rows - 1);  // what is added may be cut
      runs.push_back(run);
      runs.back().end = run.begin += first;
      run.dk = run.dk.from_row(first);
      run.dv = run.dv.from_row(first);
    }
    runs.push_back(run);
  }
  group.grads = runs;

  p.words.push_back(std::make_unique<uint64_t>(4));
  uint64_t* word = p.words.back().get();
  p.arrivals.emplace_back([copies, word] {
    for (const auto& copy : copies) copy();
    *word = 7;
  });
  p.signals.resize(p.task_table.size(), remote ? attention::cuda::Signal{word, 7} : attention::cuda::Signal{});
}

/// One head range of the case: as one group, or as several that add to the same gradients.
void place_groups(PlacedCase& of, int64_t first_head, int64_t kv_heads, bool remote, Placement& p,
                  std::mt19937& random) {
  const Case& c = *of.c;
  std::vector<std::vector<Range>> parts(static_cast<size_t>(pick(random, 1, 3)));
  for (const Range& task : of.tasks) parts[static_cast<size_t>(pick(random, 0, std::ssize(parts) - 1))].push_back(task);
  std::erase_if(parts, [](const std::vector<Range>& tasks) { return tasks.empty(); });
  std::vector<Range> keys;
  std::vector<int64_t> cuts;
  for (const auto& tasks : parts) {
    keys.push_back(keys_of(c, tasks));
    cuts.insert(cuts.end(), {keys.back().begin, keys.back().end});
  }
  std::ranges::sort(cuts);
  // Places of at most 200 rows, which groups have either whole or not at all.
  std::vector<GradPlace> places;
  std::vector<bool> written(static_cast<size_t>(c.keys), false);
  for (int64_t row = cuts.front(); row < cuts.back();) {
    const int64_t end = std::min(*std::ranges::upper_bound(cuts, row), row + pick(random, 1, 200));
    const auto groups = std::ranges::count_if(keys, [&](const Range& k) { return k.begin <= row && row < k.end; });
    const DType dtype = groups > 1 || pick(random, 0, 1) == 0 ? DType::kFloat32 : c.heads.dtype;
    if (groups > 0) {
      places.push_back({{row, end, dtype, fresh(p, dtype, end - row, kv_heads, c.heads.dim, random),
                         fresh(p, dtype, end - row, kv_heads, c.heads.v_dim, random)}});
      std::fill(written.begin() + row, written.begin() + end, true);
    }
    row = end;
  }
  std::transform(of.keys.begin(), of.keys.end(), written.begin(), of.keys.begin(), std::logical_and<>());
  const auto late = static_cast<size_t>(pick(random, 0, std::ssize(parts) - 1));
  for (const auto& tasks : parts) {
    const bool is_late = remote && &tasks == &parts[late];
    if (is_late) p.remote_group = p.groups.size();
    place_group(of, tasks, first_head, kv_heads, is_late, places, p, random);
  }
}

}  // namespace

std::unique_ptr<Placement> place(std::span<const Case* const> cases, bool remote, bool may_shift,
                                 std::mt19937& random) {
  auto p = std::make_unique<Placement>();
  p->may_shift = may_shift;
  // Spans point into these.
  p->blocks.reserve(6 * cases.size());
  p->runs.reserve(6 * cases.size());
  p->bidirectional.reserve(6 * cases.size());
  for (const Case* c : cases) {
    PlacedCase& of = p->cases.emplace_back();
    of.c = c;
    cut_tasks(of, random);
    p->scores.push_back(c->scores);
    of.group_begin = p->groups.size();
    const int64_t kv_heads = c->heads.kv_heads, split = pick(random, 0, kv_heads - 1);
    if (split > 0) place_groups(of, 0, split, false, *p, random);
    place_groups(of, split, kv_heads - split, remote && c == cases.back(), *p, random);
    of.group_end = p->groups.size();
  }
  p->problem = {cases[0]->heads, p->scores, p->groups, p->task_table};
  return p;
}

void give_statistics(const Placement& p, const PlacedCase& of, const Answer& right) {
  const Case& c = *of.c;
  for (size_t g = of.group_begin; g < of.group_end; ++g) {
    const attention::KeyGroup& group = p.groups[g];
    const int64_t first_head = p.first_heads[g];
    const int64_t q_heads = group.kv_heads * c.heads.group_heads(), first = first_head * c.heads.group_heads();
    for (int64_t t = group.task_begin; t < group.task_end; ++t) {
      const attention::Task& task = p.task_table[static_cast<size_t>(t)];
      for (int64_t row = task.q_begin; row < task.q_end; ++row) {
        for (int64_t h = 0; h < q_heads; ++h) {
          const int64_t of_case = row - p.shifts[g];
          double delta = 0;
          for (int64_t d = 0; d < c.heads.v_dim; ++d)
            delta += right.out.at(of_case, first + h)[d] * c.dout.at(of_case, first + h)[d];
          write(DType::kFloat32, task.lse.at(row - task.q_begin, h), right.lse.at(of_case, first + h)[0]);
          write(DType::kFloat32, task.delta.at(row - task.q_begin, h), delta);
        }
      }
    }
  }
}

Answer results(const Placement& p, const PlacedCase& of) {
  const Case& c = *of.c;
  const HeadShape& heads = c.heads;
  Answer a{Array(c.length, heads.q_heads, heads.v_dim), Array(c.length, heads.q_heads, 1),
           Array(c.length, heads.q_heads, heads.dim),   Array(c.keys, heads.kv_heads, heads.dim),
           Array(c.keys, heads.kv_heads, heads.v_dim),  Array(1, heads.q_heads, 1)};
  std::fill(a.max_logits.x.begin(), a.max_logits.x.end(), -kInfinity);
  for (Array* array : {&a.out, &a.lse, &a.dq, &a.dk, &a.dv}) std::fill(array->x.begin(), array->x.end(), kNan);
  const auto copy_out = [](DType dtype, RowView from, int64_t rows, int64_t n, Array& to, int64_t row, int64_t head) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < n; ++h)
        for (int64_t d = 0; d < to.dim; ++d)
          to.at(row + i, head + h)[d] = read(dtype, from.at(i, h) + d * distca::dtype_bytes(dtype));
  };
  for (size_t g = of.group_begin; g < of.group_end; ++g) {
    const attention::KeyGroup& group = p.groups[g];
    const int64_t first_head = p.first_heads[g];
    const int64_t q_heads = group.kv_heads * heads.group_heads(), first = first_head * heads.group_heads();
    for (int64_t t = group.task_begin; t < group.task_end; ++t) {
      const attention::Task& task = p.task_table[static_cast<size_t>(t)];
      const int64_t n = task.q_end - task.q_begin, row = task.q_begin - p.shifts[g];
      copy_out(heads.dtype, task.out, n, q_heads, a.out, row, first);
      copy_out(DType::kFloat32, task.lse, n, q_heads, a.lse, row, first);
      copy_out(heads.dtype, task.dq, n, q_heads, a.dq, row, first);
      for (int64_t h = 0; h < q_heads; ++h) {
        double& largest = a.max_logits.at(0, first + h)[0];
        largest = std::max<double>(largest, task.max_logits[h]);
      }
    }
    for (const attention::KeyGradRun& run : group.grads) {
      const int64_t row = run.begin - p.shifts[g];
      copy_out(run.dtype, run.dk, run.end - run.begin, group.kv_heads, a.dk, row, first_head);
      copy_out(run.dtype, run.dv, run.end - run.begin, group.kv_heads, a.dv, row, first_head);
    }
  }
  return a;
}

Difference difference(const Array& got, const Array& right, const std::vector<bool>& rows) {
  double squares = 0, of_right = 0, count = 0;
  Difference result;
  const int64_t per_row = right.heads * right.dim;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!rows[row]) continue;
    for (int64_t i = 0; i < per_row; ++i) {
      const auto at = row * static_cast<size_t>(per_row) + static_cast<size_t>(i);
      const double d = got.x[at] - right.x[at];
      squares += d * d;
      count += 1;
      of_right += right.x[at] * right.x[at];
      if (!(std::fabs(d) <= result.largest)) result.largest = std::isnan(d) ? kInfinity : std::fabs(d);
    }
  }
  // With one key dq and dk are zero, and what is computed is the noise of sums in another order.
  result.rms = count == 0 ? 0 : std::sqrt(squares / std::max(of_right, 1e-8 * count));
  if (std::isnan(result.rms)) result.rms = kInfinity;
  return result;
}

}  // namespace problems
