// The model as the engine sees it: sizes, the join of every module, and where each matrix lies on a thread's tape.
//
// A lane is one of L equal parts of the model (tensor parallelism): it owns its rows of every layer's q, k, v, w1 and w3
// and its inputs of wo and w2, its heads' KV cache, and a residual stream of its own. Each module (attention or MLP)
// gives a partial output per lane, and joins it to the streams: PRESENT adds the sum over lanes, which waits for all;
// NO_REDUCE adds sqrt(L) times the own partial; PAST adds the own partial now and the others' `delay` layers later.
//
//   L lanes   D hidden   V vocabulary   N layers   d head dimension
//   per lane: q query rows, kv key (and value) rows, f intermediate rows
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "blocks.h"
#include "kernels.h"

namespace laneformer {

enum class Join : int { present = 0, no_reduce = 1, past = 2 };
enum class Head : int { vocab_parallel = 0, replicate = 1, lane = 2 };
enum Module : int { kAttention = 0, kMlp = 1 };
// The parts of a layer that have a type of weights each; the LM head counts as in one more layer. A router is fp32.
enum Part : int { kWq, kWk, kWv, kWo, kW1, kW2, kW3, kHead, kMatrices, kRouter = kMatrices };

struct ModelSpec {
  int hidden, intermediate, layers, query_heads, kv_heads, head_size, lanes, vocab, context, delay;
  float norm_eps;
  Head head;
  bool sum_before_norm, shared_scale;
  bool qkv_bias, head_norms, tied;      // weights.h
  std::vector<int> rope;                // per layer, the number of its table (weights.h); -1 where it has no RoPE
  int ropes = 1;                        // how many tables there are
  DType kv_dtype = DType::fp32;         // the type of cached keys and values
  std::vector<int> window;              // per layer; 0 means all positions
  std::vector<Join> join[2];            // per module and layer
  std::vector<std::array<DType, kMatrices>> held;  // per layer, then the LM head's; empty: all have the model's type
  std::vector<uint8_t> adds_delayed[2];  // whether a PAST join adds the other lanes' partials of `delay` layers ago
  // A head for multi-token prediction (MTP) has a block of its own (0 or 1), which is the layer after the last one in all
  // that is per layer, and scores only these ids, ascending; none: the whole vocabulary.
  int draft_layers = 0;
  std::vector<int> draft_ids;
  // Per module and layer, whether the other lanes' partials join after the last layer: flush, or at the MTP head's input.
  std::vector<uint8_t> delivers[2];
  bool flush = false;

  // What other families have (variant.py): norms of a module's input, and of its output, which is the sum over lanes; one
  // norm of all heads' queries and one of their keys in place of head norms; the factor of scores, 0 for 1 / sqrt(d).
  bool pre_norms = true, post_norms = false, joint_head_norms = false;
  Gate gate = Gate::silu;
  float attention_scale = 0.0f, embedding_scale = 1.0f;
  // A mixture of experts in place of every MLP, each of `intermediate` rows; 0: there is none. A column takes
  // `active` of them. normed: their weights, a softmax of all scores, are divided by their sum.
  int experts = 0, active = 0;
  bool normed_weights = false;
  // sinks: each query head has a score that joins its softmax and takes no value. Biases (biases.h) of attention's output,
  // and of the router and all matrices of the experts.
  bool sinks = false, output_bias = false, expert_bias = false;

