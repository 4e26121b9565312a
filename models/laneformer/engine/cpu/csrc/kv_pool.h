// KV caches: their memory, the ids whose keys and values they hold, and where a new sequence may start in one of them.
//
// Every layer has room for all positions, and memory only for those that were written. A layer with a sliding window
// needs no more than the window before the next position; what lies before is kept as long as the limit allows, so that
// a sequence may part from the cached one anywhere. Beyond the limit it is dropped, but for the windows before
// positions where a sequence is likely to start again; then whole caches, the least recently used one first.
//
// The first thread calls everything but `copy`, between two passes.
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

  // What a sequence uses is never given up, so many of them may hold more.
  void set_limit(size_t bytes) { limit_ = bytes; }
  size_t bytes() const;  // of pages that hold keys and values

  // Whether a running sequence is still reading ids that this one shares: then it should begin later, and copy.
  bool awaits(const std::vector<int>& ids, int max_reusable) const;
  // A cache for a sequence, until its end; it starts from at most `max_reusable` positions that are still there.
  // Throws std::invalid_argument where the system gives no memory.
  Start begin(const std::vector<int>& ids, int max_reusable);
  // The first `position` ids have run; keys and values of positions below `written` may be other than before.
  void ran(int cache, const std::vector<int>& ids, int position, int written);
  void end(int cache);
  void forget(int cache);  // nobody may start from its keys and values

  // By every thread, before the layers: what the sequences that have begun take from other caches.
  void copy(int t) const;
  void copied() { copies_.clear(); }

  // Of one of thread t's KV heads: keys [position / 16][d][position % 16], values [position][d]; d is padded.
  char* keys(int t, int cache, int layer, int head) const {
    return caches_[cache].memory[t].bytes() + at(layer, head, t);
  }
  char* values(int t, int cache, int layer, int head) const { return keys(t, cache, layer, head) + bytes_[t] / 2; }

 private:
  struct Cache {
    std::vector<Pages> memory;     // [thread]: keys, values; none: free
    std::vector<int> ids;          // keys and values of these are there
    std::vector<int> prompt;       // of the sequence that uses it
    std::vector<int> starts;       // ascending: positions where a sequence is likely to start, some still to come
    std::vector<uint8_t> dropped;  // [page of positions]: layers with windows have lost it
    int pages_dropped = 0;
    int written = 0;               // positions whose pages may be there
    int turn = 0;                  // where its last sequence began
    uint64_t last_used = 0;        // number of the sequence
    bool in_use = false;
  };
  struct Copy {
    int from, to, positions;
  };
  struct Found {
    int cache = -1, position = 0;  // where to start
    int lost = 0;                  // ids of the cache that the new sequence does not share
    int shared = 0;                // the longest prefix of any cache
  };

  Found find(const std::vector<int>& ids, int most) const;
  int start_in(const Cache& cache, int shared) const;
  int add(int source);
  void add_start(Cache& cache, int position);
  void truncate(Cache& cache, int position);
  bool make_room(size_t bytes, int source);
  bool give_up_one(int source);
  bool give_up_cache(int source);
  bool thin(int cache, bool keep_starts);
  std::vector<int> by_age(int source) const;  // without the needed ones
  bool needed(int cache, int source) const;
  size_t unyielding(int source) const;
  void drop(Cache& cache, size_t page, bool dropped);
  void release(Cache& cache, int from, int to, bool windows_only);
  size_t bytes_of(int positions, int pages_dropped = 0) const;
  bool windowed(int layer) const { return spec_.window[layer] && spec_.window[layer] < spec_.context; }
  int page_of(int position) const { return position / page_; }
  size_t at(int layer, int head, int t) const { return (size_t(layer) * heads_[t] + head) * head_bytes_; }

  const ModelSpec& spec_;
  const std::vector<int> heads_;
  const size_t position_bytes_;  // of a head's keys, or values
  const size_t head_bytes_;      // whole pages for all positions
  const int page_;               // positions that are kept or dropped together: at least a page of a head's keys
  const int all_heads_;
  int window_ = 0, windows_ = 0;  // the longest window that is not the whole context, layers with one
  std::vector<size_t> bytes_;                     // of a cache, by thread
  std::vector<Cache> caches_;
  std::vector<Copy> copies_;
  size_t limit_ = SIZE_MAX;
  uint64_t sequences_ = 0;
};

}  // namespace laneformer
