#include "blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace laneformer {

// --- fp16 ---------------------------------------------------------------------------------------------------------

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f);
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  return std::bit_cast<float>(bits | sign);
}

uint16_t float_to_half(float x) {
  const uint16_t sign = static_cast<uint16_t>((std::bit_cast<uint32_t>(x) >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

namespace {

// --- formats ------------------------------------------------------------------------------------------------------

uint16_t half_at(const uint8_t* block, int at) {
  uint16_t half;
  std::memcpy(&half, block + at, sizeof half);
  return half;
}
float float_at(const uint8_t* block, int at) { return half_to_float(half_at(block, at)); }

// Reads 16 bytes: inputs 0 to 15 in their low halves, 16 to 31 in the high ones.
void split_nibbles(const uint8_t* bytes, uint8_t* bits) {
  for (int i = 0; i < 16; ++i) bits[i] = bytes[i] & 15, bits[16 + i] = bytes[i] >> 4;
}

void read_q4_0(const uint8_t* block, int, BlockGroup& out) {  // d, nibbles
  out.scale[0] = half_at(block, 0);
  split_nibbles(block + 2, out.bits);
}

void read_q4_1(const uint8_t* block, int, BlockGroup& out) {  // d, m, nibbles
  out.scale[0] = half_at(block, 0), out.minimum = half_at(block, 2);
  split_nibbles(block + 4, out.bits);
}

void add_fifth_bits(const uint8_t* bytes, uint8_t* bits) {  // bit i belongs to input i
  for (int i = 0; i < kGroupInputs / 8; ++i) {
    uint64_t eight, spread = bytes[i] * 0x0101010101010101ull & 0x8040201008040201ull;  // a byte has one bit, or none
    spread = (spread + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    std::memcpy(&eight, bits + 8 * i, sizeof eight);
    eight |= spread << 4;
    std::memcpy(bits + 8 * i, &eight, sizeof eight);
  }
}

void read_q5_0(const uint8_t* block, int, BlockGroup& out) {  // d, fifth bits, nibbles; 16 is zero
  out.scale[0] = half_at(block, 0), out.minimum = float_to_half(-16.0f * float_at(block, 0));
  split_nibbles(block + 6, out.bits);
  add_fifth_bits(block + 2, out.bits);
}

void read_q5_1(const uint8_t* block, int, BlockGroup& out) {  // d, m, fifth bits, nibbles
  out.scale[0] = half_at(block, 0), out.minimum = half_at(block, 2);
  split_nibbles(block + 8, out.bits);
  add_fifth_bits(block + 4, out.bits);
}

void read_q8_0(const uint8_t* block, int, BlockGroup& out) {  // d, signed bytes
  out.scale[0] = half_at(block, 0);
  std::memcpy(out.bits, block + 2, kGroupInputs);
}

// Reads scales and minima of eight groups, six bits each, in twelve bytes after d and dmin.
void read_k_scales(const uint8_t* block, int group, BlockGroup& out) {
  const uint8_t* s = block + 4;
  const int j = group & 3;
  int scale = s[j] & 63, minimum = s[j + 4] & 63;
  if (group > 3) {
    scale = (s[j + 8] & 15) | s[j] >> 6 << 4;
    minimum = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
  }
  out.scale[0] = static_cast<uint16_t>(scale), out.minimum = static_cast<uint16_t>(minimum);
  out.super[0] = half_at(block, 0), out.super[1] = half_at(block, 2) ^ 0x8000;
}

// Reads 32 bytes for two groups: the first one is in the low halves.
void read_k_nibbles(const uint8_t* bytes, int group, BlockGroup& out) {
  for (int i = 0; i < kGroupInputs; ++i) out.bits[i] = bytes[group / 2 * 32 + i] >> group % 2 * 4 & 15;
}

void read_q4_k(const uint8_t* block, int group, BlockGroup& out) {
  read_k_scales(block, group, out);
  read_k_nibbles(block + 16, group, out);
}

void read_q5_k(const uint8_t* block, int group, BlockGroup& out) {  // bit `group` of 32 bytes is the fifth
  read_k_scales(block, group, out);
  read_k_nibbles(block + 48, group, out);
  for (int i = 0; i < kGroupInputs; ++i) out.bits[i] |= (block[16 + i] >> group & 1) << 4;
}

void read_q6_k(const uint8_t* block, int group, BlockGroup& out) {  // nibbles, pairs of bits, scales of 16, d
  const int half = group / 4, quarter = group % 4;
  const uint8_t *low = block + half * 64 + quarter % 2 * 32, *high = block + 128 + half * 32;
  for (int i = 0; i < kGroupInputs; ++i)
    out.bits[i] = static_cast<uint8_t>((low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4);
  for (int i = 0; i < 2; ++i) out.scale[i] = block[192 + 2 * group + i];
  out.super[0] = half_at(block, 208);
}

void read_iq4_xs(const uint8_t* block, int group, BlockGroup& out) {  // d, high bits of scales, low ones, nibbles
  const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = half_at(block, 2) >> 2 * group & 3;
  out.scale[0] = float_to_half(float_at(block, 0) * static_cast<float>((low | high << 4) - 32));
  split_nibbles(block + 8 + 16 * group, out.bits);
}

// Reads an exponent, nibbles. The scale is half of 2^(exponent - 127), as levels are doubled; with exponents beyond
// 252 the largest weights are no float32.
void read_mxfp4(const uint8_t* block, int, BlockGroup& out) {
  const int exponent = block[0];
  const int bits = exponent > 1 ? (exponent - 1) << 7 : 0x20 << exponent;
  out.scale[0] = static_cast<uint16_t>(exponent > 252 ? 0x7f80 : bits);
  split_nibbles(block + 1, out.bits);
}

constexpr BlockFormat kFormats[] = {
    {"q4_0", 32, 18, DType::q4, read_q4_0},          {"q4_1", 32, 20, DType::q4_min, read_q4_1},
    {"q5_0", 32, 22, DType::q5_min, read_q5_0},      {"q5_1", 32, 24, DType::q5_min, read_q5_1},
    {"q8_0", 32, 34, DType::q8, read_q8_0},          {"q4_k", 256, 144, DType::q4_k, read_q4_k},
    {"q5_k", 256, 176, DType::q5_k, read_q5_k},    {"q6_k", 256, 210, DType::q6_k, read_q6_k},
    {"iq4_nl", 32, 18, DType::iq4, read_q4_0},       {"iq4_xs", 256, 136, DType::iq4, read_iq4_xs},
    {"mxfp4", 32, 17, DType::mxfp4, read_mxfp4},
};

// --- tiles --------------------------------------------------------------------------------------------------------

struct Place {  // where a row's bits and scales are in a tile's group of inputs
  Place(DType held, int row, int index, int groups_before)
      : traits(traits_of(held)), lines(traits.bits == 8 ? 8 : 4), planes(traits.bits == 8 ? 0 : traits.bits - 4),
        scale_size(scale_bytes(held)), group(group_at(index, held, groups_before)) {
    const int first = std::max(0, (groups_before + index) / kSuperGroups * kSuperGroups - groups_before);
    line = group + row / 16 * 64 + row % 16 * 4;
    scales = group + group_bytes(held) - kTileRows * scale_size * (traits.scales + traits.minima) + scale_size * row;
    super = group_at(first, held, groups_before) - super_bytes(held) + 2 * row;
  }
  size_t scale(int i) const { return scales + kTileRows * scale_size * i; }  // the minimum's is after them
  int supers() const { return traits.super ? 1 + traits.minima : 0; }

  const DTypeTraits& traits;
  const int lines, planes, scale_size;            // how many lines and planes; bytes of a scale
  size_t group, line = 0, scales = 0, super = 0;  // byte offsets in the tile
};

}  // namespace

std::span<const BlockFormat> block_formats() { return kFormats; }

const BlockFormat* block_format(const std::string& name) {
  for (const BlockFormat& format : kFormats)
    if (name == format.name) return &format;
  return nullptr;
}

void read_group(const BlockFormat& format, const void* row, int group, BlockGroup& out) {
  const int of_block = format.inputs / kGroupInputs;
  format.read(static_cast<const uint8_t*>(row) + size_t(group / of_block) * format.bytes, group % of_block, out);
}

bool is_finite(const BlockGroup& group, DType held) {
  const uint16_t exponent = held == DType::mxfp4 ? 0x7f80 : 0x7c00;
  const auto finite = [=](uint16_t half) { return (half & exponent) != exponent; };
  const DTypeTraits& traits = traits_of(held);
  if (traits.super) return finite(group.super[0]) && (!traits.minima || finite(group.super[1]));
  return finite(group.scale[0]) && (!traits.minima || finite(group.minimum));
}

void widen(const BlockGroup& group, DType held, float* out) {
  const DTypeTraits& traits = traits_of(held);
  const auto number = [&](uint16_t scale, int super) {
    if (traits.super) return static_cast<float>(static_cast<int8_t>(scale)) * half_to_float(group.super[super]);
    return held == DType::mxfp4 ? std::bit_cast<float>(uint32_t(scale) << 16) : half_to_float(scale);
  };
  const float minimum = traits.minima ? number(group.minimum, 1) : 0.0f;
  const float scales[] = {number(group.scale[0], 0), number(group.scale[traits.scales == 2], 0)};
  for (int i = 0; i < kGroupInputs; ++i) {
    const int bits = held == DType::iq4     ? kUnevenLevels[group.bits[i]]
                     : held == DType::mxfp4 ? kFloatLevels[group.bits[i]]
                     : held == DType::q8    ? static_cast<int8_t>(group.bits[i])
                                            : group.bits[i] - traits.zero;
    out[i] = static_cast<float>(bits) * scales[i / 16] + minimum;
  }
}

void place_group(const BlockGroup& group, DType held, int row, char* tile, int index, int groups_before) {
  const Place place(held, row, index, groups_before);
  uint32_t word[8], high[2] = {};  // each word has four inputs
  std::memcpy(word, group.bits, sizeof word);
  for (int i = 0; i < 8; ++i) {
    if (place.planes == 1) high[0] |= (word[i] >> 4 & 0x01010101) << i;
    if (place.planes == 2) high[i / 4] |= (word[i] >> 4 & 0x03030303) << i % 4 * 2;
  }
  for (int i = 0; i < 4 && held != DType::q8; ++i)
    word[i] = (word[2 * i] & 0x0f0f0f0f) | (word[2 * i + 1] & 0x0f0f0f0f) << 4;
  const auto put = [=](size_t at, const auto& value, size_t size) { std::memcpy(tile + at, &value, size); };
  for (int i = 0; i < place.lines; ++i) put(place.line + 128 * i, word[i], sizeof word[i]);
  for (int i = 0; i < place.planes; ++i) put(place.line + 128 * (place.lines + i), high[i], sizeof high[i]);
  for (int i = 0; i < place.traits.scales; ++i) put(place.scale(i), group.scale[i], place.scale_size);
  if (place.traits.minima) put(place.scale(place.traits.scales), group.minimum, place.scale_size);
  for (int i = 0; i < place.supers(); ++i) put(place.super + 64 * i, group.super[i], sizeof group.super[i]);
}

void take_group(const char* tile, DType held, int row, int index, int groups_before, BlockGroup& out) {
  const Place place(held, row, index, groups_before);
  const auto take = [=](size_t at, auto& value, size_t size) { std::memcpy(&value, tile + at, size); };
  const auto line = [&](int i) {
    uint32_t bits;
    take(place.line + 128 * i, bits, sizeof bits);
    return bits;
  };
  uint32_t word[8];
  for (int i = 0; i < 8; ++i) {
    word[i] = held == DType::q8 ? line(i) : line(i / 2) >> i % 2 * 4 & 0x0f0f0f0f;
    if (place.planes == 1) word[i] |= (line(4) >> i & 0x01010101) << 4;
    if (place.planes == 2) word[i] |= (line(4 + i / 4) >> i % 4 * 2 & 0x03030303) << 4;
  }
  std::memcpy(out.bits, word, sizeof word);
  for (int i = 0; i < place.traits.scales; ++i) take(place.scale(i), out.scale[i], place.scale_size);
  if (place.traits.minima) take(place.scale(place.traits.scales), out.minimum, place.scale_size);
  for (int i = 0; i < place.supers(); ++i) take(place.super + 64 * i, out.super[i], sizeof out.super[i]);
}

}  // namespace laneformer
