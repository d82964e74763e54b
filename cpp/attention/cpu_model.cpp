#include "attention/cpu_model.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#endif

namespace distca::attention {

namespace {

struct Model {
  std::string_view vendor;
  unsigned family;
};

/// Models with AVX512_BF16 whose dot instruction makes twice as many multiply-adds a cycle as the one for fp32. Other
/// models, Intel's among them, make as many of both, and pairs are more work to pack.
constexpr Model kFastDot[] = {
    {"AuthenticAMD", 0x19},  // Zen 4
    {"AuthenticAMD", 0x1a},  // Zen 5
};

}  // namespace

bool dot_is_faster(std::string_view vendor, unsigned family) {
  for (const Model& model : kFastDot) {
    if (model.vendor == vendor && model.family == family) return true;
  }
  return false;
}

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf) {
  Registers r;
  __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
  return r;
}

/// Asks the operating system to let this process use the registers of tiles.
bool ask_for_tiles() {
  constexpr unsigned kSystemSaves = 1u << 27, kTilesOfBf16 = 1u << 22,
                     kTiles = 1u << 24;                        // osxsave, amx_bf16, amx_tile
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  const unsigned features = cpuid(7).d;
  if ((cpuid(1).c & kSystemSaves) == 0 || (features & kTilesOfBf16) == 0 || (features & kTiles) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool may_use_tiles() {
  static const bool may = ask_for_tiles();
  return may;
}

bool dot_is_faster() {
  const Registers names = cpuid(0);
  std::array<char, 12> vendor;
  std::memcpy(vendor.data(), &names.b, 4);
  std::memcpy(vendor.data() + 4, &names.d, 4);
  std::memcpy(vendor.data() + 8, &names.c, 4);
  const unsigned version = cpuid(1).a, base = version >> 8 & 0xf;
  return dot_is_faster({vendor.data(), vendor.size()}, base == 0xf ? base + (version >> 20 & 0xff) : base);
}
#else
bool may_use_tiles() { return false; }
bool dot_is_faster() { return false; }
#endif

}  // namespace distca::attention
