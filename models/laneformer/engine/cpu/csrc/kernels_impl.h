// The inner loops, written once over a vector of 16 floats and compiled once per instruction set (isa.cpp); with
// LANEFORMER_BASE only those for which a set has an instruction that its base has not.
//
// Nothing in these files may use inline functions of other headers: the linker could pick the copy that was
// compiled for the newest CPU.
#pragma once
#if defined(__AMX_BF16__) || defined(LANEFORMER_EMULATED_TILES)
#define LANEFORMER_MATRIX_UNIT
#include "kernels/amx.h"
#elif defined(__AVX512BF16__)
#include "kernels/bf16.h"
#else
#include "kernels/integer_panels.h"
#endif
#if !defined(LANEFORMER_BASE)
#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/elementwise.h"
#include "kernels/panels.h"
#endif

namespace laneformer {
namespace {

// What an instruction set multiplies in a way of its own.
#if defined(LANEFORMER_MATRIX_UNIT)
void set_own(Kernels& k) {
  k.products[(int)Math::exact][(int)DType::bf16] = kUnitProduct<3>;
  k.products[(int)Math::bf16][(int)DType::bf16] = kUnitProduct<1>;
}
#elif defined(__AVX512BF16__)
void set_own(Kernels& k) { k.products[(int)Math::bf16][(int)DType::bf16] = kBf16Product; }
#else
template <int T = (int)DType::int8>  // and the types after it
void set_own(Kernels& k) {
  k.products[(int)Math::int8][T] = kIntegerProduct<(DType)T>;
  if constexpr (T + 1 < kDTypeCount) set_own<T + 1>(k);
}
#endif

#if !defined(LANEFORMER_BASE)
#if defined(__AVX2__) && !defined(__AVX512F__)
template <DType T>
constexpr Product kExactProduct = kPanelProduct<T>;
#else
template <DType T>
constexpr Product kExactProduct{nullptr, nullptr, matmul<T>, 0};
#endif

void set_common(Kernels& k) {
  Product *exact = k.products[(int)Math::exact], *rounded = k.products[(int)Math::int8];
  exact[(int)DType::int8] = kExactProduct<DType::int8>;
  // the others also stand beside integers, as a GGUF file may have them
  exact[(int)DType::bf16] = rounded[(int)DType::bf16] = kExactProduct<DType::bf16>;
  exact[(int)DType::fp16] = rounded[(int)DType::fp16] = kExactProduct<DType::fp16>;
  exact[(int)DType::fp32] = rounded[(int)DType::fp32] = kExactProduct<DType::fp32>;
  k.products[(int)Math::bf16][(int)DType::bf16] = kBf16Product;
  k.rms_norm = rms_norm;
  k.gates[(int)Gate::silu] = silu_gate;
  k.gates[(int)Gate::gelu] = gelu_gate;
  k.gates[(int)Gate::swiglu_oai] = swiglu_oai_gate;
  k.attend = attend;
  k.merge_states = merge_states;
  k.add = add;
  k.add_scaled = add_scaled;
  k.add_past = add_past;
  k.sum_rows = sum_rows;
  k.to_halves = to_halves;
  k.log_sum_exp = log_sum_exp;
  k.read = read;
}
#endif

}  // namespace
}  // namespace laneformer
