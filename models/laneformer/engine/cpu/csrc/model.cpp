// Packing: the layout of the tapes, conversions between weight types, quantisation, random weights for benchmarks.
#include "model.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
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

// A row's scale: its largest magnitude becomes 127. As integers, magnitudes are ordered like the numbers and NaN comes
// last, so the scale is not finite where a value is not. Rows too small for a scale are zeros, whose scale is zero.
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

// The nearest of the levels to x / scale, ties to the higher one.
int nearest_level(float x) {
  static const auto kNearest = [] {
    std::array<uint8_t, 2 * 127 + 1> nearest{};  // by twice the distance from the lowest level
    for (size_t i = 0, level = 0; i < nearest.size(); nearest[i++] = static_cast<uint8_t>(level))
      while (level < 15 && static_cast<int>(i) >= kLevels[level] + kLevels[level + 1]) ++level;
    return nearest;
  }();
  return kNearest[static_cast<int>(std::clamp(2.0f * (x + kZeroLevel), 0.0f, 254.0f))];
}

// A group of inputs as levels and one scale in fp16. Candidates map the value of largest magnitude near the lowest or
// the highest level; each is refined to the scale of least squares for its levels, and the least error wins.
uint16_t quantise_group(const float* in, uint8_t* levels) {
  float peak = 0.0f;
  for (int k = 0; k < kGroupInputs; ++k) peak = std::fabs(in[k]) > std::fabs(peak) ? in[k] : peak;
  uint16_t best = 0;
  float least = 0.0f;  // error over that of zeros
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

// One row of groups into its tile (kernels.h).
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

// Where a row's first input lies among the 64 values of a tile's first pair (kernels.h).
int first_in_tile(int row, DType dtype) {
  const int group = row / 16, in_group = row % 16;
  if (dtype == DType::int8) return 4 * in_group + 2 * group;
  return 32 * group + (dtype == DType::bf16 ? 2 * in_group : in_group);
}

int odd_after_even(DType dtype) { return dtype == DType::bf16 || dtype == DType::int8 ? 1 : 16; }

// One row of blocks into its tile, group by group.
bool pack_blocks(const PackJob& job, const char* in, int row, DType to, char* tile) {
  bool finite = true;
  for (int k = 0; k < job.inputs; k += kGroupInputs, tile += group_bytes(to)) {
    BlockGroup group;
    read_group(*job.blocks, in, (job.first_input + k) / kGroupInputs, group);
    finite &= is_finite(group, to);
    place_group(group, to, row, tile);
  }
  return finite;
}

// The job's inputs of one row, widened.
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

// One row into its tile; false when a value is not finite there.
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

// By the spec where it says so; int4's first and last layer and its head are int8 (docs/decisions/small-weights.md).
DType matrix_dtype(const ModelSpec& spec, DType dtype, int layer, Part part) {
  if (!spec.held.empty()) return spec.held[layer][part];
  const bool outer = layer == 0 || layer >= spec.layers - 1;
  return dtype == DType::int4 && outer ? DType::int8 : dtype;
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

int ModelSpec::first_draft(int lane) const {
  if (head != Head::vocab_parallel) return lane ? static_cast<int>(draft_ids.size()) : 0;
  const auto found = std::lower_bound(draft_ids.begin(), draft_ids.end(), lane * head_rows());
  return static_cast<int>(found - draft_ids.begin());
}

float quantise_row(const std::vector<float>& row, int8_t* out) {
  const float scale = row_scale(row);
  if (std::isfinite(scale)) std::transform(row.begin(), row.end(), out, [=](float x) { return quantised(x, scale); });
  return scale;
}

bool pack_rows(const PackJob& job, const Matrix& matrix, char* tape) {
  const int half = job.interleave_half;
  std::vector<float> in(job.inputs);
  bool finite = true;
  for (int r = 0; r < job.rows; ++r) {
    const int whole = half < 0 ? job.first_row + r : r / 16 * kTileRows + 16 * half + r % 16;
    const int row = whole - matrix.first_row;
    if (row < 0 || row >= matrix.rows) continue;
    char* tile = tape + matrix.offset + row / kTileRows * tile_bytes(matrix.k_pairs(), matrix.dtype);
    if (job.blocks && job.blocks->held == matrix.dtype) {
      finite &= pack_blocks(job, job.row(r), row % kTileRows, matrix.dtype, tile);
      continue;
    }
    read_row(job, r, in);
    finite &= pack_row(in, row % kTileRows, matrix.k_pairs(), matrix.dtype, tile);
  }
  return finite;
}

static void unpack_groups(const Matrix& matrix, int row, const char* tile, float* out) {
  for (int k = 0; k < matrix.inputs; k += kGroupInputs, tile += group_bytes(matrix.dtype)) {
    BlockGroup group;
    take_group(tile, matrix.dtype, row, group);
    widen(group, matrix.dtype, out + k);
  }
}

void unpack_row(const Matrix& matrix, int row, const char* tape, float* out) {
  const int pairs = matrix.k_pairs(), in_tile = row % kTileRows;
  const char* tile = tape + matrix.offset + row / kTileRows * tile_bytes(pairs, matrix.dtype);
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
  for (size_t i = 0; i < count; ++i) {
    const float value = widened(source, from, i);
    if (to == DType::fp32)
      static_cast<float*>(out)[i] = value, finite &= std::isfinite(value);
    else
      finite &= is_finite(static_cast<uint16_t*>(out)[i] = narrowed(value, to), to);
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
        static_cast<uint16_t*>(out)[i + j] = narrowed(value, dtype);
    }
  }
}

namespace {

// Lays out one thread's tape, matrix after matrix in reading order.
class TapePlanner {
 public:
  TapePlanner(const ModelSpec& spec, DType dtype, int thread, int threads)
      : spec_(spec), dtype_(dtype), thread_(thread), threads_(threads) {
    share_lanes(spec.lanes, threads, thread, plan_);
  }

  ThreadPlan plan() {
    plan_.layers.assign(spec_.all_layers(), std::vector<LaneLayer>(plan_.last_lane - plan_.first_lane));
    for (; layer_ < spec_.layers; ++layer_) add_layer();
    add_head(plan_.head, [&](int) { return spec_.head_rows(); });
    plan_.model_bytes = plan_.tape_bytes;
    if (spec_.draft_layers) add_layer();
    plan_.draft_head = plan_.head;
    if (!spec_.draft_ids.empty()) add_head(plan_.draft_head, [&](int lane) { return spec_.draft_rows(lane); });
    return std::move(plan_);
  }

 private:
  DType type(Part part) const { return matrix_dtype(spec_, dtype_, layer_, part); }

  // One of `parts` parts of a matrix, whose rows begin at `base`.
  void add(Matrix& matrix, Part kind, int rows, int inputs, int part, int parts, int base) {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    const int first = tiles * part / parts * kTileRows, end = tiles * (part + 1) / parts * kTileRows;
    matrix = {std::min(end, rows) - std::min(first, rows), inputs, type(kind), plan_.tape_bytes, base + first};
    plan_.tape_bytes += matrix.bytes();
  }

  void add_own(Matrix& matrix, Part kind, int rows, int inputs, int base = 0) {
    add(matrix, kind, rows, inputs, thread_ - plan_.leader, plan_.members, base);
  }

  void add_layer() {
    for (LaneLayer& lane : plan_.layers[layer_]) {
      add_qkv(lane.qkv);
      add_own(lane.wo, kWo, spec_.hidden, spec_.q_rows());
    }
    for (LaneLayer& lane : plan_.layers[layer_]) {
      add_own(lane.gate_up, kW1, spec_.gate_up_rows(), spec_.hidden);
      add_own(lane.w2, kW2, spec_.hidden, spec_.ff_rows());
    }
  }

  void add_qkv(std::vector<Matrix>& qkv) {
    constexpr Part kinds[] = {kWq, kWk, kWv};
    const int sizes[] = {spec_.q_rows(), spec_.kv_rows(), spec_.kv_rows()};
    for (int first = 0, end, base = 0; first < 3; first = end) {
      int rows = 0;
      for (end = first; end < 3 && type(kinds[end]) == type(kinds[first]); ++end) rows += sizes[end];
      add_own(qkv.emplace_back(), kinds[first], rows, spec_.hidden, base);
      base += rows;
    }
  }

  template <class Rows>
  void add_head(std::vector<Matrix>& heads, const Rows& rows_of_lane) {
    const bool whole = spec_.head == Head::replicate;
    heads.resize(whole ? 1 : plan_.last_lane - plan_.first_lane);
    for (int lane = plan_.first_lane; Matrix& head : heads)
      if (whole)
        add(head, kHead, rows_of_lane(0), spec_.hidden, thread_, threads_, 0);
      else
        add_own(head, kHead, rows_of_lane(lane++), spec_.head_inputs());
  }

  const ModelSpec& spec_;
  const DType dtype_;
  const int thread_, threads_;
  int layer_ = 0;
  ThreadPlan plan_;
};

}  // namespace

std::vector<ThreadPlan> plan_tapes(const ModelSpec& spec, int threads, DType dtype) {
  std::vector<ThreadPlan> plans;
  for (int t = 0; t < threads; ++t) plans.push_back(TapePlanner(spec, dtype, t, threads).plan());
  return plans;
}

}  // namespace laneformer
