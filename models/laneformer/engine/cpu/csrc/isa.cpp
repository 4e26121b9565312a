// One source per table of inner loops: CMakeLists.txt compiles it once per instruction set, with LANEFORMER_ISA, the flags
// and LANEFORMER_BASE where most of the table is another's, and once without them for the choice between the tables.
#ifdef LANEFORMER_ISA
#include "kernels_impl.h"

#define NAME(isa) #isa
#define TEXT(isa) NAME(isa)
#define JOINED(isa) isa##_kernels
#define TABLE(isa) JOINED(isa)

namespace laneformer {
const Kernels* TABLE(LANEFORMER_ISA)() {  // for CPUs that have it: this is compiled with its flags, too
  static const Kernels table = [] {
#if defined(LANEFORMER_BASE)
    Kernels k = *TABLE(LANEFORMER_BASE)();
#else
    Kernels k{};
    set_common(k);
#endif
    set_own(k);
    k.isa = TEXT(LANEFORMER_ISA);
    return k;
  }();
  return &table;
}
}  // namespace laneformer

#else
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace laneformer {

#define LEFT_OUT(isa) __attribute__((weak)) const Kernels* isa##_kernels() { return nullptr; }
EACH_ISA(LEFT_OUT)

// Tables may be asked for only where the CPU has the instructions.
#define LEVEL(isa) {#isa, isa##_kernels},
constexpr std::pair<const char*, const Kernels* (*)()> kLevelsUp[] = {EACH_ISA(LEVEL)};
constexpr int kMatrixUnit = std::size(kLevelsUp) - 1;

#if defined(__x86_64__) && !defined(LANEFORMER_EMULATED_TILES)
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

#if defined(__linux__)
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
static bool ask_for_matrix_unit() { return false; }
#endif
#else  // what was compiled runs
static bool cpu_has(int) { return true; }
static bool ask_for_matrix_unit() { return true; }
#endif

static bool usable(int level) {
  if (level < kMatrixUnit) return cpu_has(level);
  static const bool permitted = ask_for_matrix_unit();  // once, and not for those who chose another level
  return permitted;
}

const Kernels* choose_kernels(const char* isa) {
  const std::string wanted = isa;
  std::string have;
  for (int level = kMatrixUnit; level >= 0; --level) {
    if (wanted != "auto" && wanted != kLevelsUp[level].first) continue;
    if (const Kernels* kernels = usable(level) ? kLevelsUp[level].second() : nullptr) return kernels;
  }
  for (int level = kMatrixUnit; level >= 0; --level)
    if (usable(level) && kLevelsUp[level].second())
      have += std::string(have.empty() ? "" : ", ") + kLevelsUp[level].first;
  if (have.empty())  // compiled with LANEFORMER_NATIVE on another machine
    throw std::invalid_argument("this build of the engine has no instruction set of this CPU; build it on this machine");
  throw std::invalid_argument("isa = '" + wanted + "' cannot run here; this CPU and this build have: auto, " + have);
}

}  // namespace laneformer
#endif
