// The inner loops compiled for portable; see kernels_impl.h, flags in CMakeLists.txt.
#include "kernels_impl.h"

namespace laneformer {
static constexpr Kernels table = kernels_named("portable");
const Kernels* portable_kernels() { return &table; }
}  // namespace laneformer
