// The inner loops, as a table of functions: one table per instruction set, all compiled from kernels_impl.h.
//
// A matrix is packed in tiles of 32 rows (two groups of 16), so that one vector register holds the same
// column of 16 rows: no horizontal sums, one sequential stream of bytes, and every row is added up in the
// same order whatever the number of columns, threads, or vector lanes. Along a tile the inputs come in pairs
// (2k, 2k+1); one group's pair is
//     bf16   16 x (even, odd) interleaved: one 64-byte line, widened by a shift and a mask; what vdpbf16ps reads
//     fp16   16 even, 16 odd
//     fp32   16 even, 16 odd
// int8 has one 64-byte line for both groups: 16 x (even, odd of row i, even, odd of row 16 + i), widened by
// a shift, a mask and a conversion; after its last pair a tile has 32 scales in fp32, and a weight is its
// integer times its row's. int4 takes the inputs in groups of 32: four times a line of each group of rows,
// 16 x (four bytes with inputs 0 to 3 in the low halves and 4 to 7 in the high ones), then 32 scales in
// fp16; a weight is (kLevels[bits] - kZeroLevel) * scale.
//
// The types after int4 hold what GGUF files hold (blocks.h), in groups of 32 inputs too: lines as int4's, or
// for q8 eight times a line of each group of rows with one input in a byte; then for each higher bit of a
// weight a line of both groups of rows, a word a row: q5_min's bit 8 b + w is of input 4 w + b, q6 has two
// bits of it in the first line (w < 4) or the second, at 8 b + 2 (w % 4). Then come 32 scales in fp16, and with
// `_min` 32 minima. A weight is (bits - zero) * scale + minimum; iq4's bits stand for kUnevenLevels. mxfp4's
// stand for kFloatLevels, which are twice the values of its four-bit floats; its scales, half a power of two, are
// in bf16, which holds every exponent of eight bits.
//
// `_k` types have superblocks of eight groups, as the file has: before the first of them 32 scales in fp16, and
// with minima 32 negated scales of minima; a group's own, of q6_k two times 32 for 16 inputs each, are signed
// bytes, and a scale or a minimum is their product, which float32 holds exactly. A lane's inputs may begin within
// a superblock of the file (`groups_before`), whose groups on the tape are then fewer.
#pragma once
#include <cstddef>
#include <cstdint>

namespace laneformer {

enum class DType : int { bf16, fp16, fp32, int8, int4, q4, q4_min, q4_k, q5_min, q5_k, q6_k, q8, iq4, mxfp4 };
enum class Gate : int { silu, gelu, swiglu_oai };  // of an MLP, in the order of variant.py's GATES
enum class Math : int { exact = 0, bf16 = 1, int8 = 2 };  // of the activations: fp32, or rounded to bf16 or int8
constexpr int kDTypeCount = 14, kMaths = 3, kGates = 3;
constexpr const char* kMathNames[kMaths] = {"exact", "bf16", "int8"};
constexpr int kTileRows = 32, kMaxColumns = 128;
constexpr int kGroupInputs = 32;      // that share a scale: of int4 weights, and of activations rounded to int8
constexpr int kSuperGroups = 8;       // of a superblock
constexpr int kChunkPositions = 256;  // of attention
constexpr int kStateExtra = 16;       // floats of a query's state besides its mixed values
constexpr float kLowestScore = -1e29f;

// What the bits of an int4 weight stand for, over its group's scale: closer around zero, where weights are
// (docs/decisions/small-weights.md).
alignas(16) constexpr uint8_t kLevels[16] = {0, 14, 26, 35, 43, 51, 58, 64, 70, 76, 82, 89, 96, 104, 114, 127};
constexpr int kZeroLevel = 69;
// ggml's, of IQ4_NL and IQ4_XS.
alignas(16) constexpr int8_t kUnevenLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                  1,    13,   25,  38,  53,  69,  89,  113};
// Of MXFP4 (OCP Microscaling Formats, E2M1), times two.
alignas(16) constexpr int8_t kFloatLevels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct DTypeTraits {
  const char* name;
  int bytes;  // of one value; 0 where groups of inputs share a scale
  int bits = 0, zero = 0, scales = 0, minima = 0;  // of such a group
  bool super = false;                              // in superblocks
};
constexpr DTypeTraits kDTypes[kDTypeCount] = {  // by DType
    {"bf16", 2}, {"fp16", 2}, {"fp32", 4}, {"int8", 1}, {"int4", 0, 4, kZeroLevel, 1},
    {"q4", 0, 4, 8, 1}, {"q4_min", 0, 4, 0, 1, 1}, {"q4_k", 0, 4, 0, 1, 1, true}, {"q5_min", 0, 5, 0, 1, 1},
    {"q5_k", 0, 5, 0, 1, 1, true}, {"q6_k", 0, 6, 32, 2, 0, true}, {"q8", 0, 8, 0, 1},
    {"iq4", 0, 4, 0, 1}, {"mxfp4", 0, 4, 0, 1}};
