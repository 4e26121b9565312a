// Caches that outlive the process: chooses which to write to files, and takes them back. The files are ../cpu/saved.py's.
#include <algorithm>
#include <utility>

#include "prefix.h"

namespace laneformer {

namespace {
constexpr int kBlock = 16;  // positions whose keys lie together: the last block may still be written to
constexpr int kLeast = 64;  // positions that are worth a file: one pass reads fewer
constexpr int kGrowth = 8;  // a cache is written again when this part of it is new
}  // namespace

void Prefixes::set_saves(bool saves) {
  std::lock_guard lock(mutex_);
  saves_ = saves;
  if (saves || saving_ < 0 || handed_) return;
  const int index = std::exchange(saving_, -1);
  if (std::exchange(leaving_, false)) close(index);
}

bool Prefixes::leaves() const {
  std::lock_guard lock(mutex_);
  return saving_ >= 0 && !handed_;
}

// Closes the least recently used cache, or lets it wait to be saved first where no file holds it.
bool Prefixes::let_go(int source) {
  for (const int i : by_age(source)) {
    if (caches_[i].in_use) continue;
    if (!saves_ || saving_ >= 0 || unsaved(i) < kLeast) break;
    saving_ = i, leaving_ = true, handed_ = lost_ = false;
    return true;
  }
  return give_up_cache(source);
}

// Returns how many positions no file holds, neither of this cache nor of another with the same ids.
int Prefixes::unsaved(int index) const {
  const std::vector<int>& ids = caches_[index].ids;
  const int whole = static_cast<int>(ids.size()) / kBlock * kBlock;
  int there = 0;
  for (const Cache& other : caches_) {
    if (other.saved <= there) continue;
    const int most = std::min(other.saved, whole);
    there = std::max(there, static_cast<int>(std::mismatch(ids.begin(), ids.begin() + most, other.ids.begin()).first - ids.begin()));
  }
  return whole - there;
}

std::optional<Prefixes::Saving> Prefixes::begin_saving(Save what) {
  std::lock_guard lock(mutex_);
  if (saving_ >= 0 && handed_) return {};
  if (saving_ < 0) {
    if (what == Save::leaving) return {};
    for (const int i : by_age(-1)) {
      const bool opens = std::any_of(ops_.begin(), ops_.end(), [&](const KvOp& op) { return op.kind == KvOp::open && op.cache == i; });
      const int part = what == Save::all ? 0 : static_cast<int>(caches_[i].ids.size()) / kGrowth;
      if (opens || (caches_[i].in_use && what != Save::all) || unsaved(i) < std::max(kLeast, part)) continue;
      saving_ = i;
      break;
    }
    if (saving_ < 0) return {};
    lost_ = leaving_ = false;
  }
  handed_ = true;
  Saving found{saving_, contents_of(saving_)};
  saving_end_ = static_cast<int>(found.contents.ids.size());
  return found;
}

// Returns what a file holds of a cache: whole blocks, and in layers with windows what a start needs.
Prefixes::Contents Prefixes::contents_of(int index) const {
  const Cache& cache = caches_[index];
  const int end = static_cast<int>(cache.ids.size()) / kBlock * kBlock;
  Contents contents;
  contents.ids.assign(cache.ids.begin(), cache.ids.begin() + end);
  for (const int start : cache.starts)
    if (start < end) contents.starts.push_back(start);
  contents.starts.push_back(end);
  for (int page = 0; page * shape_.page < end; ++page) {
    const auto needs = [&](int start) { return in_window_of(page, start); };
    const bool needed = std::any_of(contents.starts.begin(), contents.starts.end(), needs);
    contents.dropped.push_back(shape_.window && (cache.dropped[page] || !needed));
  }
  return contents;
}

bool Prefixes::finish_saving(bool done) {
  std::lock_guard lock(mutex_);
  if (saving_ < 0) return false;
  const int index = std::exchange(saving_, -1);
  Cache& cache = caches_[index];
  const bool whole = done && !lost_;
  if (whole) cache.saved = saving_end_;
  if (std::exchange(leaving_, false) && !cache.in_use) close(index);
  handed_ = lost_ = false;
  return whole;
}

int Prefixes::reusable(const std::vector<int>& ids, int max_reusable) const {
  std::lock_guard lock(mutex_);
  return find(ids, max_reusable).position;
}

int Prefixes::start_in(const std::vector<uint8_t>& dropped, int shared) const {
  std::vector<uint8_t> pages = dropped;
  pages.resize(page_of(shape_.context) + 2);
  return start_among(pages, std::min(shared, shape_.context));
}

bool Prefixes::adopt(Contents contents, const std::function<void(int cache)>& give) {
  std::lock_guard lock(mutex_);
  const int end = static_cast<int>(contents.ids.size());
  contents.dropped.resize(page_of(end + shape_.page - 1));  // what follows will be written anew
  const auto dropped = std::count(contents.dropped.begin(), contents.dropped.end(), 1);
  const size_t bytes = bytes_of(end, static_cast<int>(dropped));
  if (bytes > limit_ || !make_room(bytes, -1)) return false;
  const int index = add(-1);
  give(index);
  Cache& cache = caches_[index];
  for (size_t page = 0; page < contents.dropped.size(); ++page) drop(cache, page, contents.dropped[page]);
  for (const int start : contents.starts)
    if (start <= end) add_start(cache, start);
  cache.ids = std::move(contents.ids);
  cache.ids.reserve(shape_.context);
  cache.written = cache.turn = cache.saved = end;
  cache.last_used = ++sequences_;
  return true;
}

}  // namespace laneformer
