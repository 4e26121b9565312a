// The model in plain loops (scalar.cpp), for readers and for tests.
#pragma once
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model.h"

namespace laneformer {

// fp32 tensors by their names in a checkpoint, and RoPE's tables "cosine" and "sine", (context, d / 2) each.
using PlainTensors = std::map<std::string, std::span<const float>>;

// Returns logits after every position, (ids, vocab), for models without biases, norms of heads and `lane` heads. The caller
// checks the ids and their number; std::invalid_argument where a tensor is missing or has another size.
std::vector<float> scalar_logits(const ModelSpec& spec, const PlainTensors& tensors, const std::vector<int>& ids);

}  // namespace laneformer
