// The inner loops, as a table of functions: one table per instruction set, all compiled from kernels_impl.h.
//
// A matrix is packed in tiles of 32 rows (two groups of 16), so that one vector register holds the same column of 16
// rows: no horizontal sums, one sequential stream of bytes, and every row is added up in the same order whatever the
// number of columns, threads, or vector lanes. Along a tile the inputs come in pairs (2k, 2k+1); one group's pair is
//     bf16   16 x (even, odd) interleaved: one 64-byte line, widened by a shift and a mask; what vdpbf16ps reads
//     fp16   16 even, 16 odd
//     fp32   16 even, 16 odd
// int8 has one 64-byte line for both groups: 16 x (even, odd of row i, even, odd of row 16 + i), widened by a shift, a
// mask and a conversion; after its last pair a tile has 32 scales in fp32, and a weight is its integer times its row's.
#pragma once
#include <cstddef>
#include <cstdint>

namespace laneformer {

enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2, int8 = 3 };
constexpr int kTileRows = 32, kMaxColumns = 32;
constexpr int kScoreRows = 2;  // query heads that share one pass over the keys and values

struct DTypeTraits {
  const char* name;
  int bytes;
};
constexpr DTypeTraits kDTypes[] = {{"bf16", 2}, {"fp16", 2}, {"fp32", 4}, {"int8", 1}};  // by DType

static inline int bytes_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].bytes; }
static inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static inline size_t tile_bytes(size_t k_pairs, DType dtype) {
  return k_pairs * 2 * kTileRows * bytes_of(dtype) + (dtype == DType::int8 ? kTileRows * sizeof(float) : 0);
}

// y[c][r] = sum_k W[r][k] x[c][k]; x rows are padded with zeros to 2 * k_pairs, strides are in floats.
using Matmul = void (*)(const void* tiles, int rows, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                        int columns);

// One KV head's cache: keys in tiles of 16 positions [slot / 16][dim][16], values [slot][dim]; slot = position % slots.
struct AttendArgs {
  const float* query;  // [heads][dim], rotated; dim is padded to 16 with zeros
  const float* keys;
  const float* values;
  float* scores;  // scratch, kScoreRows rows of 16 * (tiles between first and last)
  float* out;     // [heads][dim]
  int heads, dim, slots;
  int first, last;  // positions, both included
  float scale;
};

struct Kernels {
  const char* isa;
  Matmul matmul[4];          // by DType: weights widened to fp32, fp32 activations
  Matmul matmul_bf16_pairs;  // vdpbf16ps on activations from `to_bf16_pairs`; null where the CPU has none
  // Elementwise loops take n a multiple of 16; buffers are padded with zeros.
  void (*rms_norm)(const float* h, const float* scale, float eps, int size, int n, float* out);
  void (*silu_gate)(const float* gate_up, int tiles, float* out);  // tiles of 16 gates, 16 ups -> 16 outputs
  void (*attend)(const AttendArgs& args);
  void (*add)(float* h, const float* p, int n);
  void (*add_scaled)(float* h, const float* p, float factor, int n);
  void (*add_past)(float* h, const float* p, const float* total, const float* own, int n);  // h + p + (total - own)
  void (*sum_rows)(const float* rows, size_t stride, int count, float* out, int n);  // in row order
  double (*log_sum_exp)(const float* x, int n);
  void (*round_to_bf16)(const float* x, int n, float* out);  // fp32 values with 8 bits of mantissa
  void (*to_bf16_pairs)(const float* x, int n, float* out);  // n / 2 packed pairs
  uint64_t (*read)(const void* bytes, size_t size, int variant);  // the bandwidth probe; size a multiple of 1024
};
constexpr int kReadVariants = 3;

const Kernels* portable_kernels();
const Kernels* avx2_kernels();  // null where not compiled in
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

// "auto" or a name; throws std::invalid_argument for what this binary or this CPU lacks.
const Kernels* choose_kernels(const char* isa);

}  // namespace laneformer
