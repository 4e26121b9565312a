// KV caches: which ids they hold, and where a new sequence may start in one. Their bytes are the executor's (KvOp).
//
// Every layer has room for all positions, and memory only for those that were written. A layer with a sliding window
// needs no more than the window before the next position; what lies before is kept as long as the limit allows, so that
// a sequence may part from the cached one anywhere. Beyond the limit it is dropped, but for the windows before
// positions where a sequence is likely to start again; then whole caches, the least recently used one first.
//
// Sequences begin and end between two passes. Whoever keeps caches in files (saved_prefix.cpp) may call at
// any time, so every public function holds the mutex.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pass.h"

namespace laneformer {

struct KvShape {
  int context = 0;
  int page = 1;                 // positions that are kept or dropped together
  int layers = 0, windowed = 0;  // all layers; those with a window shorter than the context
  int window = 0;               // the longest of these windows
  size_t layer_bytes = 0;       // a position's keys and values of all heads, in one layer
  int caches = 128;             // the most caches; each may be a mapping of every thread, whose number systems limit
  // Layers with windows may keep their positions in rings (0: no rings), which hold the last `ring` positions. Once they
  // have overwritten some, a sequence may start at most `back` positions before the end.
  int ring = 0, back = 0;
};

class Prefixes {
 public:
  struct Start {
    int cache, position;  // the first position to run: keys and values of those before it are there
  };

  // What a file holds of a cache beside its keys and values.
  struct Contents {
    std::vector<int> ids;
    std::vector<int> starts;       // see Cache
    std::vector<uint8_t> dropped;  // [page of positions]: not in the file for layers with windows
  };
  struct Saving {
    int cache;
    Contents contents;
  };
  // What may be saved: a cache that leaves; one that has grown by a part of what files hold of it; all.
  enum class Save { leaving, grown, all };

  explicit Prefixes(const KvShape& shape) : shape_(shape) {}

  // Caches that sequences use are never given up, so together they may exceed the limit.
  void set_limit(size_t bytes);
  size_t bytes() const;  // bytes of pages that hold keys and values

  // Whether a running sequence is still reading ids that this one shares: then it should begin later, and copy.
  bool awaits(const std::vector<int>& ids, int max_reusable) const;
  // A cache for a sequence, until its end; it starts from at most `max_reusable` positions that are still there.
  Start begin(const std::vector<int>& ids, int max_reusable);
  // The first `position` ids have run; keys and values of positions below `written` may be other than before.
  void ran(int cache, const std::vector<int>& ids, int position, int written);
  // The sequence will make the cache so long. Where its rings would then lose the prompt's end, sets a copy aside.
  void keep(int cache, int positions);
  void end(int cache);
  void forget(int cache);  // nobody may start from its keys and values

  // The operations that the pass is to begin with; false where more are left, which come before any columns.
  bool plan(Pass& pass) const;
  void done(int ops);  // the first so many operations are done
  // The executor had no memory for the next operation: gives up another cache, and the next pass tries again. Returns
  // false where none can be given up: the operation's cache is gone, and the sequence that uses it has to end.
  bool retry_without_one_cache();
  std::string refusal() const;  // why such a sequence ends

  // Files (saved_prefix.cpp). Somebody saves caches: one that no file holds is not closed before it is saved.
  void set_saves(bool saves);
  bool leaves() const;  // a cache waits to be saved, and is then closed
  // A cache to save; until `finish_saving`, the positions of its contents stay as they are. One at a time.
  std::optional<Saving> begin_saving(Save what);
  // Ends the saving. Returns false where the contents were overwritten meanwhile, and their file is to be thrown away.
  bool finish_saving(bool done);
  int reusable(const std::vector<int>& ids, int max_reusable) const;  // where a sequence could start now
  int start_in(const std::vector<uint8_t>& dropped, int shared) const;  // the same for a file that shares so many ids
  // Makes a cache with these contents; false where there is no room. `give` gets its number, and hands keys and values over.
  bool adopt(Contents contents, const std::function<void(int cache)>& give);

 private:
  struct Cache {
    bool open = false;
    std::vector<int> ids;          // the ids whose keys and values are there
    std::vector<int> prompt;       // the prompt of the sequence that uses it
    std::vector<int> starts;       // ascending: positions where a sequence is likely to start, some still to come
    std::vector<uint8_t> dropped;  // [page of positions]: layers with windows have dropped it
    int pages_dropped = 0;
    int written = 0;               // positions whose pages may be there
    // Where its last sequence began, so that ids[turn:] are a conversation's last message and its answer: a request that
    // parts from the cache there writes that turn anew.
    int turn = 0;
    uint64_t last_used = 0;        // number of the last sequence that used it
    bool in_use = false;
    int saved = 0;                 // so many of its first positions are in a file
  };
  struct Found {
    int cache = -1, position = 0;  // where to start
    int lost = 0;                  // ids of the cache that the new sequence does not share
    int shared = 0;                // the longest prefix of any cache
  };

  Found find(const std::vector<int>& ids, int most) const;
  bool starts_in_place(const Found& found, size_t wanted) const;
  bool revises(const Found& found) const;
  void start_in_place(const Found& found);
  void start_from_copy(int index, const Found& found);
  int start_in(const Cache& cache, int shared) const;
  int start_among(const std::vector<uint8_t>& dropped, int shared) const;
  int add(int source);
  void add_start(Cache& cache, int position);
  void truncate(int cache, int position);
  bool make_room(size_t bytes, int source);
  bool give_up_one(int source);
  bool give_up_cache(int source, bool even_needed = false);
  bool let_go(int source);
  void close(int cache);
  int unsaved(int cache) const;
  Contents contents_of(int cache) const;
  bool in_window_of(int page, int start) const;
  bool has_other(int source) const;
  bool thin(int cache, bool keep_starts);
  std::vector<int> by_age(int source, bool even_needed = false) const;
  bool needed(int cache, int source) const;
  size_t unyielding(int source) const;
  size_t held() const;
  void drop(Cache& cache, size_t page, bool dropped);
  size_t bytes_of(int positions, int pages_dropped = 0) const;
  int page_of(int position) const { return position / shape_.page; }

  const KvShape shape_;
  mutable std::mutex mutex_;  // guards all that follows
  std::vector<Cache> caches_;
  std::deque<KvOp> ops_;  // operations that are not done yet
  size_t limit_ = SIZE_MAX;
  uint64_t sequences_ = 0;
  bool saves_ = false;
  int saving_ = -1;        // the cache that is being saved, or waits for that
  bool handed_ = false;    // it is being saved
  bool leaving_ = false;   // it is closed once it is saved, and counts as gone
  bool lost_ = false;      // some of its contents were overwritten while it was being saved
  int saving_end_ = 0;     // the positions that are being saved
};

}  // namespace laneformer
