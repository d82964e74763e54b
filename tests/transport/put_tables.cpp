// Does on the host, thread by thread, what the put and the reduce kernel do with their tables, and compares with plain
// loops over the same rows: test_transport_tables.py compiles and runs it. Prints what it has compared.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "runtime/reduce_table.h"
#include "transport/put_table.h"
#include "transport/send_table.h"

using namespace distca;
using namespace distca::runtime;
using namespace distca::transport;

namespace {

/// Numbers that are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  int64_t below(int64_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

void require_that(bool fact, const char* what, uint64_t seed) {
  if (fact) return;
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  std::exit(1);
}

std::vector<std::byte> random_bytes(Random& random, int64_t size) {
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.below(256));
  return bytes;
}

/// Every chunk once, as the kernel's blocks share them; words as its threads do. Returns the bytes moved, by message.
std::vector<int64_t> run_puts(const PutTable& table, uint64_t seed) {
  std::vector<int64_t> bytes(table.messages().size());
  std::vector<int32_t> chunks(table.messages().size());
  const auto entries = table.entries();
  for (int32_t chunk = 0; chunk < table.num_chunks(); ++chunk) {
    const PutEntry& e =
        entries[static_cast<size_t>(entry_of_chunk(entries.data(), static_cast<int32_t>(entries.size()), chunk))];
    const Rows rows = rows_of_chunk(e, chunk);
    require_that(rows.begin < rows.end, "a chunk has no rows", seed);
    const auto num_words = static_cast<uint32_t>((rows.end - rows.begin) * e.words_per_row);
    for (uint32_t i = 0; i < num_words; ++i) {
      const WordPlace place = place_of_word(e, rows.begin, i);
      require_that(reinterpret_cast<uintptr_t>(place.from) % static_cast<uintptr_t>(e.word_bytes) == 0 &&
                       reinterpret_cast<uintptr_t>(place.to) % static_cast<uintptr_t>(e.word_bytes) == 0,
                   "a word is not aligned", seed);
      std::memcpy(place.to, place.from, static_cast<size_t>(e.word_bytes));
    }
    bytes[static_cast<size_t>(e.message)] += num_words * static_cast<int64_t>(e.word_bytes);
    ++chunks[static_cast<size_t>(e.message)];
  }
  for (size_t m = 0; m < chunks.size(); ++m)
    require_that(chunks[m] == table.messages()[m].num_chunks, "chunks of a message", seed);
  return bytes;
}

/// Strides of at least the extent, in elements, with a gap now and then.
RowView random_view(Random& random, std::byte* data, const RowExtent& n, int64_t element) {
  const int64_t gaps[] = {0, 0, element, 16};
  const int64_t head_stride = n.head_bytes + gaps[random.below(4)];
  return {data + element * random.below(3), n.num_heads * head_stride + gaps[random.below(4)], head_stride};
}

void check_puts(uint64_t seed) {
  Random random(seed);
  const int64_t element = int64_t{2} << random.below(2);
  constexpr int64_t kBytes = 1 << 18;
  const std::vector<std::byte> source = random_bytes(random, kBytes);
  std::vector<std::byte> target = random_bytes(random, 4 * kBytes), expected = target;
  PutTable table(int64_t{64} << random.below(10));
  std::vector<int64_t> bytes;
  int64_t used = 0;
  for (int32_t peer = 0; peer < 4; ++peer) {
    table.open({peer, 0, nullptr, 0, nullptr, 0, 0});
    bytes.push_back(0);
    for (int64_t puts = random.below(3); puts >= 0; --puts) {
      const RowExtent n{1 + random.below(40), 1 + random.below(5), element * (1 + random.below(70))};
      const RowView from = random_view(random, const_cast<std::byte*>(source.data()), n, element);
      RowView to = random_view(random, target.data() + used, n, element);
      used = to.data + n.num_rows * to.row_stride - target.data();
      table.add(to, from, n);
      copy_rows({expected.data() + (to.data - target.data()), to.row_stride, to.head_stride}, from, n);
      bytes.back() += n.bytes();
    }
  }
  require_that(run_puts(table, seed) == bytes, "bytes of a message", seed);
  require_that(target == expected, "rows were put elsewhere, or others", seed);
  require_that(table.num_bytes() == bytes[0] + bytes[1] + bytes[2] + bytes[3], "bytes of the table", seed);
}

