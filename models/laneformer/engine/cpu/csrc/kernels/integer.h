// Products of int8, int4 and GGUF's weights with activations rounded to int8: sums of integers, the same everywhere.
//
// A column's inputs are rounded in groups of 32 to whole multiples of their largest magnitude / 127. A group's sum of
// products is an exact int32; it is scaled and added to the row's fp32 sum group by group, by a multiplication and an
// addition that are never fused; so is the weights' minimum, times the sum of inputs. So all instruction sets give the
// same bits.
#pragma once
#include "matmul.h"

namespace laneformer {
namespace {

// What weights have too much where they are multiplied: an instruction for unsigned ones takes no others.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kOffset = 128;
#else
constexpr int kOffset = 0;
#endif
template <DType T>
constexpr bool kSigned = T == DType::int8 || T == DType::q8 || T == DType::iq4 || T == DType::mxfp4;
template <DType T>
constexpr int kScales = traits_of(T).scales == 2 ? 2 : 1;
template <DType T>
constexpr int kMinima = traits_of(T).minima;
template <DType T>
constexpr bool kSuper = traits_of(T).super;
template <DType T>
constexpr int kBias = kMinima<T> ? 0 : kSigned<T> ? kOffset : traits_of(T).zero;

struct RoundedGroup {
  int8_t x[kGroupInputs];
  float scale;
  int32_t offset, first_offset;  // what cancels the bias of 32 weights, and of the first 16
  float scaled_sum;              // of x, by which minima are multiplied
};

typedef int16_t I16 __attribute__((vector_size(4 * kWidth), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * kWidth), may_alias));

size_t rounded_group_bytes(int k_pairs) { return sizeof(RoundedGroup) * groups_of(k_pairs); }

INLINE int32_t sum_words(const I (&words)[kParts]) {
  return fold<16>((const int32_t*)words, [](auto a, auto b) { return a + b; });
}

template <DType T>
INLINE void round_group(const float* x, RoundedGroup* out) {
  V16 largest = splat(0.0f);
  for (int half = 0; half < 2; ++half) {
    V16 v = load(x + 16 * half);
    EACH_PART v.part[i] = (F)((I)v.part[i] & 0x7fffffff);
    largest = max(largest, v);
  }
  const float most = maximum(largest);
  out->scale = most / 127.0f;
  if (!(out->scale >= 1.17549435e-38f)) out->scale = 0.0f;  // too small to divide by
  const V16 inverse = splat(out->scale > 0.0f ? 127.0f / most : 0.0f), magic = splat(12582912.0f);
  I sum[kParts] = {};
  for (int half = 0; half < 2; ++half) {
    const V16 shifted = load(x + 16 * half) * inverse + magic;  // adding 1.5 * 2^23 rounds to the nearest even integer
    EACH_PART {
      const I rounded = (I)shifted.part[i] - 0x4b400000;
      sum[i] += rounded;
      *(Narrow*)(out->x + 16 * half + i * kWidth) = (Narrow)__builtin_convertvector(rounded, Narrow);
    }
    if (kScales<T> == 2 && half == 0) out->first_offset = -kBias<T> * sum_words(sum);
  }
  const int32_t total = kBias<T> || kMinima<T> ? sum_words(sum) : 0;
  out->offset = -kBias<T> * total;
  out->scaled_sum = out->scale * (float)total;
}

// The group from input `k` on, of `inputs` inputs; zeros follow the last one.
template <DType T>
INLINE void round_group_at(const float* x, int k, int inputs, RoundedGroup* out) {
  if (inputs - k >= kGroupInputs) return round_group<T>(x + k, out);
  float padded[kGroupInputs] = {};
  __builtin_memcpy(padded, x + k, (inputs - k) * sizeof(float));
  round_group<T>(padded, out);
}

template <DType T>
void round_groups(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  for (int c = 0; c < columns; ++c, x += x_stride)
    for (int k = 0; k < 2 * k_pairs; k += kGroupInputs, out += sizeof(RoundedGroup))
      round_group_at<T>(x, k, 2 * k_pairs, (RoundedGroup*)out);
}

// To each sum, its word's four weights times the four inputs. Weights are 0 to 127 and inputs -127 to 127, so that the
// sum of two products fits into 16 bits.
INLINE I dot(I sums, I w, I x) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (I)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(__AVX512BW__)
  return sums + (I)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return sums + (I)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (I)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
#else
  const I16 pairs = ((I16)w << 8 >> 8) * ((I16)x << 8 >> 8) + ((I16)w >> 8) * ((I16)x >> 8);
  return sums + ((I)pairs << 16 >> 16) + ((I)pairs >> 16);
#endif
}

// The same for weights of -127 to 127.
INLINE I dot_signed(I sums, I w, I x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return dot(sums, w ^ (int32_t)0x80808080, x);
#elif defined(__AVX2__) && !defined(__AVX512BW__)
  return dot(sums, (I)_mm256_abs_epi8((__m256i)w), (I)_mm256_sign_epi8((__m256i)x, (__m256i)w));
#elif defined(__AVX512BW__)
  const __m512i even = _mm512_madd_epi16((__m512i)((I16)w << 8 >> 8), (__m512i)((I16)x << 8 >> 8));
  return sums + (I)even + (I)_mm512_madd_epi16((__m512i)((I16)w >> 8), (__m512i)((I16)x >> 8));
#else
  return dot(sums, w, x);  // which takes signed weights here
#endif
}

