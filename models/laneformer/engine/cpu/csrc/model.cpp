// Packing: the layout of the tapes, conversions between weight types, int8 quantisation, random weights for benchmarks.
#include "model.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

namespace laneformer {

namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f);
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  return std::bit_cast<float>(bits | sign);
}

uint16_t float_to_half(float x) {  // round to nearest even; too large becomes infinity
  const uint16_t sign = static_cast<uint16_t>((std::bit_cast<uint32_t>(x) >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

template <DType T>
struct Element;
template <>
struct Element<DType::bf16> {
  using type = uint16_t;
  static float widen(uint16_t v) { return std::bit_cast<float>(uint32_t(v) << 16); }
  static uint16_t narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7f800000) == 0x7f800000) return static_cast<uint16_t>(bits >> 16);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};
template <>
struct Element<DType::fp16> {
  using type = uint16_t;
  static float widen(uint16_t v) { return half_to_float(v); }
  static uint16_t narrow(float x) { return float_to_half(x); }
};
template <>
struct Element<DType::fp32> {
  using type = float;
  static float widen(float v) { return v; }
  static float narrow(float x) { return x; }
};
template <>
struct Element<DType::int8> {
  using type = int8_t;
};

// A row's scale: its largest magnitude becomes 127. As integers, magnitudes are ordered like the numbers and NaN comes
// last, so the scale is not finite where a value is not. Rows too small for a scale are zeros, whose scale is zero.
template <DType From>
float row_scale(const typename Element<From>::type* in, int count) {
  uint32_t largest = 0;
  for (int k = 0; k < count; ++k)
    largest = std::max(largest, std::bit_cast<uint32_t>(std::fabs(Element<From>::widen(in[k]))));
  const float scale = std::bit_cast<float>(largest) / 127.0f;
  return scale < FLT_MIN ? 0.0f : scale;
}

int8_t quantised(float x, float scale) {  // to the nearest even integer: adding 1.5 * 2^23 rounds
  constexpr float kRounds = 12582912.0f;
  return scale > 0.0f ? static_cast<int8_t>(x / scale + kRounds - kRounds) : 0;
}

bool is_finite(int8_t, DType) { return true; }
bool is_finite(uint16_t v, DType dtype) {
  const uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
  return (v & exponent) != exponent;
}
bool is_finite(float v, DType) { return std::isfinite(v); }

// Where a row's first input lies among the 64 values of a tile's first pair (kernels.h).
int first_in_tile(int row, DType dtype) {
  const int group = row / 16, in_group = row % 16;
  if (dtype == DType::int8) return 4 * in_group + 2 * group;
  return 32 * group + (dtype == DType::bf16 ? 2 * in_group : in_group);
}

template <DType From, DType To>
bool pack_rows_as(const PackJob& job, const Matrix& matrix, char* tape) {
  using Out = typename Element<To>::type;
  const auto* source = static_cast<const typename Element<From>::type*>(job.source);
  const int pairs = matrix.k_pairs();
  bool finite = true;
  for (int r = 0; r < job.rows; ++r) {
    const auto* in = source + size_t(r) * job.inputs;
    const int whole =
        job.interleave_half < 0 ? job.first_row + r : r / 16 * kTileRows + 16 * job.interleave_half + r % 16;
    const int row = whole - matrix.first_row;
    if (row < 0 || row >= matrix.rows) continue;
    auto* tile = reinterpret_cast<Out*>(tape + matrix.offset + row / kTileRows * tile_bytes(pairs, To));
    float scale = 1.0f;
    if constexpr (To == DType::int8) {
      scale = row_scale<From>(in, job.inputs);
      finite &= std::isfinite(scale);
      reinterpret_cast<float*>(tile + pairs * 2 * kTileRows)[row % kTileRows] = scale;
      if (!std::isfinite(scale)) continue;
    }
    const int even = first_in_tile(row % kTileRows, To), odd = even + (To == DType::bf16 || To == DType::int8 ? 1 : 16);
    for (int k = 0; k < job.inputs; ++k) {
      Out value;
      if constexpr (From == To)
        value = in[k];
      else if constexpr (To == DType::int8)
        value = quantised(Element<From>::widen(in[k]), scale);
      else
        value = Element<To>::narrow(Element<From>::widen(in[k]));
      finite &= is_finite(value, To);
      tile[k / 2 * 64 + (k & 1 ? odd : even)] = value;
    }
  }
  return finite;
}

template <DType From>
bool pack_rows_from(const PackJob& job, const Matrix& matrix, DType to, char* tape) {
  if (to == DType::bf16) return pack_rows_as<From, DType::bf16>(job, matrix, tape);
  if (to == DType::fp16) return pack_rows_as<From, DType::fp16>(job, matrix, tape);
  if (to == DType::int8) return pack_rows_as<From, DType::int8>(job, matrix, tape);
  return pack_rows_as<From, DType::fp32>(job, matrix, tape);
}

float load_as_float(const void* source, DType from, size_t i) {
  if (from == DType::fp32) return static_cast<const float*>(source)[i];
  const uint16_t bits = static_cast<const uint16_t*>(source)[i];
  return from == DType::bf16 ? Element<DType::bf16>::widen(bits) : half_to_float(bits);
}
uint16_t narrow(float x, DType to) { return to == DType::bf16 ? Element<DType::bf16>::narrow(x) : float_to_half(x); }

uint64_t mix_bits(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Whole lanes while there are enough of them, as evenly as their number allows; else each lane gets a group of threads.
void share_lanes(int lanes, int threads, int t, ThreadPlan& plan) {
  plan.first_lane = lanes * t / threads;
  plan.leader = t;
  if (threads <= lanes) {
    plan.last_lane = lanes * (t + 1) / threads;
    return;
  }
  const auto first_of = [&](int lane) { return (lane * threads + lanes - 1) / lanes; };
  plan.last_lane = plan.first_lane + 1;
  plan.leader = first_of(plan.first_lane);
  plan.members = first_of(plan.last_lane) - plan.leader;
}

}  // namespace

bool pack_rows(const PackJob& job, const Matrix& matrix, DType to, char* tape) {
  if (job.from == DType::bf16) return pack_rows_from<DType::bf16>(job, matrix, to, tape);
  if (job.from == DType::fp16) return pack_rows_from<DType::fp16>(job, matrix, to, tape);
  return pack_rows_from<DType::fp32>(job, matrix, to, tape);
}

bool convert(const void* source, DType from, size_t count, void* out, DType to) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    const float value = load_as_float(source, from, i);
    if (to == DType::fp32)
      static_cast<float*>(out)[i] = value, finite &= std::isfinite(value);
    else
      finite &= is_finite(static_cast<uint16_t*>(out)[i] = narrow(value, to), to);
  }
  return finite;
}

