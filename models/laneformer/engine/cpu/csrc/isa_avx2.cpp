// The inner loops compiled for avx2; see kernels_impl.h, flags in CMakeLists.txt.
#include "kernels_impl.h"

namespace laneformer {
static constexpr Kernels table = kernels_named("avx2");
const Kernels* avx2_kernels() { return &table; }
}  // namespace laneformer
