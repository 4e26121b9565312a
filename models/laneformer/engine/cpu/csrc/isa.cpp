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

namespace laneformer {

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

const Kernels* choose_kernels(const char* isa) {
  const Kernels* all[] = {portable_kernels(), avx2_kernels(),        avx2_vnni_kernels(),
                          avx512_kernels(),   avx512_vnni_kernels(), avx512_bf16_kernels()};
  const std::string wanted = isa;
  std::string usable;
  for (int level = static_cast<int>(std::size(all)) - 1; level >= 0; --level) {
    if (!all[level] || !cpu_has(level)) continue;
    if (wanted == "auto" || wanted == all[level]->isa) return all[level];
    usable += std::string(usable.empty() ? "" : ", ") + all[level]->isa;
  }
  throw std::invalid_argument("isa = '" + wanted + "' cannot run here; this CPU and this build have: auto, " + usable);
}

}  // namespace laneformer
#endif
