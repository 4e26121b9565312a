// What is added to products or enters a softmax beside them, in fp32: biases of a layer's matrices and
// router, and the scores of attention sinks. Rows lie as the products' outputs do, padded with zeros.
//
// Outputs of attention and of experts' down projections are sums over lanes: their bias joins the first lane's.
#pragma once
#include <string>

#include "model.h"
#include "system.h"

namespace laneformer {

class Biases {
 public:
  explicit Biases(const ModelSpec& spec);

  // Returns how many biases a layer has of wq, wk, wv, wo, sinks, router, or of all experts' w1, w2 or w3; none: 0.
  size_t values(const std::string& part) const;
  // Sets all of them; returns false when one is not finite.
  bool set(const std::string& part, int layer, const void* data, DType from);

  const float* qkv(int layer, int lane) const {
    return at(qkv_, qkv_rows(), size_t(layer) * spec_.lanes + lane);
  }
  const float* output(int layer) const { return at(output_, spec_.padded_hidden(), layer); }
  const float* sinks(int layer, int lane) const {  // [query head of the lane]
    return at(sinks_, spec_.query_heads, layer) + lane * (spec_.query_heads / spec_.lanes);
  }
  const float* router(int layer) const { return at(router_, round_up(spec_.experts, 32), layer); }
  const float* gate_up(int layer, int expert, int lane) const {
    return at(gate_up_, spec_.gate_up_rows(), (size_t(layer) * spec_.experts + expert) * spec_.lanes + lane);
  }
  const float* down(int layer, int expert) const {
    return at(down_, spec_.padded_hidden(), size_t(layer) * spec_.experts + expert);
  }

 private:
  static float* at(const Pages& pages, size_t each, size_t index) { return pages.floats() + index * each; }
  size_t qkv_rows() const { return round_up(spec_.qkv_rows(), 32); }

  const ModelSpec& spec_;
  Pages qkv_, output_, sinks_, router_, gate_up_, down_;
};

}  // namespace laneformer