// Uniform, not normal: a benchmark needs plausible magnitudes, and four values come out of one multiplication chain.
void fill_random(void* out, DType dtype, size_t count, uint64_t key, float deviation) {
  const float scale = deviation * std::sqrt(3.0f) / 32768.0f;
  for (size_t i = 0; i < count; i += 4) {
    const uint64_t bits = mix_bits(mix_bits(key) + (i / 4) * 0x9e3779b97f4a7c15ull);
    for (size_t j = 0; j < 4 && i + j < count; ++j) {
      const float value = static_cast<float>(static_cast<int16_t>(bits >> (16 * j))) * scale;
      if (dtype == DType::fp32)
        static_cast<float*>(out)[i + j] = value;
      else
        static_cast<uint16_t*>(out)[i + j] = narrow(value, dtype);
    }
  }
}

std::vector<ThreadPlan> plan_tapes(const ModelSpec& spec, int threads, DType dtype) {
  std::vector<ThreadPlan> plans(threads);
  for (int t = 0; t < threads; ++t) {
    ThreadPlan& plan = plans[t];
    share_lanes(spec.lanes, threads, t, plan);
    const int own = plan.last_lane - plan.first_lane, member = t - plan.leader;
    const auto place = [&](Matrix& matrix, int rows, int inputs, int part, int parts) {
      const int tiles = (rows + kTileRows - 1) / kTileRows;
      const int first = tiles * part / parts * kTileRows, end = tiles * (part + 1) / parts * kTileRows;
      matrix = {std::min(end, rows) - std::min(first, rows), inputs, plan.tape_bytes, first};
      plan.tape_bytes += matrix.bytes(dtype);
    };
    const auto place_own = [&](Matrix& matrix, int rows, int inputs) {
      place(matrix, rows, inputs, member, plan.members);
    };
    plan.layers.assign(spec.layers, std::vector<LaneLayer>(own));
    for (auto& layer : plan.layers) {
      for (auto& lane : layer) {
        place_own(lane.qkv, spec.qkv_rows(), spec.hidden);
        place_own(lane.wo, spec.hidden, spec.q_rows());
      }
      for (auto& lane : layer) {
        place_own(lane.gate_up, spec.gate_up_rows(), spec.hidden);
        place_own(lane.w2, spec.hidden, spec.ff_rows());
      }
    }
    plan.head.resize(spec.head == Head::replicate ? 1 : own);
    for (auto& head : plan.head) {
      if (spec.head == Head::replicate)
        place(head, spec.vocab, spec.hidden, t, threads);
      else
        place_own(head, spec.head_rows(), spec.head == Head::lane ? spec.q_rows() : spec.hidden);
    }
  }
  return plans;
}

}  // namespace laneformer
