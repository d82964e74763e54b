// Runs the code of the CUDA kernels on the emulated machine (machine.h): random problems, of which every row that must
// not be read is not a number, against float64; and twice over differently cut tasks, once beside a document with other
// scores. Rows have to be the same bits. Prints the errors of each; ends with 1 where one is too large.
//
// run_kernels FAMILY PASS DIM V_DIM DTYPE ROUNDS SEED
// FAMILY: hopper (compute capability 9.0) or ampere (8.0 and later)
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "attention/ampere_backward.h"
#include "attention/ampere_forward.h"
#include "attention/hopper_backward.h"
#include "attention/hopper_forward.h"
#include "attention/work_list.h"
#include "machine.h"
#include "problems.h"

namespace {

using namespace distca::attention::cuda;
using problems::Answer;
using problems::Array;
using problems::Case;
using problems::Placement;

/// The kernels of compute capability 9.0 for some columns.
template <class Element, int kDim, int kValueDim>
struct Hopper {
  using Forward = ForwardConfig<Element, kDim, kValueDim>;
  using Backward = BackwardConfig<Element, kDim, kValueDim>;
  static constexpr int kForwardThreads = kThreads, kBackwardThreads = kThreads;
  static void forward(const KernelParams& p, Forward::Shared& shared) { forward_cta<Forward>(p, shared); }
  static void backward(const KernelParams& p, Backward::Shared& shared) { backward_cta<Backward>(p, shared); }
  static void store(const KernelParams& p, const StoreItem& item) { store_queries<Backward>(p, item, 0, 1); }
};

/// Those of 8.0 and later.
template <class Element, int kDim, int kValueDim>
struct Ampere {
  using Forward = AmpereForwardConfig<Element, kDim, kValueDim>;
  using Backward = AmpereBackwardConfig<Element, kDim, kValueDim>;
  static constexpr int kForwardThreads = Forward::kThreads, kBackwardThreads = Backward::kThreads;
  static void forward(const KernelParams& p, Forward::Shared& shared) { ampere_forward_cta<Forward>(p, shared); }
  static void backward(const KernelParams& p, Backward::Shared& shared) { ampere_backward_cta<Backward>(p, shared); }
  static void store(const KernelParams& p, const StoreItem& item) { ampere_store_queries<Backward>(p, item, 0, 1); }
};

int failures = 0;

void check(const char* name, const Array& got, const Array& right, const std::vector<bool>& rows, double bound) {
  const problems::Difference d = problems::difference(got, right, rows);
  const bool good = d.rms <= bound;
  std::printf("  %-4s rms %.2e of %.2e, largest %.2e%s\n", name, d.rms, bound, d.largest, good ? "" : "  TOO LARGE");
  failures += good ? 0 : 1;
}

void check_same(const char* name, const Array& a, const Array& b, const std::vector<bool>& x,
                const std::vector<bool>& y) {
  const auto per_row = static_cast<size_t>(a.heads * a.dim);
  size_t different = 0, rows = 0;
  for (size_t row = 0; row < x.size(); ++row) {
    if (!x[row] || !y[row]) continue;
    ++rows;
    different += std::memcmp(&a.x[row * per_row], &b.x[row * per_row], per_row * sizeof(double)) != 0 ? 1 : 0;
  }
  if (different == 0) return;
  std::printf("  %-4s %zu of %zu rows DIFFER between two problems that have them\n", name, different, rows);
  ++failures;
}

/// Pointers of a list's tables, as the launcher makes them.
struct Tables {
  std::vector<TensorMap> maps;
  int next_item = 0;
  uint64_t counts[2] = {};