  int all_layers() const { return layers + draft_layers; }
  int head_dim() const { return head_size; }
  int padded_head_dim() const { return static_cast<int>(round_up(head_dim(), 16)); }
  int q_rows() const { return query_heads / lanes * head_dim(); }
  int kv_rows() const { return kv_heads / lanes * head_dim(); }
  int qkv_rows() const { return q_rows() + 2 * kv_rows(); }
  int head_rows() const { return head == Head::vocab_parallel ? vocab / lanes : vocab; }  // rows of one LM head matrix
  int head_inputs() const { return head == Head::lane ? hidden / lanes : hidden; }
  // Returns the index of the first draft id in a lane's part of the vocabulary; a replicated head has one part.
  int first_draft(int lane) const;
  int draft_rows(int lane) const { return first_draft(lane + 1) - first_draft(lane); }
  // Numbers of norms: 2 * layer + module for a module's input, then these.
  int final_norm() const { return 2 * all_layers(); }
  int hidden_norm() const { return final_norm() + 1; }
  int embedding_norm() const { return final_norm() + 2; }
  int draft_norm() const { return final_norm() + 3; }
  int first_post_norm() const { return final_norm() + 1 + 3 * draft_layers; }  // + 2 * layer + module for an output
  int norms() const { return first_post_norm() + (post_norms ? 2 * all_layers() : 0); }
  int head_norm_size(bool of_keys) const {
    return !joint_head_norms ? head_dim() : of_keys ? kv_rows() : q_rows();
  }
  float score_scale() const;
  int mlps() const { return experts ? experts : 1; }
  int ff_rows() const { return intermediate / lanes; }
  int gate_up_rows() const { return 2 * static_cast<int>(round_up(ff_rows(), 16)); }
  int padded_hidden() const { return static_cast<int>(round_up(hidden, kTileRows)); }
  int cache_slots() const { return static_cast<int>(round_up(context, 64)); }  // kernels/attention.h
};

inline int groups_before(int first_input) { return first_input / kGroupInputs % kSuperGroups; }

// One packed matrix, or the rows of it from `first_row` on that one thread of a lane owns, at `offset` bytes of its tape.
struct Matrix {
  int rows = 0, inputs = 0;
  DType dtype = DType::fp32;
  size_t offset = 0;
  int first_row = 0;
  int groups_before = 0;  // groups of the first superblock that hold another lane's inputs
  int k_pairs() const { return (inputs + 1) / 2; }
  int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  size_t tile_bytes() const { return laneformer::tile_bytes(k_pairs(), dtype, groups_before); }
  size_t bytes() const { return tiles() * tile_bytes(); }
  Matrix tiles_from(int tile, int count) const {
    const int skipped = tile * kTileRows, most = count * kTileRows, left = rows - skipped;
    const size_t at = offset + tile * tile_bytes();
    return {left < most ? left : most, inputs, dtype, at, first_row + skipped, groups_before};
  }
};

struct Mlp {
  Matrix gate_up, w2;
};

struct LaneLayer {
  std::vector<Matrix> qkv;  // one, or where types differ one of each run of the same type
  Matrix wo, router;
  std::vector<Mlp> mlps;  // one, or one of each expert
  std::vector<Matrix> matrices(int of_mlps) const;  // all but the router, with those of the first `of_mlps` MLPs
};

// The lanes [first, last) of one thread, its share of a replicated LM head, and its tape in reading order: layer by layer,
// attention of every own lane (qkv, wo), then the MLP of every own lane (w1 with w3, w2; with experts the router, then one
// expert after the other); the LM head; then the MTP head's block, and the LM head's rows of the ids that it scores. Where
// lanes cannot be shared out evenly, or threads outnumber them, `members` consecutive threads from `leader` on share their
// lanes: each owns some tiles of every matrix.
struct ThreadPlan {
  int first_lane = 0, last_lane = 0;
  int leader = 0, members = 1;
  std::vector<std::vector<LaneLayer>> layers;  // [layer][own lane]
  std::vector<Matrix> head;                    // one per own lane; for `replicate` one row range
  std::vector<Matrix> draft_head;              // the same; without draft ids the head itself
  // Bytes of the whole tape; without the MTP head; without the experts that a token does not take, too.
  size_t tape_bytes = 0, model_bytes = 0, read_bytes = 0;
};

std::vector<ThreadPlan> plan_tapes(const ModelSpec& spec, int threads, DType dtype);
double largest_share(int lanes, int threads);  // the lanes of the thread that has most to do

// A source tensor's rows (row-major, `inputs` wide) -> packed rows of one matrix. Row r goes to first_row +
// r; with `interleave_half` 0 or 1 to that half of each tile (w1 and w3 share tiles: 16 gates, 16 ups). Rows
// that the matrix does not own are left to their owner. Returns false when a value is not finite in its type.
// With `blocks` the source's rows are blocks of `row_bytes`, of which inputs from `first_input` on are taken:
// as they are where the matrix holds them, else rounded to its type.
struct PackJob {
  const void* source;
  DType from;
  int rows, inputs;
  int first_row = 0, interleave_half = -1;
  const BlockFormat* blocks = nullptr;
  size_t row_bytes = 0;
  int first_input = 0;
  const char* row(int r) const { return static_cast<const char*>(source) + size_t(r) * row_bytes; }
};
bool pack_rows(const PackJob& job, const Matrix& matrix, char* tape);
float quantise_row(const std::vector<float>& row, int8_t* out);  // to int8; returns the scale, not finite where a value is not
void unpack_row(const Matrix& matrix, int row, const char* tape, float* out);  // row: counted from first_row
// Convert plain values; return false when one is not finite in the new type.
bool convert(const void* source, DType from, size_t count, void* out, DType to);
bool convert_blocks(const void* source, const BlockFormat& blocks, size_t count, void* out, DType to);
inline uint64_t mix_bits(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
void fill_random(void* out, DType dtype, size_t count, uint64_t key, float deviation);

}  // namespace laneformer
