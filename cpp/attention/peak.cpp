#include "attention/peak.h"

#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "attention/micro_kernel.h"
#include "common/error.h"

namespace distca::attention {

double measure_peak_flops(DType dtype, int num_threads, double seconds) {
  require(num_threads >= 1 && num_threads <= 1024 && seconds > 0 && seconds <= 60, "peak: ", num_threads,
          " threads for ", seconds, " s; 1 to 1024 threads and up to 60 s are allowed");
  const MicroKernel& micro = select_instruction_set({}).kernel_for(dtype);
  std::vector<double> rates(static_cast<size_t>(num_threads), 0.0);
  const auto work = [&](size_t thread) {
    constexpr int64_t kRounds = 1 << 16;
    alignas(64) float sink[64] = {};
    const KernelThread kernel_thread(micro);
    const auto begin = std::chrono::steady_clock::now();
    double operations = 0, elapsed = 0;
    while (elapsed < seconds) {
      operations += micro.multiply_registers(kRounds, sink);
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    rates[thread] = operations / elapsed;
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < rates.size(); ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace distca::attention
