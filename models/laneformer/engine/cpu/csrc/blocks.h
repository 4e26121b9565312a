// Weights as GGUF files hold them: blocks of 32 or 256 inputs of a row, and the type of tape that takes their bits as
// they are (kernels.h). Layouts are those of ggml's ggml-common.h.
//
// Nothing is rounded but IQ4_XS's scale of scales times a group's, to fp16: blocks of Q4_K, Q5_K and Q6_K stay
// superblocks. MXFP4's scales are powers of two, many beyond the range of fp16, and are held in bf16.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels.h"

namespace laneformer {

// 32 inputs of a row: a weight is (bits - zero) * scale + minimum, by the traits of the tape's type. Scales and minimum
// are fp16, mxfp4's scales bf16, a superblock's signed bytes times `super` (fp16); scale[0] is for the first 16 inputs.
struct BlockGroup {
  uint8_t bits[kGroupInputs];
  uint16_t scale[2], minimum, super[2];  // super: the factor of the scales, that of the minimum
};

struct BlockFormat {
  const char* name;  // as the file calls it, in lower case
  int inputs, bytes;  // in a block
  DType held;
  void (*read)(const uint8_t* block, int group, BlockGroup& out);
};

std::span<const BlockFormat> block_formats();
const BlockFormat* block_format(const std::string& name);  // null where there is none

void read_group(const BlockFormat& format, const void* row, int group, BlockGroup& out);  // row: whole blocks
bool is_finite(const BlockGroup& group, DType held);
void widen(const BlockGroup& group, DType held, float* out);  // (32,)
// Put a group into a tile, and take it out: its group of inputs `index` is the superblock's `groups_before` + `index`.
void place_group(const BlockGroup& group, DType held, int row, char* tile, int index, int groups_before);
void take_group(const char* tile, DType held, int row, int index, int groups_before, BlockGroup& out);

float half_to_float(uint16_t half);

}  // namespace laneformer
