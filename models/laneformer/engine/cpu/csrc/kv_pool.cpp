#include "kv_pool.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace laneformer {

namespace {
constexpr int kMostCaches = 128;   // each is a mapping of every thread, and systems limit their number
constexpr int kMostStarts = 32;    // of a cache
constexpr int kWorthWaiting = 16;  // positions: about as many as a pass reads in the time that it takes anyway

int common(const std::vector<int>& a, const std::vector<int>& b, int most) {
  const auto same = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return std::max(0, std::min(static_cast<int>(same), most));
}
}  // namespace

KvPool::KvPool(const ModelSpec& spec, std::vector<int> heads)
    : spec_(spec),
      heads_(std::move(heads)),
      position_bytes_(spec.padded_head_dim() * laneformer::bytes_of(spec.kv_dtype)),
      head_bytes_(round_up(spec.cache_slots() * position_bytes_, page_bytes())),
      page_(static_cast<int>(round_up((page_bytes() + position_bytes_ - 1) / position_bytes_, 16))),
      all_heads_(std::accumulate(heads_.begin(), heads_.end(), 0)) {
  for (int layer = 0; layer < spec.layers; ++layer)
    if (windowed(layer)) window_ = std::max(window_, spec.window[layer]), ++windows_;
  for (const int count : heads_) bytes_.push_back(2 * spec.layers * count * head_bytes_);
}

// --- sequences --------------------------------------------------------------------------------------------------

bool KvPool::awaits(const std::vector<int>& ids, int max_reusable) const {
  int later = 0;
  for (const Cache& cache : caches_) {
    const int shared = cache.in_use ? common(cache.prompt, ids, max_reusable) : 0;
    if (shared > static_cast<int>(cache.ids.size())) later = std::max(later, shared);
  }
  return later && later >= find(ids, max_reusable).position + kWorthWaiting;
}

// A sequence goes on in the cache that it continues, or whose last turn it revises, unless it shares less than it would
// overwrite. Else it takes what it shares into a cache of its own, and the other stays as it is.
KvPool::Start KvPool::begin(const std::vector<int>& ids, int max_reusable) {
  const Found found = find(ids, max_reusable);
  const int source = found.cache, position = found.position;
  const size_t wanted = bytes_of(static_cast<int>(ids.size()));
  bool stays = source >= 0 && !caches_[source].in_use;
  if (stays) {
    const bool revises = found.lost <= kMaxColumns || (position >= caches_[source].turn && found.lost <= position);
    stays = revises || unyielding(source) + wanted > limit_;
  }
  make_room(wanted - std::min(wanted, stays ? bytes_of(caches_[source].written) : 0), source);
  const int index = stays ? source : add(source);
  Cache& cache = caches_[index];
  if (stays) {
    cache.turn = found.lost <= kMaxColumns ? position : std::min(cache.turn, position);
    truncate(cache, position);
  } else if (position) {
    copies_.push_back({source, index, position});
    add_start(caches_[source], position);
    for (int page = 0; window_ && page_ * (page + 1) <= position - window_ + 1; ++page) drop(cache, page, true);
    cache.written = position;
    cache.turn = position;
  }
  cache.ids.assign(ids.begin(), ids.begin() + position);
  cache.ids.reserve(spec_.context);
  cache.prompt = ids;
  for (const int start : {position, found.shared, max_reusable}) add_start(cache, start);
  cache.last_used = ++sequences_;
  cache.in_use = true;
  return {index, position};
}

void KvPool::ran(int index, const std::vector<int>& ids, int position, int written) {
  Cache& cache = caches_[index];
  cache.written = std::max(cache.written, written);
  cache.ids.insert(cache.ids.end(), ids.begin() + static_cast<ptrdiff_t>(cache.ids.size()), ids.begin() + position);
  make_room(0, -1);
}

void KvPool::end(int index) {
  if (index < 0) return;
  caches_[index].in_use = false;
  caches_[index].prompt.clear();
}

