// The inner loops, written once over a vector of 16 floats and compiled once per instruction set (isa.cpp).
//
// Nothing in these files may use inline functions of other headers: the linker could pick the copy that was
// compiled for the newest CPU.
#pragma once
#if defined(__AMX_BF16__) || defined(LANEFORMER_EMULATED_TILES)
#define LANEFORMER_MATRIX_UNIT
#include "kernels/amx.h"
#endif
#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/elementwise.h"
#include "kernels/integer.h"
#include "kernels/matmul.h"
#include "kernels/panels.h"
#include "kernels/probe.h"

namespace laneformer {
namespace {

template <DType T>
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr Product kExactProduct = kPanelProduct<T>;
#else
constexpr Product kExactProduct{nullptr, nullptr, matmul<T>, 0};
#endif

constexpr Kernels kernels_named(const char* isa) {
  Kernels k{};
  k.isa = isa;
  Product* exact = k.products[(int)Math::exact];
  exact[(int)DType::bf16] = kExactProduct<DType::bf16>;
  exact[(int)DType::fp16] = kExactProduct<DType::fp16>;
  exact[(int)DType::fp32] = kExactProduct<DType::fp32>;
  exact[(int)DType::int8] = kExactProduct<DType::int8>;
  k.products[(int)Math::bf16][(int)DType::bf16] = kBf16Product;
  Product* rounded = k.products[(int)Math::int8];
  rounded[(int)DType::bf16] = exact[(int)DType::bf16];  // beside integers, as a GGUF file may have them
  rounded[(int)DType::fp16] = exact[(int)DType::fp16];
  rounded[(int)DType::fp32] = exact[(int)DType::fp32];
  rounded[(int)DType::int8] = kIntegerProduct<DType::int8>;
  rounded[(int)DType::int4] = kIntegerProduct<DType::int4>;
  rounded[(int)DType::q4] = kIntegerProduct<DType::q4>;
  rounded[(int)DType::q4_min] = kIntegerProduct<DType::q4_min>;
  rounded[(int)DType::q4_k] = kIntegerProduct<DType::q4_k>;
  rounded[(int)DType::q5_min] = kIntegerProduct<DType::q5_min>;
  rounded[(int)DType::q5_k] = kIntegerProduct<DType::q5_k>;
  rounded[(int)DType::q6_k] = kIntegerProduct<DType::q6_k>;
  rounded[(int)DType::q8] = kIntegerProduct<DType::q8>;
  rounded[(int)DType::iq4] = kIntegerProduct<DType::iq4>;
  rounded[(int)DType::mxfp4] = kIntegerProduct<DType::mxfp4>;
#if defined(LANEFORMER_MATRIX_UNIT)
  exact[(int)DType::bf16] = kUnitProduct<3>;
  k.products[(int)Math::bf16][(int)DType::bf16] = kUnitProduct<1>;
#endif
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
  k.log_sum_exp = log_sum_exp;
  k.read = read;
  return k;
}

}  // namespace
}  // namespace laneformer
