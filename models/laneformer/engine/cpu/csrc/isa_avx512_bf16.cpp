// The inner loops compiled for avx512_bf16; see kernels_impl.h, flags in CMakeLists.txt.
#include "kernels_impl.h"

namespace laneformer {
static constexpr Kernels table = kernels_named("avx512_bf16");
const Kernels* avx512_bf16_kernels() { return &table; }
}  // namespace laneformer