static constexpr const DTypeTraits& traits_of(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

static inline int bytes_of(DType dtype) { return traits_of(dtype).bytes; }
static inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static inline size_t groups_of(size_t k_pairs) { return (2 * k_pairs + kGroupInputs - 1) / kGroupInputs; }
static constexpr int scale_bytes(DType dtype) { return traits_of(dtype).super ? 1 : 2; }  // of a group's and a row's
static constexpr int group_bytes(DType dtype) {  // of a tile
  const DTypeTraits& t = traits_of(dtype);
  return kTileRows * (kGroupInputs / 8 * t.bits + scale_bytes(dtype) * (t.scales + t.minima));
}
static constexpr int super_bytes(DType dtype) {  // before a superblock's groups
  const DTypeTraits& t = traits_of(dtype);
  return t.super ? 2 * kTileRows * (1 + t.minima) : 0;
}
static inline size_t group_at(size_t group, DType dtype, int groups_before) {  // in a tile
  const size_t superblocks = (groups_before + group) / kSuperGroups + 1;
  return group * group_bytes(dtype) + superblocks * super_bytes(dtype);
}
static inline size_t tile_bytes(size_t k_pairs, DType dtype, int groups_before = 0) {
  if (traits_of(dtype).bits) return group_at(groups_of(k_pairs) - 1, dtype, groups_before) + group_bytes(dtype);
  return k_pairs * 2 * kTileRows * bytes_of(dtype) + (dtype == DType::int8 ? kTileRows * sizeof(float) : 0);
}

// The inputs of a matrix in the form that a product reads, one row for each column of the pass.
struct Inputs {
  const char* data;
  size_t stride;  // bytes from one column to the next
  size_t ahead;   // bytes of weights to prefetch ahead; changes no result
  int groups_before = 0;  // of the weights' first superblock
};

// One way to multiply by packed tiles: y[c][r] = sum_k W[r][k] x[c][k]. Every column is computed as if it
// were alone, but for AMX: there, few columns and many round differently (kernels/amx.h).
struct Product {
  // Bytes of one prepared column; null where `multiply` reads fp32 inputs as they are.
  size_t (*column_bytes)(int k_pairs);
  // Columns of fp32 inputs, padded with zeros to 2 * k_pairs, into the form that `multiply` reads, one after
  // the other.
  void (*prepare)(const float* x, int x_stride, int k_pairs, int columns, char* out);
  void (*multiply)(const void* tiles, int rows, int k_pairs, Inputs x, float* y, int y_stride, int columns);
  int min_columns = 0;  // that are prepared; fewer are read as they are
};
static inline bool prepares(const Product& how, int columns) { return how.prepare && columns >= how.min_columns; }

// Bytes of a position of a KV head's keys, or values; in int8 each has a scale in fp32.
static inline size_t kv_position_bytes(int dim, DType dtype) {
  return size_t(dim) * bytes_of(dtype) + (dtype == DType::int8 ? sizeof(float) : 0);
}

// Queries of one sequence at consecutive positions, and one KV head's cache in tiles of 16 positions: keys
// [slot / 16][dim][16], values [slot / 16][16][dim], in int8 followed by 16 scales; slot = position % slots.
// Positions are attended to in chunks,
// which are merged in order into each query's state: [dim] mixed values, the highest score, the sum of
// exponentials.
struct AttendArgs {
  const float* query;  // [queries][dim], rotated; dim is padded to 16 with zeros
  const char* keys;
  const char* values;
  DType dtype;  // of keys and values
  int queries, heads, dim, slots;
  int position, window;  // the first query's, and one more after every `heads` queries; window 0: all positions
  int first_chunk, last_chunk;
  float scale;
  float* states;  // [queries][dim + kStateExtra]
  // scratch
  float *scores, *mixed;  // [queries][kChunkPositions], [queries][dim]
  float *tops, *totals;   // [queries]
  float* widened;         // [2][kChunkPositions / 16] tiles in fp32, with room for scales
};

uint16_t float_to_half(float x);  // to the nearest even; too large becomes infinity

struct Kernels {
  const char* isa;
  Product products[kMaths][kDTypeCount];  // `multiply` is null where a math does not take such weights
  // Elementwise loops take n a multiple of 16; buffers are padded with zeros.
  void (*rms_norm)(const float* h, const float* scale, float eps, int size, int n, float* out);
  void (*gates[kGates])(const float* gate_up, int tiles, float* out);  // tiles of 16 gates, 16 ups -> 16 outputs
  void (*attend)(const AttendArgs& args);
  void (*merge_states)(float* state, const float* later, int dim);
  void (*add)(float* h, const float* p, int n);
  void (*add_scaled)(float* h, const float* p, float factor, int n);
  void (*add_past)(float* h, const float* p, const float* total, const float* own, int n);  // h + p + (total - own)
  void (*sum_rows)(const float* rows, size_t stride, int count, float* out, int n);  // in row order
  bool (*to_halves)(const float* x, int n, uint16_t* out);  // to the nearest even; whether fp16 holds all; any n
  double (*log_sum_exp)(const float* x, int n);
  uint64_t (*read)(const void* bytes, size_t size, size_t ahead);  // the bandwidth probe; size a multiple of 1024
};
// Distances to prefetch ahead, in bytes. A core holds a few dozen lines on their way; which distance is best
// differs between CPUs by 10% and more.
constexpr size_t kAhead[] = {0, 1536, 2560, 3072, 4096, 6144, 8192, 12288};

// Instruction sets, each better than those before it; null where not compiled in.
#define EACH_ISA(of) of(portable) of(avx2) of(avx2_vnni) of(avx512) of(avx512_vnni) of(avx512_bf16) of(amx)
#define DECLARE_KERNELS(isa) const Kernels* isa##_kernels();
EACH_ISA(DECLARE_KERNELS)

// "auto" or a name; throws std::invalid_argument for what this binary or this CPU lacks.
const Kernels* choose_kernels(const char* isa);

}  // namespace laneformer
