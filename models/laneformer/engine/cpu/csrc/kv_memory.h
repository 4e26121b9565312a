// The bytes of keys and values: every layer of a cache has room for all positions, and memory only for those
// that were written. Which caches there are, and what they hold, is the schedule's to know (prefix.h).
//
// The first thread calls everything but `copy`, between two passes; what files need may be called by anybody at any time.
#pragma once
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../../schedule/pass.h"
#include "../../schedule/prefix.h"
#include "model.h"
#include "system.h"

namespace laneformer {

class KvMemory {
 public:
  using Cache = std::vector<Pages>;  // by thread: keys, values

  // heads[t]: KV heads of a layer whose keys and values lie with thread t.
  KvMemory(const ModelSpec& spec, std::vector<int> heads);

  KvShape shape() const;
  // Does all operations of a pass but its copies; returns how many of them, in order, had memory.
  int apply(const Pass& pass);
  void copy(int t, const Pass& pass) const;  // does thread t's part of the copies

  // Return the keys and values of one of thread t's KV heads, in tiles of 16 positions (AttendArgs).
  char* keys(int t, int cache, int layer, int head) const {
    return caches_[cache][t].bytes() + at(layer, head, t);
  }
  char* values(int t, int cache, int layer, int head) const { return keys(t, cache, layer, head) + bytes_[t] / 2; }

  // For files. A segment is the keys, or values, of one KV head of a layer for all positions; they are
  // numbered by layer, head of all threads, keys before values: an order that does not depend on the threads.
  struct Segment {
    char* bytes;
    size_t size;
  };
  int segments() const { return 2 * spec_.all_layers() * all_heads_; }
  bool windowed_segment(int index) const { return windowed(index / (2 * all_heads_)); }
  size_t position_bytes() const { return position_bytes_; }
  Segment segment(const Cache& cache, int index) const;
  Segment segment(int cache, int index);  // valid until the cache is closed
  Cache make() const;                     // throws std::bad_alloc
  void give(int cache, Cache memory);     // to the next `open` of this cache

 private:
  void open(int cache);  // throws std::bad_alloc
  void release(const KvOp& op);
  void copy(int t, const KvOp& op) const;
  bool windowed(int layer) const { return spec_.window[layer] && spec_.window[layer] < spec_.context; }
  size_t at(int layer, int head, int t) const { return (size_t(layer) * heads_[t] + head) * head_bytes_; }

  const ModelSpec& spec_;
  const std::vector<int> heads_;
  const size_t position_bytes_;  // a position's bytes of a KV head's keys, or values
  const size_t head_bytes_;      // whole pages that hold all positions of these
  const int all_heads_;          // KV heads of a layer
  std::vector<size_t> bytes_;    // a cache's bytes by thread
  std::mutex mutex_;             // held while caches open and close
  std::vector<Cache> caches_;
  std::map<int, Cache> given_;
};

}  // namespace laneformer