void KvPool::forget(int index) { truncate(caches_[index], 0); }

// Where in which cache the sequence may start the latest; of several, where it overwrites the least.
KvPool::Found KvPool::find(const std::vector<int>& ids, int most) const {
  Found best;
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i) {
    const Cache& cache = caches_[i];
    const int shared = common(cache.ids, ids, most), position = start_in(cache, shared);
    const int lost = cache.in_use ? spec_.context + 1 : static_cast<int>(cache.ids.size()) - shared;
    best.shared = std::max(best.shared, shared);
    if (position > best.position || (position && position == best.position && lost < best.lost))
      best.cache = i, best.position = position, best.lost = lost;
  }
  return best;
}

// The latest position, but not after `shared`, whose windows are still there.
int KvPool::start_in(const Cache& cache, int shared) const {
  if (!window_) return shared;
  for (int page = page_of(shared); page >= 0; --page) {
    if (page_ * (page + 1) <= shared - window_ + 1) break;
    if (page_ * page < shared && cache.dropped[page]) shared = page_ * page;
  }
  return shared;
}

void KvPool::add_start(Cache& cache, int position) {
  std::vector<int>& starts = cache.starts;
  const auto at = std::lower_bound(starts.begin(), starts.end(), position);
  if (position <= 0 || (at != starts.end() && *at == position)) return;
  starts.insert(at, position);
  if (starts.size() > kMostStarts) starts.erase(starts.begin() + 1);  // the first one may be of many conversations
}

// Positions from `position` on will be written anew; it is not inside of a page that was dropped.
void KvPool::truncate(Cache& cache, int position) {
  const int before = cache.pages_dropped;
  for (size_t page = page_of(position + page_ - 1); page < cache.dropped.size(); ++page) drop(cache, page, false);
  if (cache.pages_dropped < before || !position) {
    release(cache, position, cache.written, false);
    cache.written = position;
  }
  cache.ids.resize(position);
  cache.starts.erase(std::upper_bound(cache.starts.begin(), cache.starts.end(), position), cache.starts.end());
}

// --- copies -----------------------------------------------------------------------------------------------------

void KvPool::copy(int t) const {
  for (const Copy& c : copies_)
    for (int layer = 0; layer < spec_.layers; ++layer) {
      const size_t from = windowed(layer) ? size_t(page_of(std::max(0, c.positions - window_ + 1))) * page_ : 0;
      const size_t skipped = from * position_bytes_, size = round_up(c.positions, 16) * position_bytes_ - skipped;
      for (int head = 0; head < heads_[t]; ++head) {
        std::memcpy(keys(t, c.to, layer, head) + skipped, keys(t, c.from, layer, head) + skipped, size);
        std::memcpy(values(t, c.to, layer, head) + skipped, values(t, c.from, layer, head) + skipped, size);
      }
    }
}

// --- memory -----------------------------------------------------------------------------------------------------

// A cache of its own, with what it will copy from another one.
int KvPool::add(int source) {
  const auto is_free = [](const Cache& cache) { return cache.memory.empty(); };
  if (caches_.size() >= kMostCaches && std::none_of(caches_.begin(), caches_.end(), is_free)) give_up_cache(source);
  Cache cache;
  for (;;) try {
      for (const size_t bytes : bytes_) cache.memory.push_back(Pages::sparse(bytes));
      break;
    } catch (const std::bad_alloc&) {
      cache.memory.clear();
      if (give_up_cache(source)) continue;
      const size_t total = std::accumulate(bytes_.begin(), bytes_.end(), size_t{0});
      throw std::invalid_argument("keys and values of " + std::to_string(spec_.context) + " positions need more than " +
                                  std::to_string(total >> 20) + " MiB, which the system does not give; use a smaller " +
                                  "context_tokens, or kv_dtype = 'fp16'");
    }
  cache.dropped.assign(page_of(spec_.context) + 2, 0);
  auto slot = std::find_if(caches_.begin(), caches_.end(), is_free);
  if (slot == caches_.end()) slot = caches_.emplace(slot);
  *slot = std::move(cache);
  return static_cast<int>(slot - caches_.begin());
}