// Of each byte's four bits what a table of 16 bytes says.
INLINE I levels_of(const void* table, I index) {
#if defined(__AVX512BW__)
  return (I)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, *(const __m128i*)table), (__m512i)index);
#elif defined(__AVX2__)
  return (I)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i*)table), (__m256i)index);
#elif defined(__aarch64__)
  return (I)vqtbl1q_u8(vld1q_u8((const uint8_t*)table), (uint8x16_t)index);
#else
  uint8_t bytes[4 * kWidth];
  __builtin_memcpy(bytes, &index, sizeof bytes);
  for (uint8_t& byte : bytes) byte = ((const uint8_t*)table)[byte];
  I levels;
  __builtin_memcpy(&levels, bytes, sizeof bytes);
  return levels;
#endif
}

// One word a row of one group of 16 rows: the weights of inputs 4 `word` to 4 `word` + 3 of a tile's group of inputs, of
// which int8 may have fewer than 16 pairs.
template <DType T>
INLINE I load_word(const char* w, int group, int part, int word, int pairs) {
  const int at = 64 * group + part * 4 * kWidth;
  if constexpr (T == DType::int8) {  // a line has two inputs of both groups
    const char* line = w + 128 * word + part * 4 * kWidth;
    const I first = 2 * word < pairs ? *(const I*)line : I{};
    const I second = 2 * word + 1 < pairs ? *(const I*)(line + 64) : I{};
    return group ? (I)((U)first >> 16) | (second & (int32_t)0xffff0000) : (first & 0xffff) | second << 16;
  } else if constexpr (T == DType::q8) {
    return *(const I*)(w + 128 * word + at);
  } else {
    const I both = *(const I*)(w + word / 2 * 128 + at);
    const I bits = (word % 2 ? (I)((U)both >> 4) : both) & 0x0f0f0f0f;
    if constexpr (T == DType::int4) return levels_of(kLevels, bits);
    if constexpr (T == DType::iq4) return levels_of(kUnevenLevels, bits);
    if constexpr (T == DType::mxfp4) return levels_of(kFloatLevels, bits);
    if constexpr (T == DType::q5_min || T == DType::q5_k)
      return bits | ((I)((U)(*(const I*)(w + 512 + at)) >> word) & 0x01010101) << 4;
    if constexpr (T == DType::q6_k) {
      const I high = *(const I*)(w + 512 + word / 4 * 128 + at);
      return bits | ((I)((U)high >> (word % 4 * 2)) & 0x03030303) << 4;
    }
    return bits;
  }
}

constexpr int kRoundedColumns = 4, kRoundedGroups = kParts == 1 ? 2 : 1;  // what the registers hold

INLINE V16 halves(const char* w) {
  V16 v;
  EACH_PART v.part[i] = half_part((const uint16_t*)w + i * kWidth);
  return v;
}

// The scales, or minima, of 16 rows in fp32; in a superblock, over the scales of them, `supers`.
template <DType T>
INLINE V16 scales_at(const char* w, const float* supers) {
  typedef uint16_t H __attribute__((vector_size(2 * kWidth), may_alias));
  if constexpr (kSuper<T>) return load(supers) * signed_bytes(w);
  if constexpr (T != DType::mxfp4) return halves(w);
  V16 v;
  EACH_PART v.part[i] = (F)(__builtin_convertvector(*(const H*)((const uint16_t*)w + i * kWidth), I) << 16);
  return v;
}

// A group of inputs of one tile as it lies on the tape. `supers` (1 + minima, 32): the superblock's scales.
template <DType T>
struct PackedGroup {
  static constexpr bool kBiased = false;
  static constexpr int kLine = kTileRows * scale_bytes(T);  // of scales
  const char* w;
  const float* supers;
  int pairs;  // of inputs that the matrix has, at most a group's

  INLINE I word(int g, int part, int k) const { return load_word<T>(w, g, part, k, pairs); }
  INLINE const char* scale_line(int line, int g) const {
    return w + group_bytes(T) - kLine * (kScales<T> + kMinima<T>) + kLine * line + kLine / 2 * g;
  }
  INLINE V16 scales(int g, int half) const { return scales_at<T>(scale_line(half, g), supers + 16 * g); }
  INLINE V16 minima(int g) const { return scales_at<T>(scale_line(1, g), supers + kTileRows + 16 * g); }
};

