// The inner loops (kernels_impl.h), compiled once per instruction set: CMakeLists.txt defines LANEFORMER_ISA and the flags.
#include "kernels_impl.h"

#define NAME(isa) #isa
#define TEXT(isa) NAME(isa)
#define JOINED(isa) isa##_kernels
#define TABLE(isa) JOINED(isa)

namespace laneformer {
static constexpr Kernels table = kernels_named(TEXT(LANEFORMER_ISA));
const Kernels* TABLE(LANEFORMER_ISA)() { return &table; }
}  // namespace laneformer