size_t KvPool::bytes_of(int positions, int pages_dropped) const {
  const size_t there = round_up(positions, page_), kept = there - size_t(pages_dropped) * page_;
  return 2 * position_bytes_ * all_heads_ * (there * (spec_.layers - windows_) + kept * windows_);
}

size_t KvPool::bytes() const {
  size_t total = 0;
  for (const Cache& cache : caches_) total += bytes_of(cache.written, cache.pages_dropped);
  return total;
}

// Of what cannot be given up: what sequences use, and `source`.
size_t KvPool::unyielding(int source) const {
  size_t total = 0;
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i)
    if (caches_[i].in_use || i == source) total += bytes_of(caches_[i].written, caches_[i].pages_dropped);
  return total;
}

// False where so many bytes more go beyond the limit, though nothing is left to give up. `source` is left alone.
bool KvPool::make_room(size_t more, int source) {
  while (bytes() + more > limit_)
    if (!give_up_one(source)) return false;
  return true;
}

// What is least likely to be missed: positions between the starts; whole caches; of running sequences, all starts.
bool KvPool::give_up_one(int source) {
  const std::vector<int> oldest_first = by_age(source);
  const auto thinned = [&](bool keep_starts) {
    return std::any_of(oldest_first.begin(), oldest_first.end(), [&](int i) { return thin(i, keep_starts); });
  };
  return thinned(true) || give_up_cache(source) || thinned(false);
}

bool KvPool::give_up_cache(int source) {
  for (const int i : by_age(source))
    if (!caches_[i].in_use) return caches_[i] = {}, true;
  return false;
}

std::vector<int> KvPool::by_age(int source) const {
  std::vector<int> found(caches_.size());
  std::iota(found.begin(), found.end(), 0);
  std::erase_if(found, [&](int i) { return needed(i, source); });
  std::sort(found.begin(), found.end(), [&](int a, int b) { return caches_[a].last_used < caches_[b].last_used; });
  return found;
}

// Free, or somebody starts from it in the next pass.
bool KvPool::needed(int index, int source) const {
  const auto copies = [&](const Copy& c) { return c.from == index || c.to == index; };
  return index == source || caches_[index].memory.empty() || std::any_of(copies_.begin(), copies_.end(), copies);
}

// Drops positions that no window before the end needs, nor before a start. False where none is left.
bool KvPool::thin(int index, bool keep_starts) {
  if (!window_) return false;
  Cache& cache = caches_[index];
  const int end = static_cast<int>(cache.ids.size());
  bool thinner = false;
  for (int page = 0; page_ * (page + 1) <= end - window_ + 1; ++page) {
    const auto needs = [&](int start) { return page_ * page < start && start - window_ + 1 < page_ * (page + 1); };
    if (cache.dropped[page] || (keep_starts && std::any_of(cache.starts.begin(), cache.starts.end(), needs))) continue;
    release(cache, page_ * page, page_ * (page + 1), true);
    drop(cache, page, true);
    thinner = true;
  }
  return thinner;
}

void KvPool::drop(Cache& cache, size_t page, bool dropped) {
  cache.pages_dropped += dropped - cache.dropped[page];
  cache.dropped[page] = dropped;
}

// Gives the pages of some positions back: of all layers, or of those with windows.
void KvPool::release(Cache& cache, int from, int to, bool windows_only) {
  const size_t first = from * position_bytes_, size = std::max(0, to - from) * position_bytes_;
  for (int t = 0; t < static_cast<int>(heads_.size()); ++t)
    for (int layer = 0; layer < spec_.layers; ++layer)
      for (int head = 0; head < heads_[t] && (windowed(layer) || !windows_only); ++head) {
        cache.memory[t].release(at(layer, head, t) + first, size);
        cache.memory[t].release(at(layer, head, t) + bytes_[t] / 2 + first, size);
      }
}

}  // namespace laneformer
