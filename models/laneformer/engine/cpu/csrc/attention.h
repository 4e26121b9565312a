// Attention of one lane: rotary embedding, the KV cache, and every query head against it.
#pragma once
#include <vector>

#include "kv_memory.h"
#include "shared.h"

namespace laneformer {

class Attention {
 public:
  Attention(Shared& shared, const KvMemory& kv);

  // What one of a lane's threads works on.
  struct Lane {
    int t, layer, own;  // own: the lane's number on the thread
    const Pass& pass;
    float* qkv;    // [column][qkv_stride]: queries, keys, values, which the lane's threads have written together
    float* mixed;  // [column][mixed_stride]: the inputs of wo
  };
  static int qkv_stride(const ModelSpec& spec) { return static_cast<int>(round_up(spec.qkv_rows(), 32)); }
  static int mixed_stride(const ModelSpec& spec) { return static_cast<int>(round_up(spec.q_rows(), 32)); }

  void run(const Lane& lane);

 private:
  struct Block {  // what one call of the kernel computes: a KV head's query heads for some columns of a sequence
    int head, column, count;
  };
  struct Scratch {  // [query of a block][...]
    Pages query, scores, mixed, states, totals;
    Pages normed;    // all heads' queries or keys, where they have one norm
    Pages widened;   // a chunk's keys and values in fp32
    Pages partials;  // [chunk of a column and KV head][query][...]; the leader's, which a lane's threads share
  };
  void reserve(int t);
  bool caches(const Lane& lane, int column) const;
  void norm_heads(const Lane& lane);
  void norm_jointly(const Lane& lane);
  void cache_positions(const Lane& lane);
  void cache_position(const Lane& lane, const float* key, Column at);
  bool narrow(const float* x, char* out, float* scale) const;
  AttendArgs queries_of(const Lane& lane, const Block& block) const;
  void attend_from_nothing(const AttendArgs& a) const;
  void finish(const Lane& lane, const Block& block, const float* states) const;
  void attend(const Lane& lane);
  void attend_chunks(const Lane& lane);

  Shared& shared_;
  const ModelSpec& spec_;
  const KvMemory& kv_;
  const int heads_per_kv_, kv_heads_;  // query heads that share a KV head; KV heads of a lane
  std::vector<Scratch> scratch_;  // by thread
};

}  // namespace laneformer
