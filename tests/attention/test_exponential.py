"""The kernel's own exp, log and power of two, on each instruction set of this machine, against the C library's."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ISA_FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "avx512_emulated": ["-mavx2", "-mfma", "-mf16c", "-mno-avx512f", "-O1", "-DDISTCA_EMULATED_VECTORS"],
}
HEAD = r"""
#include "attention/micro_simd.h"

#include <bit>
#include <cmath>
#include <cstdio>

using namespace distca::attention;

// Emulated instructions are slow.
#if defined(DISTCA_EMULATED_VECTORS)
constexpr uint32_t kFewer = 16;
#else
constexpr uint32_t kFewer = 1;
#endif

static bool is_supported() {
#if defined(__AVX512F__) && !defined(DISTCA_EMULATED_VECTORS)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}
"""
EXPONENTIAL = r"""
static float at(float x) { return exponential(broadcast(x))[0]; }

int main() {
  if (!is_supported()) return 77;
  // Every 11th float of [-87.3, -2^-26], of which all probabilities come, and every 61st up to 88; fewer if emulated.
  double worst = 0;
  Floats x{};
  int lane = 0;
  const auto check = [&](float value) {
    x[lane++] = value;
    if (lane < kWidth) return;
    lane = 0;
    const Floats y = exponential(x);
    for (int i = 0; i < kWidth; ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      int exponent;
      std::frexp(exact, &exponent);
      worst = std::fmax(worst, std::fabs(y[i] - exact) / std::ldexp(1.0, exponent - 24));
    }
  };
  for (uint32_t b = std::bit_cast<uint32_t>(0x1p-26f); b <= std::bit_cast<uint32_t>(87.3f); b += 11 * kFewer)
    check(-std::bit_cast<float>(b));
  for (uint32_t b = 0; b <= std::bit_cast<uint32_t>(88.f); b += 61 * kFewer) check(std::bit_cast<float>(b));
  const float inf = INFINITY;
  const bool ends = at(0.f) == 1.f && at(-0.f) == 1.f && at(-inf) == 0.f && at(-1e30f) == 0.f && at(-88.f) == 0.f &&
                    at(inf) == inf && at(1e30f) == inf && at(89.f) == inf && std::isnan(at(NAN)) && at(-1e-45f) == 1.f;
  std::printf("%.4f %d\n", worst, ends);
}
"""
LOGARITHM = r"""
static float at(float x) { return logarithm(broadcast(x))[0]; }

int main() {
  if (!is_supported()) return 77;
  // Every 41st normal float, and every float around 1, where results are smallest; fewer if emulated.
  double worst = 0;
  Floats x{};
  int lane = 0;
  const auto check = [&](uint32_t bits) {
    x[lane++] = std::bit_cast<float>(bits);
    if (lane < kWidth) return;
    lane = 0;
    const Floats y = logarithm(x);
    for (int i = 0; i < kWidth; ++i) {
      const double exact = std::log(static_cast<double>(x[i]));
      if (exact == 0) continue;
      int exponent;
      std::frexp(exact, &exponent);
      worst = std::fmax(worst, std::fabs(y[i] - exact) / std::ldexp(1.0, exponent - 24));
    }
  };
  for (uint32_t b = 0x00800000u; b < 0x7f800000u; b += 41 * kFewer) check(b);
  const uint32_t one = std::bit_cast<uint32_t>(1.f);
  for (uint32_t b = one - (1 << 20); b < one + (1 << 20); b += kFewer) check(b);
  const bool ends = at(1.f) == 0.f && at(INFINITY) == INFINITY && std::isnan(at(NAN)) && std::isnan(at(-NAN));
  std::printf("%.4f %d\n", worst, ends);
}
"""
ROUGH_POWER = r"""
static float at(float x) { return rough_power_of_two(broadcast(x))[0]; }

int main() {
  if (!is_supported()) return 77;
  double worst = 0;  // relative
  for (uint32_t b = std::bit_cast<uint32_t>(0x1p-26f); b <= std::bit_cast<uint32_t>(126.f); b += 17 * kFewer) {
    const float x = std::bit_cast<float>(b);
    for (const float value : {x, -x}) {
      const double exact = std::exp2(static_cast<double>(value));
      worst = std::fmax(worst, std::fabs(at(value) - exact) / exact);
    }
  }
  const float inf = INFINITY;
  const bool ends = at(0.f) == 1.f && at(-0.f) == 1.f && at(-inf) == 0.f && at(-1e30f) == 0.f && at(-127.f) == 0.f &&
                    at(129.f) == inf && std::isnan(at(NAN)) && std::fabs(at(-1e-45f) - 1.f) <= 3e-6f;
  std::printf("%.4g %d\n", worst, ends);
}
"""


def run_program(code: str, isa: str, folder: Path) -> list[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or (isa != "plain" and platform.machine() not in ("x86_64", "AMD64")):
        pytest.skip("needs a compiler for this instruction set")
    source, program = folder / "exponential.cpp", folder / "exponential"
    source.write_text(HEAD + code)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-w", f"-I{ROOT / 'cpp'}", *ISA_FLAGS[isa]]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip(f"this CPU has no {isa}")
    return ran.stdout.split()


@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_exp_is_exact_at_its_ends_and_within_an_ulp_or_so_between(isa: str, tmp_path: Path) -> None:
    worst, ends = run_program(EXPONENTIAL, isa, tmp_path)
    print(f"{isa}: largest error {worst} ulp")
    assert float(worst) <= (1.2 if isa == "plain" else 0.9)  # the plain instruction set has no fused multiply-add
    assert ends == "1"


@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_log_is_exact_at_its_ends_and_within_0_9_ulp_between(isa: str, tmp_path: Path) -> None:
    worst, ends = run_program(LOGARITHM, isa, tmp_path)
    print(f"{isa}: largest error {worst} ulp")
    assert float(worst) <= 0.9
    assert ends == "1"


@pytest.mark.parametrize("isa", ["avx512", "avx512_emulated"])
def test_the_power_of_two_of_bf16_weights_is_within_3e_6_and_exact_at_its_ends(isa: str, tmp_path: Path) -> None:
    worst, ends = run_program(ROUGH_POWER, isa, tmp_path)
    print(f"largest relative error {worst}")
    assert float(worst) <= 3e-6  # a bf16 is rounded by up to 2e-3
    assert ends == "1"
