// KV caches: their memory, the ids whose keys and values they hold, and where a new sequence may start in one of them.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"
#include "system.h"

namespace laneformer {

class KvPool {
 public:
  struct Start {
    int cache, position;  // the first position to run: keys and values of those before it are there
  };

  // heads[t]: KV heads of a layer whose keys and values lie with thread t.
  KvPool(const ModelSpec& spec, std::vector<int> heads);

  // A cache for a sequence, until its end; it starts from at most `most_reusable` positions that are still there.
  Start begin(const std::vector<int>& ids, int most_reusable);
  // The first `position` ids have run; keys and values of positions below `written` may be other than before.
  void ran(int cache, const std::vector<int>& ids, int position, int written);
  void end(int cache) {
    if (cache >= 0) contents_[cache].in_use = false;
  }
  void forget(int cache);  // nobody may start from its keys and values

  // Of one of thread t's KV heads: keys [position / 16][d][position % 16], values [position][d]; d is padded.
  char* keys(int t, int cache, int layer, int head) const {
    return memory_[t][cache].keys.bytes() + at(t, layer, head);
  }
  char* values(int t, int cache, int layer, int head) const {
    return memory_[t][cache].values.bytes() + at(t, layer, head);
  }

 private:
  // The ids whose keys and values a cache holds, positions 0 .. ids.size() - 1.
  struct Contents {
    std::vector<int> ids;
    int written = 0;         // positions ever written since position 0: a sliding-window ring holds the last ones
    uint64_t last_used = 0;  // number of the sequence
    bool in_use = false;
  };
  struct Memory {
    Pages keys, values;
  };

  int reusable(const Contents& contents, const std::vector<int>& ids, int most) const;
  int take(const std::vector<int>& ids, int most);
  void add();
  size_t at(int t, int layer, int head) const {
    return layer_at_[t][layer] + size_t(head) * spec_.cache_slots(layer) * position_bytes_;
  }

  const ModelSpec& spec_;
  const size_t position_bytes_;                 // of a head's keys, or values
  std::vector<std::vector<size_t>> layer_at_;   // [thread][layer], in bytes; at the end the size
  std::vector<std::vector<Memory>> memory_;     // [thread][cache]
  std::vector<Contents> contents_;              // of each cache
  uint64_t sequences_ = 0;
};

}  // namespace laneformer
