// What the layers of other families' models have beyond a Laneformer's: biases of queries, keys and values, norms of
// every head's queries and keys; and embeddings that are tied to the head, read from its packed rows.
#include <cstring>

#include "decoder.h"

namespace laneformer {

float* Decoder::bias(int layer, int lane) const {
  return biases_.floats() + (size_t(layer) * spec_.lanes + lane) * round_up(spec_.qkv_rows(), 32);
}

float* Decoder::head_norm(int layer, bool of_keys) const {
  return head_norms_.floats() + (size_t(layer) * 2 + of_keys) * spec_.padded_head_dim();
}

bool Decoder::set_bias(const std::string& part, int layer, const void* data, DType from) {
  const int rows = part == "wq" ? spec_.q_rows() : spec_.kv_rows();
  const int first = part == "wq" ? 0 : spec_.q_rows() + (part == "wv" ? spec_.kv_rows() : 0);
  bool finite = true;
  for (int lane = 0; lane < spec_.lanes; ++lane) {
    const char* own = static_cast<const char*>(data) + size_t(lane) * rows * bytes_of(from);
    finite &= convert(own, from, rows, bias(layer, lane) + first, DType::fp32);
  }
  return finite;
}

bool Decoder::set_head_norm(const std::string& part, int layer, const void* data, DType from) {
  return convert(data, from, spec_.head_dim(), head_norm(layer, part == "k_norm"), DType::fp32);
}

// To this thread's rows of y; the matrix's rows end in a tile of its own, so padding is nobody else's.
void Decoder::add_bias(const Matrix& qkv, int layer, int lane, float* y, int y_stride, int columns) const {
  const int rows = static_cast<int>(round_up(qkv.rows, 16));
  for (int c = 0; c < columns; ++c)
    kernels_->add(y + size_t(c) * y_stride + qkv.first_row, bias(layer, lane) + qkv.first_row, rows);
}

// In place, before RoPE: queries are shared out over the group, keys are the leader's, who writes the cache next.
void Decoder::norm_heads(int t, int layer, float* y, int y_stride, int columns) {
  Worker& w = workers_[t];
  const int d = spec_.head_dim(), queries = spec_.query_heads / spec_.lanes, keys = spec_.kv_heads / spec_.lanes;
  const int member = t - plans_[t].leader, members = plans_[t].members;
  const auto norm = [&](float* head, bool of_keys) {  // kernels want padding
    std::memcpy(w.query.floats(), head, d * sizeof(float));
    kernels_->rms_norm(w.query.floats(), head_norm(layer, of_keys), spec_.norm_eps, d, spec_.padded_head_dim(),
                       w.mixed.floats());
    std::memcpy(head, w.mixed.floats(), d * sizeof(float));
  };
  for (int c = 0; c < columns; ++c, y += y_stride) {
    for (int head = queries * member / members; head < queries * (member + 1) / members; ++head)
      norm(y + head * d, false);
    for (int head = 0; member == 0 && head < keys; ++head) norm(y + (queries + head) * d, true);
  }
}

// A token's row (hidden,): of the embedding, or of the head on whichever thread's tape it lies.
void Decoder::embed(int token, float* out) const {
  if (!spec_.tied) {
    const size_t row = size_t(token) * spec_.hidden * bytes_of(embedding_dtype_);
    convert(embedding_.bytes() + row, embedding_dtype_, spec_.hidden, out, DType::fp32);
    return;
  }
  for (int t = 0; t < threads(); ++t)
    for (size_t i = 0; i < plans_[t].head.size(); ++i) {
      const Matrix& head = plans_[t].head[i];
      const int lane = spec_.head == Head::vocab_parallel ? plans_[t].first_lane + static_cast<int>(i) : 0;
      const int row = token - lane * spec_.head_rows() - head.first_row;
      if (row >= 0 && row < head.rows) return unpack_row(head, row, workers_[t].tape.bytes(), out);
    }
}

}  // namespace laneformer
