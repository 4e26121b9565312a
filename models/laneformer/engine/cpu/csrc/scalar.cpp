// One sequence through all lanes in plain loops: no threads, no packed weights, no instruction set. Read it first. The
// engine computes the same (tests/laneformer/engine/test_scalar.py): layers.cpp, attention.cpp and head.cpp for a pass
// of many positions, model.h for where a thread's weights lie, exchange.h for what lanes give each other.
#include "scalar.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace laneformer {

namespace {

using Vector = std::vector<float>;
using Lanes = std::vector<Vector>;  // a vector for each lane

Vector times(const float* matrix, int rows, const Vector& x) {  // (rows, inputs) by (inputs,)
  Vector y(rows);
  for (int r = 0; r < rows; ++r)
    for (size_t i = 0; i < x.size(); ++i) y[r] += matrix[r * x.size() + i] * x[i];
  return y;
}

void add(Vector& to, const Vector& x, float factor = 1.0f) {
  for (size_t i = 0; i < x.size(); ++i) to[i] += factor * x[i];
}

class Scalar {
 public:
  Scalar(const ModelSpec& spec, const PlainTensors& tensors)
      : s(spec), tensors_(tensors), keys_(s.layers, std::vector<Lanes>(s.lanes)), values_(keys_) {}

  // Every lane has a residual stream of full width, and of every module a partial output of full width.
  Vector logits(int token, int position) {
    const float* row = tensor("tok_embeddings", size_t(s.vocab) * s.hidden) + size_t(token) * s.hidden;
    Lanes streams(s.lanes, Vector(row, row + s.hidden));
    std::vector<Lanes> outputs[2];  // [module][layer][lane]
    for (int layer = 0; layer < s.layers; ++layer)
      for (const Module module : {kAttention, kMlp}) {
        Lanes& partials = outputs[module].emplace_back();
        for (int lane = 0; lane < s.lanes; ++lane)
          partials.push_back(module == kAttention ? attention(layer, lane, position, streams[lane])
                                                  : mlp(layer, lane, streams[lane]));
        const bool late = s.adds_delayed[module][layer];
        join(streams, partials, s.join[module][layer], late ? &outputs[module][layer - s.delay] : nullptr);
      }
    if (s.flush) flush(streams, outputs);
    return head(streams);
  }

 private:
  const float* tensor(const std::string& name, size_t count) const {
    const auto found = tensors_.find(name + ".weight");
    if (found == tensors_.end() || found->second.size() != count)
      throw std::invalid_argument("no tensor " + name + ".weight of " + std::to_string(count) + " values");
    return found->second.data();
  }
  // Multiplies the lane's slice of a matrix, (rows, inputs), by x.
  Vector times_slice(const std::string& name, int lane, int rows, const Vector& x) const {
    const size_t each = rows * x.size();
    return times(tensor(name, s.lanes * each) + lane * each, rows, x);
  }
  static std::string of_layer(int layer, const char* name) { return "layers." + std::to_string(layer) + "." + name; }

  Vector rms_norm(const std::string& name, int lane, Vector x) const {
    const float* scale = tensor(name, x.size() * (s.shared_scale ? 1 : s.lanes)) + (s.shared_scale ? 0 : lane * x.size());
    float squares = 0.0f;
    for (const float value : x) squares += value * value;
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(x.size()) + s.norm_eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= factor * scale[i];
    return x;
  }

  Vector attention(int layer, int lane, int position, const Vector& stream) {
    const Vector x = rms_norm(of_layer(layer, "attention_norm"), lane, stream);
    Vector query = times_slice(of_layer(layer, "attention.wq"), lane, s.q_rows(), x);
    Vector key = times_slice(of_layer(layer, "attention.wk"), lane, s.kv_rows(), x);
    if (s.rope[layer] == 0) rotate(query, position), rotate(key, position);
    Lanes &keys = keys_[layer][lane], &values = values_[layer][lane];  // all positions so far
    keys.push_back(key);
    values.push_back(times_slice(of_layer(layer, "attention.wv"), lane, s.kv_rows(), x));
    const int d = s.head_dim(), heads_of_a_key = s.query_heads / s.kv_heads;
    const int first = s.window[layer] ? std::max(0, position - s.window[layer] + 1) : 0;
    Vector mixed(query.size());
    for (int head = 0; head < s.query_heads / s.lanes; ++head) {
      const int from = head * d, cached = head / heads_of_a_key * d;
      Vector weights;  // by position, from `first` on
      for (int p = first; p <= position; ++p) {
        float product = 0.0f;
        for (int j = 0; j < d; ++j) product += query[from + j] * keys[p][cached + j];
        weights.push_back(product / std::sqrt(static_cast<float>(d)));
      }
      const float top = *std::max_element(weights.begin(), weights.end());
      float total = 0.0f;
      for (float& weight : weights) total += weight = std::exp(weight - top);
      for (int p = first; p <= position; ++p)
        for (int j = 0; j < d; ++j) mixed[from + j] += weights[p - first] / total * values[p][cached + j];
    }
    return times_slice(of_layer(layer, "attention.wo"), lane, s.hidden, mixed);
  }

