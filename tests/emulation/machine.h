// A machine that runs the CUDA kernels' code on a host, for tests: every thread of a CTA is a fiber, and what a GPU
// does on its own time, copies into shared memory and matrix products of warpgroups, is done at a random later moment.
// Written from the definitions of the PTX instructions, not from the kernels.
//
// It stops the program with a message where a kernel hangs, leaves a barrier half used, reads with the asynchronous
// proxy what was written past it without a fence, goes beyond shared memory, gives the threads of a warpgroup different
// arguments, or breaks a rule of an instruction. misuse.cpp has an example of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "stack.h"

namespace emulation {

inline constexpr int kWarpThreads = 32;
inline constexpr int kGroupThreads = 128;

[[noreturn]] void fail(const std::string& what);

/// A product of a warpgroup: what each of its threads gave.
struct Product {
  int columns = 0;
  int group = 0;  // which group of the warpgroup's threads it belongs to
  bool add = false;
  bool bfloat16 = false;
  bool a_outer = false, b_outer = false;
  uint64_t a = 0, b = 0;         // addresses; a is 0 where it comes from registers
  int a_chunk = 0, b_chunk = 0;  // bytes from one chunk of columns to the next
  int threads = 0;               // that have started it
  float* sums[kGroupThreads] = {};
  const uint32_t* registers[kGroupThreads] = {};
};

/// The products of a warpgroup, in the order in which they were started.
struct ProductQueue {
  std::vector<std::unique_ptr<Product>> products;
  size_t done = 0;
};

struct NamedBarrier {
  int threads = 0;
  int arrived = 0;
  uint64_t generation = 0;
  std::map<int, int> lanes;  // of each warp: how many have arrived
};

/// The registers of each thread of a warpgroup. A change takes place once all its threads have asked for it.
struct Registers {
  int now = 0;
  int wanted = 0;
  int asked = 0;  // threads that have asked
  uint64_t generation = 0;
};

/// What the lanes of a warp exchange.
struct Exchange {
  uint64_t values[kWarpThreads] = {};
  int arrived = 0;
  uint64_t generation = 0;
};

/// What a lane gives an instruction that its warp executes together. Registers are read and written when it is
/// executed.
struct LaneInstruction {
  enum Kind : int { kLoad, kLoadTransposed, kMultiply } kind = kLoad;
  bool bfloat16 = false;
  const std::byte* row = nullptr;  // a load of matrices: the row that the lane names
  uint32_t* words = nullptr;       // and where it gets the words
  float* sums = nullptr;           // a product
  const uint32_t* a = nullptr;
  const uint32_t* b = nullptr;
};

/// The lanes of a warp that have come to the end of a sequence of such instructions.
struct WarpInstructions {
  const std::vector<LaneInstruction>* lanes[kWarpThreads] = {};
  int arrived = 0;
  uint64_t generation = 0;
};

/// A thread's copy into shared memory; of zeros where `from` is null.
struct Copy {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

struct Cta {
  int index = 0;
  int alive = 0;
  std::byte* shared = nullptr;
  size_t shared_bytes = 0;
  std::vector<int> unfenced;  // of each 16 bytes: 1 + the thread whose store no fence has followed, or 0
  std::set<const void*> acquired_maps;
  std::map<const void*, int> new_barriers;  // unknown to the copy engine, and the threads that initialised them
  std::vector<uint32_t> news;  // of each warp: lanes that have looked at a signal, and have not fenced all memory since
  int copies = 0;              // under way
  std::vector<Registers> registers;  // of each warpgroup
  int free_registers = 0;            // in units of one for each thread of a warpgroup
  std::vector<ProductQueue> queues;
  NamedBarrier named[9];  // the last is that of the whole CTA
  std::vector<Exchange> exchanges;
  std::vector<WarpInstructions> instructions;  // of each warp
};

struct Fiber {
  std::unique_ptr<Stack> stack;
  Cta* cta = nullptr;
  int thread = 0;
  bool finished = false;
  std::function<bool()> ready;  // empty: can go on
  const char* awaited = "";
  int nap = 0;                // rounds of the scheduler that it misses next, as a thread that is late
  std::vector<size_t> marks;  // the places of Cta::unfenced where it has stored since its last fence
  bool may_multiply = false;  // products have been begun, and their group has not ended
  // Products this thread has started, groups it has ended.
  size_t started = 0;
  int ended_groups = 0;
  // Adds from shared memory that this thread has started and that have not read it, or are not done.
  int adds_to_read = 0;
  int adds_to_do = 0;
  size_t exchanges = 0;
  std::vector<LaneInstruction> instructions;  // of a sequence that has not ended
  std::vector<Copy> copies;                   // into shared memory, of a group that has not ended
  std::vector<bool> groups_of_copies;         // whether each is under way
};

class Machine {
 public:
  explicit Machine(uint32_t seed) : random(seed) {}

  /// Runs `body` in every thread of `num_ctas` CTAs at once, each with `shared_bytes` of memory full of ones.
  void run(int num_ctas, int num_threads, size_t shared_bytes, const std::function<void(std::byte* shared)>& body);

  Fiber& fiber() { return *current_; }
  Cta& cta() { return *current_->cta; }
  /// Lets others run until `ready` holds.
  void await(const char* what, std::function<bool()> ready);
  /// Does something at a later moment.
  void later(std::function<void()> action) { pending_.push_back(std::move(action)); }
  /// Sets the registers of each thread of the warpgroup, to more (`is_raise`) or fewer.
  void set_registers(int registers, bool is_raise);

  /// Stores by a thread itself, and by or for the asynchronous proxy.
  void check_shared(const Cta& cta, const void* p, size_t bytes) const;
  void mark_unfenced(const void* p, size_t bytes);
  void fence();
  void check_fenced(const Cta& cta, const void* p, size_t bytes) const;

  std::mt19937 random;

 private:
  bool run_pending(bool all);
  bool run_products(Cta& cta, bool all);
  void run_thread();

  Fiber* current_ = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::function<void()>> pending_;
  const std::function<void(std::byte*)>* body_ = nullptr;
};

/// The one that runs.
extern thread_local Machine* machine;

/// Computes a product and gives it to its threads.
void execute(const Machine& machine, const Cta& cta, const Product& product);
/// Does what the lanes of a warp have asked for, one instruction after another.
void execute(const WarpInstructions& warp);

}  // namespace emulation
