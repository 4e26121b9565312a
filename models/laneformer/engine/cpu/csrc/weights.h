// A model's weights as a pass reads them: matrices packed on a tape for each thread, and what all threads read.
//
// Other families' models have more than a Laneformer: biases (biases.h), norms of queries and keys, and embeddings that are
// tied to the LM head, read from its packed rows.
#pragma once
#include <string>
#include <vector>

#include "biases.h"
#include "model.h"
#include "system.h"
#include "team.h"

namespace laneformer {

class Model {
 public:
  // The team's threads share the lanes, and pack.
  Model(const ModelSpec& spec, DType dtype, DType embedding_dtype, Team& team);

  // Load weights: `data` is row-major in `from`, expert after expert in w1 to w3. False when a value is not finite. Python
  // checks the names.
  bool set_matrix(const std::string& part, int layer, const void* data, DType from);
  // Loads a whole matrix (out, in) of a GGUF file, whose rows are blocks.
  bool set_blocks(const std::string& part, int layer, const void* data, const BlockFormat& blocks);
  bool set_embedding(const void* data, DType from, const BlockFormat* blocks = nullptr);  // rows of blocks
  bool set_norm(int index, const void* data, DType from);  // as ModelSpec counts them
  void set_rope(const float* cosine, const float* sine);    // (tables, context, d / 2) each
  void set_query_scales(const float* scales);               // (context,): a query's factor by its position
  bool set_head_norm(const std::string& part, int layer, const void* data, DType from);  // q_norm or k_norm
  bool loaded() const { return !cosine_.empty(); }

  // What a cache of packed weights holds: every thread's tape, then the embedding if it is not the head.
  // `map_part` replaces one by memory that stays valid, and is not written, as long as the model lives.
  int parts() const { return threads() + (spec_.tied ? 0 : 1); }
  size_t part_bytes(int index) const { return index < threads() ? plans_[index].tape_bytes : embedding_bytes(); }
  char* part(int index) { return pages(index).bytes(); }
  void map_part(int index, const void* data) { pages(index) = Pages::borrowed(data), mapped_ = true; }
  void copy_parts();  // out of what was mapped, each tape by its thread: into huge pages of its memory node

  const ModelSpec& spec() const { return spec_; }
  std::vector<DType> dtypes() const;  // the types of the matrices, each once
  int threads() const { return static_cast<int>(plans_.size()); }
  const ThreadPlan& plan(int t) const { return plans_[t]; }
  size_t bytes() const;  // what all threads read for a decoded token, which takes only some experts
  struct DraftBytes {
    size_t block, rows;  // what a draft reads of the MTP head
  };
  DraftBytes draft_bytes() const;

  const char* tiles(int t, const Matrix& matrix) const { return tapes_[t].bytes() + matrix.offset; }
  void embed(int token, float* out) const;  // its row (hidden,), scaled
  const float* norm_scale(int index, int lane) const {
    return norms_.floats() + (size_t(index) * scales() + (scales() > 1 ? lane : 0)) * spec_.padded_hidden();
  }
  Biases& biases() { return biases_; }
  const Biases& biases() const { return biases_; }
  // Returns the scale of a layer's head norm, (head_norm_size,) padded.
  float* head_norm(int layer, bool of_keys) const {
    return head_norms_.floats() + (size_t(layer) * 2 + of_keys) * round_up(spec_.head_norm_size(false), 16);
  }
  void rotate(const float* from, float* to, int layer, int position) const;  // a head's (d,), where the layer has RoPE
  float query_scale(int position) const { return query_scales_.empty() ? 1.0f : query_scales_[position]; }

 private:
  int scales() const { return spec_.shared_scale ? 1 : spec_.lanes; }  // how many scales a norm has
  size_t embedding_bytes() const {
    return spec_.tied ? 0 : size_t(spec_.vocab) * spec_.hidden * bytes_of(embedding_dtype_);
  }
  void read_embedding(int token, float* out) const;
  bool pack(const std::string& part, int layer, const PackJob& whole);
  bool pack_head(int t, const PackJob& whole);
  bool pack_draft_rows(int t, const PackJob& whole);
  Pages& pages(int index) { return index < threads() ? tapes_[index] : embedding_; }
  void expect_writable() const;

  const ModelSpec spec_;
  const DType dtype_, embedding_dtype_;  // the embedding is never int8
  const std::vector<ThreadPlan> plans_;
  Team& team_;
  std::vector<Pages> tapes_;
  Pages embedding_, norms_;
  Biases biases_;
  Pages head_norms_;  // (layers, query or key, size of a query's), padded
  std::vector<float> cosine_, sine_, query_scales_;
  bool mapped_ = false;  // tapes or embedding are read-only
};

}  // namespace laneformer