/// Messages packed by put tables into a send arena and sent in pieces. Returns how many puts needed no piece of their
/// own.
int64_t check_sends(uint64_t seed) {
  Random random(seed);
  constexpr int64_t kBytes = 1 << 17;
  const std::vector<std::byte> source = random_bytes(random, kBytes), before = random_bytes(random, kBytes);
  std::vector<std::byte> arena = random_bytes(random, kBytes), heap = before, expected = before;
  std::vector<bool> is_gap(static_cast<size_t>(kBytes));
  SendTable sends(arena);
  PutTable table;
  int64_t used = 0, saved = 0;
  for (int32_t peer = 0; peer < 3; ++peer) {
    table.open({.peer = peer});
    sends.open({.peer = peer});
    for (int64_t puts = random.below(5); puts >= 0; --puts, ++saved) {
      const RowExtent n{1 + random.below(20), 1 + random.below(4), 2 * (1 + random.below(40))};
      const RowView from = random_view(random, const_cast<std::byte*>(source.data()), n, 2);
      const int64_t head_stride = n.head_bytes + 2 * random.below(2), row_stride = n.num_heads * head_stride;
      std::byte* const to = heap.data() + used;
      std::byte* const packed = sends.add(to, row_stride, head_stride, n);
      require_that(
          packed != nullptr && (reinterpret_cast<uintptr_t>(packed) - reinterpret_cast<uintptr_t>(to)) % 16 == 0,
          "packed at another alignment", seed);
      table.add({packed, row_stride, head_stride}, from, n);
      copy_rows({expected.data() + used, row_stride, head_stride}, from, n);
      for (int64_t i = 0; i < n.num_rows * n.num_heads - 1; ++i)
        for (int64_t j = n.head_bytes; j < head_stride; ++j)
          is_gap[static_cast<size_t>(used + i * head_stride + j)] = true;
      used += (n.num_rows * n.num_heads - 1) * head_stride + n.head_bytes;
      if (random.below(2) == 0) used = (used + 64) / 64 * 64;  // else the next rows follow at once
    }
    uint64_t word = 0;
    sends.close(&word, 7);
    require_that(sends.messages().back().signal == &word && sends.messages().back().signal_value == 7, "signal", seed);
  }
  run_puts(table, seed);
  size_t piece = 0;
  for (const SendMessage& m : sends.messages()) {
    require_that(m.first_piece == static_cast<int32_t>(piece), "pieces of a message", seed);
    for (int32_t i = 0; i < m.num_pieces; ++i, ++piece, --saved) {
      const SendPiece& p = sends.pieces()[piece];
      std::memcpy(p.to, p.from, static_cast<size_t>(p.bytes));
    }
  }
  require_that(piece == sends.pieces().size(), "pieces of no message", seed);
  for (size_t i = 0; i < heap.size(); ++i)
    require_that(is_gap[i] || heap[i] == expected[i], "the heap got other bytes", seed);
  SendTable small({arena.data(), 100});
  small.open({.peer = 0});
  const auto fits = [&](int64_t rows) { return small.add(arena.data() + 200, 20, 10, {rows, 2, 10}) != nullptr; };
  require_that(fits(4) && !fits(1), "room for too much", seed);
  small.clear();
  require_that(small.empty() && small.pieces().empty(), "something is left", seed);
  small.open({.peer = 0});
  require_that(fits(4), "no room again", seed);
  return saved;
}

/// One home: its rounds by the reduce tables, and by the rows of the slice one after another. Returned tensors are in
/// fp32 here, whatever the dtype of the heads.
struct Home {
  explicit Home(const plan::SliceView& slice_of_rank) : slice(slice_of_rank) {
    const plan::Header& h = slice.header();
    for (auto* tensors : {&by_table, &by_rows}) {
      tensors->arena.resize(static_cast<size_t>(h.arena_bytes[1] / 4));
      tensors->dk.resize(static_cast<size_t>(h.num_rows * h.kv_heads * h.dim));
      tensors->dv.resize(static_cast<size_t>(h.num_rows * h.kv_heads * h.v_dim));
    }
  }

  struct Tensors {
    std::vector<float> arena, dk, dv;
  };
  plan::SliceView slice;
  Tensors by_table, by_rows;
};

RowView view(std::vector<float>& tensor, int64_t heads, int64_t dim) {
  return {reinterpret_cast<std::byte*>(tensor.data()), heads * dim * 4, dim * 4};
}

