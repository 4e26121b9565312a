#include "biases.h"

namespace laneformer {

Biases::Biases(const ModelSpec& spec) : spec_(spec) {
  const size_t layers = spec.all_layers(), hidden = spec.padded_hidden();
  const auto floats = [](bool there, size_t count) { return Pages(there ? count * sizeof(float) : 0); };
  qkv_ = floats(spec.qkv_bias, layers * spec.lanes * qkv_rows());
  output_ = floats(spec.output_bias, layers * hidden);
  sinks_ = floats(spec.sinks, layers * spec.query_heads);
  router_ = floats(spec.expert_bias, layers * round_up(spec.experts, 32));
  gate_up_ = floats(spec.expert_bias, layers * spec.experts * spec.lanes * spec.gate_up_rows());
  down_ = floats(spec.expert_bias, layers * spec.experts * hidden);
}

size_t Biases::values(const std::string& part) const {
  const size_t lanes = spec_.lanes, experts = spec_.expert_bias ? spec_.experts : 0;
  if (part == "wq") return spec_.qkv_bias ? lanes * spec_.q_rows() : 0;
  if (part == "wk" || part == "wv") return spec_.qkv_bias ? lanes * spec_.kv_rows() : 0;
  if (part == "wo") return spec_.output_bias ? spec_.hidden : 0;
  if (part == "sinks") return spec_.sinks ? spec_.query_heads : 0;
  if (part == "w1" || part == "w3") return experts * spec_.intermediate;
  if (part == "w2") return experts * spec_.hidden;
  return part == "router" ? experts : 0;
}

bool Biases::set(const std::string& part, int layer, const void* data, DType from) {
  bool finite = true;
  const char* next = static_cast<const char*>(data);
  const auto take = [&](size_t count, const float* to) {
    finite &= convert(next, from, count, const_cast<float*>(to), DType::fp32);
    next += count * bytes_of(from);
  };
  if (part == "wo") take(spec_.hidden, output(layer));
  if (part == "sinks") take(spec_.query_heads, sinks(layer, 0));
  if (part == "router") take(spec_.experts, router(layer));
  for (int expert = 0; part == "w2" && expert < spec_.experts; ++expert)
    take(spec_.hidden, down(layer, expert));
  if (part == "wq" || part == "wk" || part == "wv") {
    const int first = part == "wq" ? 0 : spec_.q_rows() + (part == "wv" ? spec_.kv_rows() : 0);
    for (int lane = 0; lane < spec_.lanes; ++lane)
      take(part == "wq" ? spec_.q_rows() : spec_.kv_rows(), qkv(layer, lane) + first);
  }
  if (part == "w1" || part == "w3")  // tiles of 16 gates, 16 ups
    for (int i = 0; i < spec_.experts * spec_.lanes; ++i)
      for (int row = 0; row < spec_.ff_rows(); ++row) {
        const int place = row / 16 * 32 + (part == "w3") * 16 + row % 16;
        take(1, gate_up(layer, i / spec_.lanes, i % spec_.lanes) + place);
      }
  return finite;
}

}  // namespace laneformer