  KernelParams params(const WorkList& list) {
    KernelParams p = list.params;
    maps.resize(list.maps.size());
    for (size_t i = 0; i < maps.size(); ++i) {
      static_assert(sizeof(MapSpec) <= sizeof(TensorMap));
      std::memcpy(static_cast<void*>(&maps[i]), &list.maps[i], sizeof(MapSpec));
    }
    counts[0] = list.items.size();
    counts[1] = list.store_items.size();
    p.counts = counts;
    p.items = list.items.data();
    p.store_items = list.store_items.data();
    p.tasks = list.tasks.data();
    p.groups = list.groups.data();
    p.runs = list.runs.data();
    p.before = list.before.data();
    p.bidirectional = list.bidirectional.data();
    p.blocks = list.blocks.data();
    p.maps = maps.data();
    p.next_item = &next_item;
    return p;
  }
};

/// Lets rows arrive, those of remote groups some time after the start.
void let_arrive(emulation::Machine& machine, Placement& placement) {
  for (size_t g = 0; g < placement.arrivals.size(); ++g) {
    if (g != placement.remote_group) {
      placement.arrivals[g]();
      continue;
    }
    auto wait = std::make_shared<std::function<void(int)>>();
    *wait = [&machine, wait, arrive = placement.arrivals[g]](int rounds) {
      if (rounds == 0) return arrive();
      machine.later([wait, rounds] { (*wait)(rounds - 1); });
    };
    (*wait)(20);
  }
}

template <class Family>
void run_forward(Placement& placement, bool remote, std::mt19937& random) {
  using Config = Family::Forward;
  WorkList list;
  list_forward(placement.problem, remote ? std::span(placement.signals) : std::span<Signal>(),
               {Config::kRows, Config::kKeys}, list);
  Tables tables;
  const KernelParams params = tables.params(list);
  emulation::Machine machine(static_cast<uint32_t>(random()));
  let_arrive(machine, placement);
  machine.run(2, Family::kForwardThreads, sizeof(typename Config::Shared),
              [&](std::byte* shared) { Family::forward(params, *reinterpret_cast<typename Config::Shared*>(shared)); });
}

template <class Family>
void run_backward(Placement& placement, bool remote, bool deterministic, std::mt19937& random) {
  using Config = Family::Backward;
  WorkList list;
  list_backward(placement.problem, remote ? std::span(placement.signals) : std::span<Signal>(),
                {Config::kRows, Config::kKeys}, list);
  Tables tables;
  KernelParams params = tables.params(list);
  const auto num_tiles = static_cast<size_t>(params.num_store_items());
  std::vector<hopper::Words4> sums(num_tiles * Config::kParts * Config::kPartElements / 4);  // for their alignment
  std::vector<int> turns(num_tiles * Config::kTurnsPerTile);
  params.dq_sums = reinterpret_cast<float*>(sums.data());
  params.turns = deterministic ? turns.data() : nullptr;
  for (params.pass = 0; params.pass < Config::kPasses; ++params.pass) {
    std::vector<int> stored(2 * list.items.size());
    params.stored = stored.data();
    tables.next_item = 0;
    emulation::Machine machine(static_cast<uint32_t>(random()));
    if (params.pass == 0) let_arrive(machine, placement);
    machine.run(3, Family::kBackwardThreads, sizeof(typename Config::Shared), [&](std::byte* shared) {
      Family::backward(params, *reinterpret_cast<typename Config::Shared*>(shared));
    });
  }
  for (int i = 0; i < params.num_store_items(); ++i) Family::store(params, params.store_items[i]);
}

void print(const Case& c) {
  const auto& [mask, scale, softcap] = c.scores;
  std::printf("  %lld rows, %lld keys, %s, window %lld, scale %g, softcap %g\n", static_cast<long long>(c.length),
              static_cast<long long>(c.keys), mask.is_full() ? "full" : "causal", static_cast<long long>(mask.window),
              static_cast<double>(scale), static_cast<double>(softcap));
  for (const auto& [begin, end] : c.bidirectional)
    std::printf("  bidirectional: [%lld, %lld)\n", static_cast<long long>(begin), static_cast<long long>(end));
}

/// Computes cases as one problem and checks all results. Returns the results and the covered rows of cases[which].
template <class Family>
std::pair<Answer, std::vector<bool>> compute(const std::string& pass, std::span<const Case* const> cases, size_t which,
                                             bool deterministic, bool may_shift, std::mt19937& random) {
  const double roundoff = cases[0]->heads.dtype == distca::DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const bool backward = pass == "backward", remote = random() % 2 == 0;
  const auto placement = problems::place(cases, remote, may_shift, random);
  std::vector<Answer> right;
  for (const problems::PlacedCase& of : placement->cases) {
    right.push_back(problems::answer(*of.c, of.covered, backward));
    if (backward) problems::give_statistics(*placement, of, right.back());
  }
  if (backward)
    run_backward<Family>(*placement, remote, deterministic, random);
  else
    run_forward<Family>(*placement, remote, random);
  std::vector<Answer> got;
  for (size_t i = 0; i < cases.size(); ++i) {
    const problems::PlacedCase& of = placement->cases[i];
    got.push_back(problems::results(*placement, of));
    print(*of.c);
    if (!backward) {
      check("out", got[i].out, right[i].out, of.covered, roundoff);
      check("lse", got[i].lse, right[i].lse, of.covered, 1e-6);
      check("max_logits", got[i].max_logits, right[i].max_logits, {true}, 1e-6);
      continue;
    }
    check("dq", got[i].dq, right[i].dq, of.covered, 1.5 * roundoff);
    check("dk", got[i].dk, right[i].dk, of.keys, 1.5 * roundoff);
    check("dv", got[i].dv, right[i].dv, of.keys, 1.5 * roundoff);
  }
  return {std::move(got[which]), placement->cases[which].covered};
}

/// Computes a document alone, and then, with its tasks cut in another way, in a problem that has another document with
/// other scores.
template <class Family>
void run_round(const std::string& pass, distca::HeadShape heads, std::mt19937& random) {
  const int64_t rows = Family::Forward::kDim > 256 ? 200 : 500;  // for their time
  const Case c = problems::random_case(heads, rows, random);
  Case other;
  do other = problems::random_case(heads, 200, random);
  while (other.scores == c.scores);
  std::printf("%s: %lld heads on %lld\n", pass.c_str(), static_cast<long long>(heads.q_heads),
              static_cast<long long>(heads.kv_heads));
  const bool deterministic = random() % 2 == 0;
  const bool may_shift = pass == "backward" && random() % 2 == 0;  // the bits then depend on where rows are in blocks
  const size_t which = random() % 2;
  const Case* alone[] = {&c};
  const Case* both[] = {&other, &other};
  both[which] = &c;
  const auto [first, first_rows] = compute<Family>(pass, alone, 0, deterministic, may_shift, random);
  const auto [second, second_rows] = compute<Family>(pass, both, which, deterministic, may_shift, random);
  if (pass == "forward") {
    check_same("out", first.out, second.out, first_rows, second_rows);
    check_same("lse", first.lse, second.lse, first_rows, second_rows);
  } else if (deterministic && !may_shift) {
    check_same("dq", first.dq, second.dq, first_rows, second_rows);
  }
}

/// A document whose keys are more than the producer's lanes know blocks of at a time.
template <class Family>
void run_long_document(distca::HeadShape heads, std::mt19937& random) {
  heads.q_heads = heads.kv_heads = 1;
  Case c;
  do c = problems::random_case(heads, 2300, random);
  while (c.keys < 2100 || c.scores.mask.window != 0);
  std::printf("forward: %lld keys\n", static_cast<long long>(c.keys));
  const Case* alone[] = {&c};
  compute<Family>("forward", alone, 0, false, false, random);
}

template <template <class, int, int> class Family, int kDim, int kValueDim>
void run_rounds(const std::string& pass, distca::HeadShape heads, int rounds, std::mt19937& random) {
  for (int i = 0; i < rounds; ++i) {
    constexpr int kShared[] = {1, 2, 3, 4, 5, 8};
    heads.kv_heads = 1 + static_cast<int64_t>(random() % 2);
    heads.q_heads = heads.kv_heads * kShared[random() % 6];
    if (heads.dtype == distca::DType::kBFloat16)
      run_round<Family<gpu::BFloat16, kDim, kValueDim>>(pass, heads, random);
    else
      run_round<Family<gpu::Float16, kDim, kValueDim>>(pass, heads, random);
  }
}

template <template <class, int, int> class Family>
void run(const std::string& pass, distca::HeadShape heads, int rounds, std::mt19937& random) {
  if (pass == "long")
    run_long_document<Family<gpu::BFloat16, 64, 64>>(heads, random);
  else if (heads.dim <= 64 && heads.v_dim <= 64)
    run_rounds<Family, 64, 64>(pass, heads, rounds, random);
  else if (heads.dim <= 128 && heads.v_dim <= 128)
    run_rounds<Family, 128, 128>(pass, heads, rounds, random);
  else if (heads.dim <= 192 && heads.v_dim <= 128)
    run_rounds<Family, 192, 128>(pass, heads, rounds, random);
  else if (heads.dim <= 256 && heads.v_dim <= 256)
    run_rounds<Family, 256, 256>(pass, heads, rounds, random);
  else
    run_rounds<Family, 512, 512>(pass, heads, rounds, random);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 3;
  const std::string family = argv[1], pass = argv[2];
  const int rounds = std::atoi(argv[6]);
  std::mt19937 random(static_cast<uint32_t>(std::atoi(argv[7])));
  distca::HeadShape heads;
  heads.dim = std::atoi(argv[3]);
  heads.v_dim = std::atoi(argv[4]);
  heads.dtype = std::string(argv[5]) == "bfloat16" ? distca::DType::kBFloat16 : distca::DType::kFloat16;
  if (family == "ampere")
    run<Ampere>(pass, heads, rounds, random);
  else
    run<Hopper>(pass, heads, rounds, random);
  return failures == 0 ? 0 : 1;
}