/// Sums that were finished, and those that were carried to a later round.
std::pair<int64_t, int64_t> check_reduction(const plan::SliceView& slice, uint64_t seed) {
  const plan::Header& h = slice.header();
  Home home(slice);
  Random random(seed);
  const DType dtype = slice.heads().dtype;
  const auto widen = [&](uint16_t bits) {
    return dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
  };
  const bool narrow = dtype != DType::kFloat32;
  size_t home_in = home.by_rows.arena.size();  // the last part of an arena
  for (const plan::ReceiveRow& r : slice.receives(plan::Phase::kBackward))
    home_in = std::min(home_in, static_cast<size_t>(r.source / 4));
  // What servers and this one's own kernel left there: the same for both.
  const auto leave = [&](size_t begin, size_t end, bool in_fp32) {
    for (size_t i = begin; i < end; ++i) {
      float& x = home.by_rows.arena[i];
      x = static_cast<float>(random.below(1 << 20)) / 999.f;
      if (!in_fp32) {
        const auto bits = [&] { return float_to_bf16(static_cast<float>(random.below(1 << 20)) / 9999.f) & 0x7bffu; };
        x = std::bit_cast<float>(bits() | bits() << 16);
      }
      home.by_table.arena[i] = x;
    }
  };
  leave(0, home_in, true);
  leave(home_in, home.by_rows.arena.size(), !narrow);
  int64_t finished = 0, later = 0;
  ReduceTable table;
  for (int64_t round = 0; round < h.num_rounds; ++round) {
    table.fill(slice, round, reinterpret_cast<std::byte*>(home.by_table.arena.data()),
               view(home.by_table.dk, h.kv_heads, h.dim), view(home.by_table.dv, h.kv_heads, h.v_dim));
    for (int32_t chunk = 0; chunk < table.num_chunks; ++chunk) {
      const ReduceEntry& e = table.entries[static_cast<size_t>(
          entry_of_chunk(table.entries.data(), static_cast<int32_t>(table.entries.size()), chunk))];
      const int64_t begin = (chunk - e.first_chunk) * kReduceChunk;
      for (int64_t i = begin; i < std::min(begin + kReduceChunk, e.num_values); i += 4) {
        const Four sum = reduced(e, table.terms.data(), i, widen);
        std::memcpy(e.finishes ? place_of_value(e, i, 4) : reinterpret_cast<std::byte*>(e.sum + i), &sum, 16);
      }
    }
    for (const ReduceEntry& e : table.entries) ++(e.finishes ? finished : later);

    for (const plan::ReceiveRow& r : slice.receives(plan::Phase::kBackward)) {
      if (r.round != round || r.action == static_cast<int64_t>(plan::ReceiveAction::kCopy)) continue;
      const bool is_dk = plan::is_key_gradient_dk(static_cast<plan::TensorKind>(r.tensor));
      const int64_t values = r.num_rows * (r.kv_head_end - r.kv_head_begin) * (is_dk ? h.dim : h.v_dim);
      float* const sum = home.by_rows.arena.data() + r.sum / 4;
      const auto* const term = reinterpret_cast<const std::byte*>(home.by_rows.arena.data()) + r.source;
      for (int64_t i = 0; i < values; ++i) {
        uint16_t bits = 0;
        float value = 0;
        if (narrow)
          std::memcpy(&bits, term + 2 * i, 2);
        else
          std::memcpy(&value, term + 4 * i, 4);
        if (narrow) value = widen(bits);
        sum[i] = r.action == static_cast<int64_t>(plan::ReceiveAction::kAssign) ? value : sum[i] + value;
      }
    }
    // Home-in of the round is over; the next one finds other values there. Sums must not be touched.
    leave(home_in, home.by_rows.arena.size(), !narrow);
  }
  std::set<int64_t> sums;
  for (const plan::ReceiveRow& s : slice.receives(plan::Phase::kBackward)) {
    if (s.action == static_cast<int64_t>(plan::ReceiveAction::kCopy) || !sums.insert(s.sum).second) continue;
    const bool is_dk = plan::is_key_gradient_dk(static_cast<plan::TensorKind>(s.tensor));
    const int64_t dim = is_dk ? h.dim : h.v_dim, heads = s.kv_head_end - s.kv_head_begin;
    std::vector<float>& tensor = is_dk ? home.by_rows.dk : home.by_rows.dv;
    const float* sum = home.by_rows.arena.data() + s.sum / 4;
    for (int64_t row = 0; row < s.num_rows; ++row, sum += heads * dim)
      std::copy(sum, sum + heads * dim, tensor.data() + ((s.row + row) * h.kv_heads + s.kv_head_begin) * dim);
  }
  require_that(finished == std::ssize(sums), "each sum is finished once", seed);
  require_that(home.by_table.dk == home.by_rows.dk && home.by_table.dv == home.by_rows.dv, "sums differ", seed);
  return {finished, later};
}

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 300; ++seed) check_puts(seed);
  int64_t saved = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) saved += check_sends(seed);
  require_that(saved > 100, "no puts were sent together", 0);
  int64_t sums = 0, later = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const int64_t num_ranks = 3 + random.below(6);
    std::vector<int64_t> lengths;
    int64_t total = 0;
    for (int64_t i = 0; i < num_ranks; ++i) {
      lengths.push_back(1 + random.below(i == 0 ? 900 : 200));
      total += lengths.back();
    }
    plan::PlanOptions options;
    const int64_t kv_heads = 1 + random.below(3);
    const int64_t dim = 8 + 8 * random.below(3), v_dim = 8 + 8 * random.below(3);
    options.heads = {2 * kv_heads, kv_heads, dim, v_dim, static_cast<DType>(seed % 3)};
    options.reduce_dtype = options.heads.dtype;
    options.min_rows = 1;
    options.tolerance_ppm = 0;
    const plan::Plan plan(
        std::make_shared<plan::Layout>(plan::Layout::packed(lengths, num_ranks, total / num_ranks + 1)), options);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const std::vector<int64_t> words = plan.slice(rank);
      const plan::SliceView slice(words);
      const auto [finished, carried] = check_reduction(slice, seed * 100 + static_cast<uint64_t>(rank));
      sums += finished;
      later += carried;
    }
  }
  std::printf("%lld sums, %lld of them carried to a later round\n", static_cast<long long>(sums),
              static_cast<long long>(later));
}
