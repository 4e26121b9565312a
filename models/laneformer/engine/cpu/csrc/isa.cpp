// One source per table of inner loops: CMakeLists.txt compiles it once per instruction set, with LANEFORMER_ISA and the
// flags, and once without them for the choice between the tables.
#ifdef LANEFORMER_ISA
#include "kernels_impl.h"

#define NAME(isa) #isa
#define TEXT(isa) NAME(isa)
#define JOINED(isa) isa##_kernels
#define TABLE(isa) JOINED(isa)

namespace laneformer {
static constexpr Kernels table = kernels_named(TEXT(LANEFORMER_ISA));
const Kernels* TABLE(LANEFORMER_ISA)() { return &table; }
}  // namespace laneformer

#else
#include <iterator>
#include <stdexcept>
#include <string>

#include "kernels.h"
#if defined(LANEFORMER_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace laneformer {

constexpr int kMatrixUnit = 6;  // the highest level; the others count from portable

#if !defined(LANEFORMER_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx2_vnni_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx512_vnni_kernels() { return nullptr; }
const Kernels* avx512_bf16_kernels() { return nullptr; }
static bool cpu_has(int) { return true; }
#else
static bool cpu_has(int level) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = __builtin_cpu_supports("avx512vnni");
  const bool has[] = {true, avx2, avx2 && __builtin_cpu_supports("avxvnni"), avx512, avx512 && vnni,
                      avx512 && vnni && __builtin_cpu_supports("avx512bf16")};
  return has[level];
}
#endif

#if defined(LANEFORMER_AMX)
// Tiles of bf16, and Linux's permission for this process to use them, as they enlarge what a thread switch saves.
static bool ask_for_matrix_unit() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kTileState = 3u << 17;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, features, saved, high;
  if (!cpu_has(kMatrixUnit - 1) || !__get_cpuid_count(7, 0, &a, &b, &c, &features)) return false;
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (~features & (kAmxBf16 | kAmxTile) || ~saved & kTileState) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
#if !defined(LANEFORMER_EMULATED_TILES)
const Kernels* amx_kernels() { return nullptr; }
#endif
static bool ask_for_matrix_unit() { return true; }
#endif

static bool usable(int level) {
  if (level < kMatrixUnit) return cpu_has(level);
  static const bool permitted = ask_for_matrix_unit();  // once, and not for those who chose another level
  return permitted;
}

const Kernels* choose_kernels(const char* isa) {
  const Kernels* all[] = {portable_kernels(),    avx2_kernels(),        avx2_vnni_kernels(), avx512_kernels(),
                          avx512_vnni_kernels(), avx512_bf16_kernels(), amx_kernels()};
  static_assert(std::size(all) == kMatrixUnit + 1);
  const std::string wanted = isa;
  std::string have;
  for (int level = kMatrixUnit; level >= 0; --level) {
    const bool asked = wanted == "auto" || (all[level] && wanted == all[level]->isa);
    if (asked && all[level] && usable(level)) return all[level];
  }
  for (int level = kMatrixUnit; level >= 0; --level)
    if (all[level] && usable(level)) have += std::string(have.empty() ? "" : ", ") + all[level]->isa;
  throw std::invalid_argument("isa = '" + wanted + "' cannot run here; this CPU and this build have: auto, " + have);
}

}  // namespace laneformer
#endif
