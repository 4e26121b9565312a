// Packing: the layout of the tapes, conversions between the three weight types, and random weights for benchmarks.
#include "model.h"

#include <cmath>
#include <cstring>

namespace laneformer {

namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  float value;
  uint32_t bits = rest << 13;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, 4);
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float x) {  // round to nearest even; too large becomes infinity
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  std::memcpy(&bits, &magnitude, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}

template <DType T>
struct Element;
template <>
struct Element<DType::bf16> {
  using type = uint16_t;
  static float widen(uint16_t v) {
    const uint32_t bits = uint32_t(v) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  static uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
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

bool is_finite(uint16_t v, DType dtype) {
  const uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
  return (v & exponent) != exponent;
}
bool is_finite(float v, DType) { return std::isfinite(v); }

template <DType From, DType To>
bool pack_rows_as(const PackJob& job, const Matrix& matrix, char* tape) {
  using Out = typename Element<To>::type;
  const auto* source = static_cast<const typename Element<From>::type*>(job.source);
  const int pairs = matrix.k_pairs();
  bool finite = true;
  for (int r = 0; r < job.rows; ++r) {
    const auto* in = source + size_t(r) * job.inputs;
    const int row =
        job.interleave_half < 0 ? job.first_row + r : r / 16 * kTileRows + 16 * job.interleave_half + r % 16;
    const int in_group = row % 16;
    auto* group = reinterpret_cast<Out*>(tape + matrix.offset + row / kTileRows * tile_bytes(pairs, To)) +
                  row % kTileRows / 16 * 32;
    const int even = To == DType::bf16 ? 2 * in_group : in_group, odd = To == DType::bf16 ? even + 1 : 16 + in_group;
    for (int k = 0; k < job.inputs; ++k) {
      Out value;
      if constexpr (From == To)
        value = in[k];
      else
        value = Element<To>::narrow(Element<From>::widen(in[k]));
      finite &= is_finite(value, To);
      group[k / 2 * 64 + (k & 1 ? odd : even)] = value;
    }
  }
  return finite;
}

template <DType From>
bool pack_rows_from(const PackJob& job, const Matrix& matrix, DType to, char* tape) {
  if (to == DType::bf16) return pack_rows_as<From, DType::bf16>(job, matrix, tape);
  if (to == DType::fp16) return pack_rows_as<From, DType::fp16>(job, matrix, tape);
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
    plan.first_lane = spec.lanes * t / threads;
    plan.last_lane = spec.lanes * (t + 1) / threads;
    const int own = plan.last_lane - plan.first_lane;
    const auto place = [&](Matrix& matrix, int rows, int inputs) {
      matrix = {rows, inputs, plan.tape_bytes};
      plan.tape_bytes += matrix.bytes(dtype);
    };
    plan.layers.assign(spec.layers, std::vector<LaneLayer>(own));
    for (auto& layer : plan.layers) {
      for (auto& lane : layer) {
        place(lane.qkv, spec.qkv_rows(), spec.hidden);
        place(lane.wo, spec.hidden, spec.q_rows());
      }
      for (auto& lane : layer) {
        place(lane.gate_up, spec.gate_up_rows(), spec.hidden);
        place(lane.w2, spec.hidden, spec.ff_rows());
      }
    }
    if (spec.head == Head::replicate) {
      plan.head_first_row = static_cast<int>(int64_t{spec.vocab} * t / threads);
      const int end = static_cast<int>(int64_t{spec.vocab} * (t + 1) / threads);
      plan.head.resize(1);
      place(plan.head[0], end - plan.head_first_row, spec.hidden);
    } else {
      plan.head.resize(own);
      const bool sliced = spec.head == Head::vocab_parallel;
      for (auto& head : plan.head)
        place(head, sliced ? spec.vocab / spec.lanes : spec.vocab, sliced ? spec.hidden : spec.q_rows());
    }
  }
  return plans;
}

}  // namespace laneformer