// Adds the inputs that share a scale, those of `words` words from `word` on, of kRoundedGroups groups of 16 rows times
// COLUMNS columns.
template <DType T, int COLUMNS, class Group>
INLINE void add_scaled(const Group& weights, int first, int word, int words, const char* x, size_t stride,
                       V16 (&total)[2][COLUMNS]) {
  I sums[kRoundedGroups][COLUMNS][kParts];
#pragma GCC unroll 8
  for (int c = 0; c < COLUMNS; ++c) {
    const auto* in = (const RoundedGroup*)(x + c * stride);
    const int32_t begin = kScales<T> == 1 ? in->offset : word ? in->offset - in->first_offset : in->first_offset;
    for (int g = 0; g < kRoundedGroups; ++g) EACH_PART sums[g][c][i] = begin - I{};
  }
  for (int k = word; k < word + words; k += 2)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      I w[kRoundedGroups][kParts];
#pragma GCC unroll 2
      for (int g = 0; g < kRoundedGroups; ++g) EACH_PART w[g][i] = weights.word(first + g, i, k + half);
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) {
        const I four = ((const int32_t*)(x + c * stride))[k + half] - I{};
#pragma GCC unroll 2
        for (int g = 0; g < kRoundedGroups; ++g) EACH_PART {
          I& sum = sums[g][c][i];
          sum = kSigned<T> && !Group::kBiased ? dot_signed(sum, w[g][i], four) : dot(sum, w[g][i], four);
#if defined(__AVX2__)
          asm("" : "+v"(sum));  // it stays in its register: gcc would add up all products of a group beside each other
#endif
        }
      }
    }
#pragma GCC unroll 2
  for (int g = 0; g < kRoundedGroups; ++g) {
    V16 scales = splat(1.0f), minima = splat(0.0f);
    if constexpr (T != DType::int8) scales = weights.scales(first + g, word ? 1 : 0);
    if constexpr (kMinima<T> != 0) minima = weights.minima(first + g);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      const auto* in = (const RoundedGroup*)(x + c * stride);
      V16 sum, scale = splat(in->scale);
      if constexpr (T != DType::int8) scale = scales * scale;
      EACH_PART sum.part[i] = __builtin_convertvector(sums[g][c][i], F);
      total[first + g][c] = total[first + g][c] + scale * sum;
      if constexpr (kMinima<T> != 0) total[first + g][c] = total[first + g][c] + minima * splat(in->scaled_sum);
    }
  }
}

// Adds one group of inputs of all rows of a tile. `pairs`: those that the matrix has, at most a group's.
template <DType T, int COLUMNS, class Group>
INLINE void add_group(const Group& weights, int pairs, const char* x, size_t stride, V16 (&total)[2][COLUMNS]) {
  constexpr int kWords = kGroupInputs / 4 / kScales<T>;
  const int words = kScales<T> == 1 && pairs < kGroupInputs / 2 ? (pairs + 1) / 2 : kWords;
#pragma GCC unroll 2
  for (int g = 0; g < 2; g += kRoundedGroups) {
    add_scaled<T, COLUMNS>(weights, g, 0, words, x, stride, total);
    if constexpr (kScales<T> == 2) add_scaled<T, COLUMNS>(weights, g, kWords, kWords, x, stride, total);
  }
}

template <DType T>
constexpr int kTapeBytes = T == DType::int8 ? 1024 : group_bytes(T);  // of a group of inputs of one tile

// Where a tile's next group of inputs lies on the tape.
template <DType T>
struct TapePlace {
  TapePlace(const char* w, int pairs, int group) : w(w), pairs(pairs), group(group) {}

  // Reads the superblock's scales where the group begins one, and fetches what lies `ahead`.
  INLINE PackedGroup<T> open(bool first, size_t ahead) {
    if (kSuper<T> && (first || group % kSuperGroups == 0)) {
      for (int at = 0; at < super_bytes(T); at += 64) {
        __builtin_prefetch(w + ahead + at);
        for (int half = 0; half < 2; ++half) store(supers + at / 2 + 16 * half, halves(w + at + 32 * half));
      }
      w += super_bytes(T);
    }
    for (int line = 0; line < kTapeBytes<T>; line += 64) __builtin_prefetch(w + ahead + line);
    return {w, supers, pairs};
  }
  INLINE void close() { w += kTapeBytes<T>, pairs -= kGroupInputs / 2, ++group; }

  const char* w;
  int pairs;  // of inputs that are left
  int group;  // its number in the matrix's superblocks
  float supers[2 * kTileRows] = {};
};

// One tile times COLUMNS columns.
template <DType T, int COLUMNS>
void multiply_rounded_tile(const char* w, int k_pairs, const char* x, size_t stride, size_t ahead, int groups_before,
                           float* y, int y_stride, int valid) {
  V16 total[2][COLUMNS];
  for (auto& group : total)
    for (V16& t : group) t = splat(0.0f);
  const float* const row_scales = (const float*)(w + (size_t)k_pairs * 64);  // of int8
  for (TapePlace<T> at(w, k_pairs, groups_before); at.pairs > 0; at.close(), x += sizeof(RoundedGroup))
    add_group<T, COLUMNS>(at.open(at.pairs == k_pairs, ahead), at.pairs, x, stride, total);
  for (int g = 0; g < 2; ++g)
    for (int c = 0; c < COLUMNS; ++c) {
      V16 v = total[g][c];
      if constexpr (T == DType::int8) v = v * load(row_scales + 16 * g);
      store_rows(y + c * y_stride + 16 * g, v, valid - 16 * g);
    }
}

}  // namespace
}  // namespace laneformer
