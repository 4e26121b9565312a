// Packing: rows to tiles, conversions between weight types, quantisation, random weights for benchmarks.
#include "model.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

namespace laneformer {

namespace {

uint16_t float_to_bf16(float x) {  // round to nearest even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7f800000) == 0x7f800000) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float widened(const void* source, DType from, size_t i) {
  if (from == DType::fp32) return static_cast<const float*>(source)[i];
  const uint16_t bits = static_cast<const uint16_t*>(source)[i];
  return from == DType::bf16 ? std::bit_cast<float>(uint32_t(bits) << 16) : half_to_float(bits);
}
uint16_t narrowed(float x, DType to) { return to == DType::bf16 ? float_to_bf16(x) : float_to_half(x); }

bool is_finite(uint16_t v, DType dtype) {
  const uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
  return (v & exponent) != exponent;
}

// Returns a row's scale: its largest magnitude becomes 127. As integers, magnitudes are ordered like the numbers and NaN
// comes last, so the scale is not finite where a value is not. Rows too small for a scale are zeros, whose scale is zero.
float row_scale(const std::vector<float>& row) {
  uint32_t largest = 0;
  for (const float value : row) largest = std::max(largest, std::bit_cast<uint32_t>(std::fabs(value)));
  const float scale = std::bit_cast<float>(largest) / 127.0f;
  return scale < FLT_MIN ? 0.0f : scale;
}

int8_t quantised(float x, float scale) {  // to the nearest even integer: adding 1.5 * 2^23 rounds
  constexpr float kRounds = 12582912.0f;
  return scale > 0.0f ? static_cast<int8_t>(x / scale + kRounds - kRounds) : 0;
}

constexpr float kLargestInt4 = 0x1p21f;  // over 51, the smallest candidate's edge, it is still a scale in fp16

// Returns the level nearest to x, ties to the higher one.
int nearest_level(float x) {
  static const auto kNearest = [] {
    std::array<uint8_t, 2 * 127 + 1> nearest{};  // indexed by twice the distance from the lowest level
    for (size_t i = 0, level = 0; i < nearest.size(); nearest[i++] = static_cast<uint8_t>(level))
      while (level < 15 && static_cast<int>(i) >= kLevels[level] + kLevels[level + 1]) ++level;
    return nearest;
  }();
  return kNearest[static_cast<int>(std::clamp(2.0f * (x + kZeroLevel), 0.0f, 254.0f))];
}

// Rounds a group of inputs to levels and a scale in fp16, which it returns. Candidates map the value of largest magnitude near
// the lowest or the highest level; each is refined to the scale of least squares for its levels, and the least error wins.
uint16_t quantise_group(const float* in, uint8_t* levels) {
  float peak = 0.0f;
  for (int k = 0; k < kGroupInputs; ++k) peak = std::fabs(in[k]) > std::fabs(peak) ? in[k] : peak;
  uint16_t best = 0;
  float least = 0.0f;  // the least error so far, minus that of zeros
  std::fill_n(levels, kGroupInputs, uint8_t{8});
  for (const float target : {-0.88f, -1.0f, -1.12f, 0.88f, 1.0f, 1.12f}) {
    const float edge = static_cast<float>(target < 0 ? kZeroLevel : 127 - kZeroLevel) * target;
    float scale = peak / edge, error = 0.0f;
    uint8_t found[kGroupInputs];
    uint16_t half = 0;
    for (int round = 0; round < 2 && std::fabs(scale) >= FLT_MIN; ++round) {
      float along = 0.0f, square = 0.0f;
      for (int k = 0; k < kGroupInputs; ++k) {
        found[k] = static_cast<uint8_t>(nearest_level(in[k] / scale));
        const auto level = static_cast<float>(kLevels[found[k]] - kZeroLevel);
        along += level * in[k];
        square += level * level;
      }
      half = float_to_half(along / square);
      scale = half_to_float(half);
      error = scale * (scale * square - 2.0f * along);
    }
    if (!(error < least)) continue;
    least = error, best = half;
    std::copy_n(found, kGroupInputs, levels);
  }
  return best;
}

// Packs one row of int4 groups into its tile (kernels.h).
bool pack_groups(const std::vector<float>& in, int row, char* tile) {
  bool finite = true;
  for (size_t first = 0; first < in.size(); first += kGroupInputs) {
    float values[kGroupInputs] = {};
    uint8_t levels[kGroupInputs] = {};
    std::copy_n(in.begin() + first, std::min(in.size() - first, size_t{kGroupInputs}), values);
    for (const float value : values) finite &= std::fabs(value) < kLargestInt4;
    const uint16_t scale = finite ? quantise_group(values, levels) : 0;
    for (int k = 0; k < kGroupInputs; k += k % 4 == 3 ? 5 : 1)
      tile[k / 8 * 128 + row / 16 * 64 + row % 16 * 4 + k % 4] = static_cast<char>(levels[k] | levels[k + 4] << 4);
    reinterpret_cast<uint16_t*>(tile + kTileRows * kGroupInputs / 2)[row] = scale;
    tile += kTileRows * (kGroupInputs / 2 + sizeof(uint16_t));
  }
  return finite;
}

// Returns where a row's first input lies among the 64 values of a tile's first pair (kernels.h).
int first_in_tile(int row, DType dtype) {
  const int group = row / 16, in_group = row % 16;
  if (dtype == DType::int8) return 4 * in_group + 2 * group;
  return 32 * group + (dtype == DType::bf16 ? 2 * in_group : in_group);
}

int odd_after_even(DType dtype) { return dtype == DType::bf16 || dtype == DType::int8 ? 1 : 16; }

// Packs one row of blocks into its tile, group by group.
bool pack_blocks(const PackJob& job, const char* in, int row, DType to, char* tile) {
  bool finite = true;
  for (int k = 0, index = 0; k < job.inputs; k += kGroupInputs, ++index) {
    BlockGroup group;
    read_group(*job.blocks, in, (job.first_input + k) / kGroupInputs, group);
    finite &= is_finite(group, to);
    place_group(group, to, row, tile, index, groups_before(job.first_input));
  }
  return finite;
}

// Copies some inputs of a row to their places, an even and an odd one at a time. Returns false where one is not finite.
template <int kCount, int kOdd, class Value>
bool copy_inputs(const char* from, Value exponent, Value* even) {
  Value in[kCount], unusual = 0;
  std::memcpy(in, from, sizeof in);
  for (int i = 0; i < kCount; ++i) unusual |= (in[i] & exponent) == exponent;
  for (int i = 0; i < kCount; i += 2) {
    even[i / 2 * 64] = in[i];
    if (i + 1 < kCount) even[i / 2 * 64 + kOdd] = in[i + 1];
  }
  return !unusual;
}

// Copies rows of the tile's own type, a few inputs of all of them at a time: lines of the tile stay in the first cache.
template <class Value, int kOdd>
bool copy_rows(const PackJob& job, int first, int count, int row, DType to, Value exponent, char* tile) {
  constexpr int kInputs = 32;
  bool finite = true;
  for (int k = 0; k < job.inputs; k += kInputs)
    for (int r = 0; r < count; ++r) {
      const char* in = static_cast<const char*>(job.source) + (size_t(first + r) * job.inputs + k) * sizeof(Value);
      Value* even = reinterpret_cast<Value*>(tile) + k / 2 * 64 + first_in_tile(row + r, to);
      if (k + kInputs <= job.inputs) {
        finite &= copy_inputs<kInputs, kOdd>(in, exponent, even);
        continue;
      }
      for (int i = k; i < job.inputs; i += 2, in += 2 * sizeof(Value), even += 64)
        finite &= i + 1 < job.inputs ? copy_inputs<2, kOdd>(in, exponent, even) : copy_inputs<1, kOdd>(in, exponent, even);
    }
  return finite;
}

// Reads the job's inputs of one row, widened.
void read_row(const PackJob& job, int r, std::vector<float>& out) {
  if (!job.blocks) {
    for (int k = 0; k < job.inputs; ++k) out[k] = widened(job.source, job.from, size_t(r) * job.inputs + k);
    return;
  }
  float values[kGroupInputs];
  for (int k = 0, at = job.first_input; k < job.inputs; ++k, ++at) {
    if (k == 0 || at % kGroupInputs == 0) {
      BlockGroup group;
      read_group(*job.blocks, job.row(r), at / kGroupInputs, group);
      widen(group, job.blocks->held, values);
    }
    out[k] = values[at % kGroupInputs];
  }
}

// Packs one row into its tile; returns false when a value is not finite there.
bool pack_row(const std::vector<float>& in, int row, int pairs, DType to, char* tile) {
  if (to == DType::int4) return pack_groups(in, row, tile);
  const int even = first_in_tile(row, to), odd = even + odd_after_even(to);
  const int inputs = static_cast<int>(in.size());
  const auto place = [&](int k) { return k / 2 * 64 + (k & 1 ? odd : even); };
  bool finite = true;
  if (to == DType::int8) {
    const float scale = row_scale(in);
    reinterpret_cast<float*>(tile + pairs * 2 * kTileRows)[row] = scale;
    if (!std::isfinite(scale)) return false;
    for (int k = 0; k < inputs; ++k) tile[place(k)] = static_cast<char>(quantised(in[k], scale));
  } else if (to == DType::fp32) {
    auto* values = reinterpret_cast<float*>(tile);
    for (int k = 0; k < inputs; ++k) finite &= std::isfinite(values[place(k)] = in[k]);
  } else {
    auto* values = reinterpret_cast<uint16_t*>(tile);
    for (int k = 0; k < inputs; ++k) finite &= is_finite(values[place(k)] = narrowed(in[k], to), to);
  }
  return finite;
}

// Packs rows of the job from `first` on to those from `row` on of a tile.
bool pack_run(const PackJob& job, int first, int count, int row, const Matrix& matrix, char* tile) {
  const DType to = matrix.dtype;
  if (job.blocks && job.blocks->held == to) {
    bool finite = true;
    for (int r = 0; r < count; ++r) finite &= pack_blocks(job, job.row(first + r), row + r, to, tile);
    return finite;
  }
  if (!job.blocks && job.from == to) {
    if (to == DType::fp32) return copy_rows<uint32_t, 16>(job, first, count, row, to, 0x7f800000, tile);
    if (to == DType::fp16) return copy_rows<uint16_t, 16>(job, first, count, row, to, 0x7c00, tile);
    return copy_rows<uint16_t, 1>(job, first, count, row, to, 0x7f80, tile);
  }
  std::vector<float> in(job.inputs);
  bool finite = true;
  for (int r = 0; r < count; ++r) {
    read_row(job, first + r, in);
    finite &= pack_row(in, row + r, matrix.k_pairs(), to, tile);
  }
  return finite;
}

}  // namespace

float ModelSpec::score_scale() const {
  return attention_scale > 0.0f ? attention_scale : 1.0f / std::sqrt(static_cast<float>(head_dim()));
}

float quantise_row(const std::vector<float>& row, int8_t* out) {
  const float scale = row_scale(row);
  if (std::isfinite(scale)) std::transform(row.begin(), row.end(), out, [=](float x) { return quantised(x, scale); });
  return scale;
}

bool pack_rows(const PackJob& job, const Matrix& matrix, char* tape) {
  const int half = job.interleave_half, together = half < 0 ? kTileRows : 16;
  bool finite = true;
  for (int r = 0, count; r < job.rows; r += count) {  // rows that follow each other in a tile
    const int whole = half < 0 ? job.first_row + r : r / 16 * kTileRows + 16 * half + r % 16;
    const int row = whole - matrix.first_row;
    count = std::min(together - (row % together + together) % together, job.rows - r);
    if (row < 0 || row >= matrix.rows) continue;
    char* tile = tape + matrix.offset + row / kTileRows * matrix.tile_bytes();
    finite &= pack_run(job, r, std::min(count, matrix.rows - row), row % kTileRows, matrix, tile);
  }
  return finite;
}

static void unpack_groups(const Matrix& matrix, int row, const char* tile, float* out) {
  for (int k = 0, index = 0; k < matrix.inputs; k += kGroupInputs, ++index) {
    BlockGroup group{};
    take_group(tile, matrix.dtype, row, index, matrix.groups_before, group);
    widen(group, matrix.dtype, out + k);
  }
}

void unpack_row(const Matrix& matrix, int row, const char* tape, float* out) {
  const int pairs = matrix.k_pairs(), in_tile = row % kTileRows;
  const char* tile = tape + matrix.offset + row / kTileRows * matrix.tile_bytes();
  if (traits_of(matrix.dtype).bits) return unpack_groups(matrix, in_tile, tile, out);
  const int even = first_in_tile(in_tile, matrix.dtype), odd = even + odd_after_even(matrix.dtype);
  for (int k = 0; k < matrix.inputs; ++k) {
    const int at = k / 2 * 64 + (k & 1 ? odd : even);
    out[k] = matrix.dtype == DType::int8 ? static_cast<float>(static_cast<int8_t>(tile[at]))
                                         : widened(tile, matrix.dtype, at);
  }
  if (matrix.dtype != DType::int8) return;
  const float scale = reinterpret_cast<const float*>(tile + pairs * 2 * kTileRows)[in_tile];
  for (int k = 0; k < matrix.inputs; ++k) out[k] *= scale;
}

bool convert(const void* source, DType from, size_t count, void* out, DType to) {
  bool finite = true;
  if (from == to && to != DType::fp32) {
    std::memcpy(out, source, count * sizeof(uint16_t));
    for (size_t i = 0; i < count; ++i) finite &= is_finite(static_cast<const uint16_t*>(out)[i], to);
    return finite;
  }
  for (size_t i = 0; i < count; ++i) {
    const float value = widened(source, from, i);
    if (to == DType::fp32)
      static_cast<float*>(out)[i] = value, finite &= std::isfinite(value);
    else
      finite &= is_finite(static_cast<uint16_t*>(out)[i] = narrowed(value, to), to);
  }
  return finite;
}

bool convert_blocks(const void* source, const BlockFormat& blocks, size_t count, void* out, DType to) {
  bool finite = true;
  float values[kGroupInputs];
  for (size_t i = 0; i < count; i += kGroupInputs) {
    BlockGroup group;
    const char* block = static_cast<const char*>(source) + i / blocks.inputs * blocks.bytes;
    read_group(blocks, block, static_cast<int>(i % blocks.inputs / kGroupInputs), group);
    finite &= is_finite(group, blocks.held);
    widen(group, blocks.held, values);
    finite &= convert(values, DType::fp32, kGroupInputs, static_cast<char*>(out) + i * bytes_of(to), to);
  }
  return finite;
}

// The values are uniform, not normal: a benchmark needs plausible magnitudes, and four come out of one multiplication chain.
void fill_random(void* out, DType dtype, size_t count, uint64_t key, float deviation) {
  const float scale = deviation * std::sqrt(3.0f) / 32768.0f;
  for (size_t i = 0; i < count; i += 4) {
    const uint64_t bits = mix_bits(mix_bits(key) + (i / 4) * 0x9e3779b97f4a7c15ull);
    for (size_t j = 0; j < 4 && i + j < count; ++j) {
      const float value = static_cast<float>(static_cast<int16_t>(bits >> (16 * j))) * scale;
      if (dtype == DType::fp32)
        static_cast<float*>(out)[i + j] = value;
      else
        static_cast<uint16_t*>(out)[i + j] = narrowed(value, dtype);
    }
  }
}

}  // namespace laneformer