  // Rotates neighbouring pairs of every head of x.
  void rotate(Vector& x, int position) const {
    const size_t half = s.head_dim() / 2;
    const float* cosine = tensors_.at("cosine").subspan(position * half, half).data();
    const float* sine = tensors_.at("sine").subspan(position * half, half).data();
    for (size_t pair = 0; pair < x.size() / 2; ++pair) {
      const float even = x[2 * pair], odd = x[2 * pair + 1];
      x[2 * pair] = even * cosine[pair % half] - odd * sine[pair % half];
      x[2 * pair + 1] = even * sine[pair % half] + odd * cosine[pair % half];
    }
  }

  Vector mlp(int layer, int lane, const Vector& stream) const {
    const Vector x = rms_norm(of_layer(layer, "ffn_norm"), lane, stream);
    Vector gate = times_slice(of_layer(layer, "feed_forward.w1"), lane, s.ff_rows(), x);
    const Vector up = times_slice(of_layer(layer, "feed_forward.w3"), lane, s.ff_rows(), x);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0f + std::exp(-gate[i]));
    return times_slice(of_layer(layer, "feed_forward.w2"), lane, s.hidden, gate);
  }

  // Joins a module's partial outputs. PRESENT: every lane adds all of them. NO_REDUCE: its own, scaled. PAST: its own, and
  // the other lanes' of `delay` layers ago.
  void join(Lanes& streams, const Lanes& partials, Join how, const Lanes* delayed) const {
    for (int lane = 0; lane < s.lanes; ++lane)
      for (int from = 0; from < s.lanes; ++from) {
        const float factor = how == Join::no_reduce ? std::sqrt(static_cast<float>(s.lanes)) : 1.0f;
        if (from == lane || how == Join::present) add(streams[lane], partials[from], factor);
        if (from != lane && delayed) add(streams[lane], (*delayed)[from]);
      }
  }

  // Adds the other lanes' outputs of the last layers, which no layer was left for.
  void flush(Lanes& streams, const std::vector<Lanes>* outputs) const {
    for (int layer = 0; layer < s.layers; ++layer)
      for (const Module module : {kAttention, kMlp})
        for (int lane = 0; lane < s.lanes; ++lane)
          for (int from = 0; from < s.lanes; ++from)
            if (s.delivers[module][layer] && from != lane) add(streams[lane], outputs[module][layer][from]);
  }

  // Returns the logits: each lane's part of the vocabulary from its stream, or one LM head's from the lanes' mean.
  Vector head(const Lanes& streams) const {
    const std::string name = s.tied ? "tok_embeddings" : "lm_head";
    Vector logits, mean(s.hidden);
    for (int lane = 0; lane < s.lanes; ++lane) {
      const Vector x = rms_norm("norm", lane, streams[lane]);
      add(mean, x, 1.0f / static_cast<float>(s.lanes));
      if (s.head != Head::vocab_parallel) continue;
      const Vector part = times_slice(name, lane, s.head_rows(), x);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return s.head == Head::vocab_parallel ? logits : times(tensor(name, size_t(s.vocab) * s.hidden), s.vocab, mean);
  }

  const ModelSpec& s;
  const PlainTensors& tensors_;
  std::vector<std::vector<Lanes>> keys_, values_;  // [layer][lane][position]
};

}  // namespace

std::vector<float> scalar_logits(const ModelSpec& spec, const PlainTensors& tensors, const std::vector<int>& ids) {
  if (spec.qkv_bias || spec.head_norms || spec.head == Head::lane || spec.sum_before_norm)
    throw std::invalid_argument("the scalar pass has no biases, no norms of heads and no such head");
  if (!spec.pre_norms || spec.post_norms || spec.gate != Gate::silu || spec.ropes > 1 || spec.attention_scale > 0.0f ||
      spec.embedding_scale != 1.0f || spec.experts || spec.sinks || spec.output_bias)
    throw std::invalid_argument("the scalar pass has the norms, MLP, scales and RoPE of a Laneformer alone");
  Scalar model(spec, tensors);
  std::vector<float> all;
  for (size_t position = 0; position < ids.size(); ++position) {
    const Vector logits = model.logits(ids[position], static_cast<int>(position));
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

}  // namespace laneformer
