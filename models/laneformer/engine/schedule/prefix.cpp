#include "prefix.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace laneformer {

namespace {
constexpr int kRevised = kPassColumns;  // so few overwritten ids are worth no cache of their own
constexpr int kMostStarts = 32;    // the most starts that a cache remembers
constexpr int kWorthWaiting = 16;  // positions: about as many as a pass reads in the time that it takes anyway

int common(const std::vector<int>& a, const std::vector<int>& b, int most) {
  const auto same = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  return std::max(0, std::min(static_cast<int>(same), most));
}
}  // namespace

// --- sequences --------------------------------------------------------------------------------------------------

bool Prefixes::awaits(const std::vector<int>& ids, int max_reusable) const {
  std::lock_guard lock(mutex_);
  int later = 0;
  for (const Cache& cache : caches_) {
    const int shared = cache.in_use ? common(cache.prompt, ids, max_reusable) : 0;
    if (shared > static_cast<int>(cache.ids.size())) later = std::max(later, shared);
  }
  return later && later >= find(ids, max_reusable).position + kWorthWaiting;
}

// A sequence goes on in a cache that it continues or revises. Else it copies what it shares into a cache of its own, and
// the other stays as it is, for whoever goes on there.
Prefixes::Start Prefixes::begin(const std::vector<int>& ids, int max_reusable) {
  std::lock_guard lock(mutex_);
  const Found found = find(ids, max_reusable);
  const size_t wanted = bytes_of(static_cast<int>(ids.size()));
  const bool in_place = starts_in_place(found, wanted);
  make_room(wanted - std::min(wanted, in_place ? bytes_of(caches_[found.cache].written) : 0), found.cache);
  const int index = in_place ? found.cache : add(found.cache);
  if (in_place)
    start_in_place(found);
  else if (found.position)
    start_from_copy(index, found);
  Cache& cache = caches_[index];
  cache.ids.assign(ids.begin(), ids.begin() + found.position);
  cache.ids.reserve(shape_.context);
  cache.prompt = ids;
  for (const int start : {found.position, found.shared, max_reusable}) add_start(cache, start);
  cache.last_used = ++sequences_;
  cache.in_use = true;
  return {index, found.position};
}

// Whether the sequence overwrites what it does not share: it revises the cache, or there is no room for a copy.
bool Prefixes::starts_in_place(const Found& found, size_t wanted) const {
  if (found.cache < 0 || caches_[found.cache].in_use) return false;
  // while a file is written from a cache, it may grow, but nothing of it may be overwritten
  if (found.cache == saving_ && found.position < static_cast<int>(caches_[found.cache].ids.size())) return false;
  return revises(found) || unyielding(found.cache) + wanted > limit_ || !has_other(found.cache);
}

// Whether a sequence continues the cache, as the next message of a conversation does, which overwrites at most kRevised
// ids; or writes the last turn anew, as another answer to the same message does, and shares more than it overwrites. A
// conversation that parts before its last turn, or shares only a short system prompt, does neither.
bool Prefixes::revises(const Found& found) const {
  if (shape_.ring) return !found.lost;  // as on a GPU, where memory for a copy is there anyway and it costs little
  const bool in_last_turn = found.position >= caches_[found.cache].turn;
  return found.lost <= kRevised || (in_last_turn && found.lost <= found.position);
}

void Prefixes::start_in_place(const Found& found) {
  if (found.cache == saving_) leaving_ = false;
  Cache& cache = caches_[found.cache];
  cache.turn = found.lost <= kRevised ? found.position : std::min(cache.turn, found.position);
  truncate(found.cache, found.position);
}

void Prefixes::start_from_copy(int index, const Found& found) {
  Cache &cache = caches_[index], &source = caches_[found.cache];
  const int position = found.position;
  ops_.push_back({KvOp::copy, false, int16_t(index), int16_t(found.cache), 0, position});
  add_start(source, position);
  const int unseen = position - shape_.window + 1;  // positions that no window reaches any more are not copied
  for (int page = 0; shape_.window && shape_.page * (page + 1) <= unseen; ++page) drop(cache, page, true);
  cache.written = shape_.ring ? source.written : position;  // a ring is copied as it is
  cache.turn = position;
  cache.saved = std::min(source.saved, position);
}

void Prefixes::ran(int index, const std::vector<int>& ids, int position, int written) {
  std::lock_guard lock(mutex_);
  Cache& cache = caches_[index];
  cache.written = std::max(cache.written, written);
  cache.ids.insert(cache.ids.end(), ids.begin() + static_cast<ptrdiff_t>(cache.ids.size()), ids.begin() + position);
  make_room(0, -1);
}

void Prefixes::keep(int index, int positions) {
  std::lock_guard lock(mutex_);
  if (!shape_.ring || positions <= shape_.ring || !has_other(index)) return;
  const int aside = add(index);
  Cache &own = caches_[index], &kept = caches_[aside];
  kept.ids = own.prompt;
  kept.turn = own.turn, kept.written = own.written;
  kept.last_used = ++sequences_, own.last_used = ++sequences_;
  ops_.push_back({KvOp::copy, false, int16_t(aside), int16_t(index), 0, static_cast<int>(kept.ids.size())});
}

void Prefixes::end(int index) {
  if (index < 0) return;
  std::lock_guard lock(mutex_);
  caches_[index].in_use = false;
  caches_[index].prompt.clear();
}

void Prefixes::forget(int index) {
  std::lock_guard lock(mutex_);
  truncate(index, 0);
}

// Returns in which cache the sequence may start the latest, and where; of several, the one of which it overwrites least.
Prefixes::Found Prefixes::find(const std::vector<int>& ids, int most) const {
  Found best;
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i) {
    const Cache& cache = caches_[i];
    const int shared = common(cache.ids, ids, most), position = start_in(cache, shared);
    const int lost = cache.in_use ? shape_.context + 1 : static_cast<int>(cache.ids.size()) - shared;
    best.shared = std::max(best.shared, shared);
    if (position > best.position || (position && position == best.position && lost < best.lost))
      best.cache = i, best.position = position, best.lost = lost;
  }
  return best;
}

// Returns the latest position, but not after `shared`, before which all windows are still there.
int Prefixes::start_in(const Cache& cache, int shared) const {
  if (shape_.ring) return cache.written <= shape_.ring || cache.written - shared <= shape_.back ? shared : 0;
  return start_among(cache.dropped, shared);
}

int Prefixes::start_among(const std::vector<uint8_t>& dropped, int shared) const {
  if (!shape_.window) return shared;
  for (int page = page_of(shared); page >= 0; --page) {
    if (shape_.page * (page + 1) <= shared - shape_.window + 1) break;
    if (shape_.page * page < shared && dropped[page]) shared = shape_.page * page;
  }
  return shared;
}

void Prefixes::add_start(Cache& cache, int position) {
  std::vector<int>& starts = cache.starts;
  const auto at = std::lower_bound(starts.begin(), starts.end(), position);
  if (position <= 0 || (at != starts.end() && *at == position)) return;
  starts.insert(at, position);
  if (starts.size() > kMostStarts) starts.erase(starts.begin() + 1);  // the first one may be shared by many conversations
}

// Forgets all from `position` on, which will be written anew; it is not inside of a page that was dropped.
void Prefixes::truncate(int index, int position) {
  Cache& cache = caches_[index];
  const int before = cache.pages_dropped;
  cache.saved = std::min(cache.saved, position);
  lost_ |= index == saving_ && position < static_cast<int>(cache.ids.size());
  for (size_t page = page_of(position + shape_.page - 1); page < cache.dropped.size(); ++page) drop(cache, page, false);
  if (cache.pages_dropped < before || !position) {
    ops_.push_back({KvOp::release, false, int16_t(index), 0, position, cache.written});
    cache.written = position;
  }
  cache.ids.resize(position);
  cache.starts.erase(std::upper_bound(cache.starts.begin(), cache.starts.end(), position), cache.starts.end());
}

// --- operations -------------------------------------------------------------------------------------------------

bool Prefixes::plan(Pass& pass) const {
  std::lock_guard lock(mutex_);
  for (const KvOp& op : ops_) {
    const bool after_copies = pass.ops && pass.op[pass.ops - 1].kind == KvOp::copy && op.kind != KvOp::copy;
    if (pass.ops == kMaxOps || after_copies) return false;
    pass.op[pass.ops++] = op;
  }
  return true;
}

void Prefixes::done(int ops) {
  std::lock_guard lock(mutex_);
  ops_.erase(ops_.begin(), ops_.begin() + ops);
}

bool Prefixes::retry_without_one_cache() {
  std::lock_guard lock(mutex_);
  const int index = ops_.front().cache;
  if (give_up_cache(-1)) {  // it is closed first, and then the refused operation comes again
    std::rotate(ops_.begin(), ops_.end() - 1, ops_.end());
    return true;
  }
  std::erase_if(ops_, [&](const KvOp& op) { return op.cache == index; });
  caches_[index] = {};
  return false;
}

std::string Prefixes::refusal() const {
  return "keys and values of " + std::to_string(shape_.context) + " positions need more than " +
         std::to_string(bytes_of(shape_.context) >> 20) + " MiB, which the system does not give; use a smaller " +
         "context_tokens, or kv_dtype = 'int8'";
}

// --- memory -----------------------------------------------------------------------------------------------------

// Opens a cache, and returns its number; `source`, from which it will be copied, is not given up for it.
int Prefixes::add(int source) {
  const auto is_free = [](const Cache& cache) { return !cache.open; };
  const bool full = int(caches_.size()) >= shape_.caches && std::none_of(caches_.begin(), caches_.end(), is_free);
  if (full && !give_up_cache(source)) give_up_cache(source, true);  // closed in its turn, after the copies
  auto slot = std::find_if(caches_.begin(), caches_.end(), is_free);
  if (slot == caches_.end()) slot = caches_.emplace(slot);
  const int index = static_cast<int>(slot - caches_.begin());
  ops_.push_back({KvOp::open, false, int16_t(index)});
  slot->open = true;
  slot->dropped.assign(page_of(shape_.context) + 2, 0);
  return index;
}

size_t Prefixes::bytes_of(int positions, int pages_dropped) const {
  const size_t page = shape_.page, there = (positions + page - 1) / page * page, kept = there - pages_dropped * page;
  return shape_.layer_bytes * (there * (shape_.layers - shape_.windowed) + kept * shape_.windowed);
}

void Prefixes::set_limit(size_t bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

size_t Prefixes::bytes() const {
  std::lock_guard lock(mutex_);
  return held();
}

size_t Prefixes::held() const {
  size_t total = 0;
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i)
    if (i != saving_ || !leaving_) total += bytes_of(caches_[i].written, caches_[i].pages_dropped);
  return total;
}

// Returns the bytes that cannot be given up: those of the caches that sequences use, and of `source`.
size_t Prefixes::unyielding(int source) const {
  size_t total = 0;
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i)
    if (caches_[i].in_use || i == source) total += bytes_of(caches_[i].written, caches_[i].pages_dropped);
  return total;
}

// Gives up caches but `source` until so many more bytes stay within the limit. Returns false where none is left.
bool Prefixes::make_room(size_t more, int source) {
  while (held() + more > limit_)
    if (!give_up_one(source)) return false;
  return true;
}

// Gives up what is least likely to be missed: positions between the starts; whole caches; running sequences' starts.
bool Prefixes::give_up_one(int source) {
  const std::vector<int> oldest_first = by_age(source);
  const auto thinned = [&](bool keep_starts) {
    return std::any_of(oldest_first.begin(), oldest_first.end(), [&](int i) { return thin(i, keep_starts); });
  };
  return thinned(true) || let_go(source) || thinned(false);
}

bool Prefixes::give_up_cache(int source, bool even_needed) {
  for (const int i : by_age(source, even_needed))
    if (!caches_[i].in_use) {
      close(i);
      return true;
    }
  return false;
}

void Prefixes::close(int index) {
  ops_.push_back({KvOp::close, false, int16_t(index)});
  caches_[index] = {};
}

// Whether a sequence could have another cache than this.
bool Prefixes::has_other(int source) const {
  for (int i = 0; i < static_cast<int>(caches_.size()); ++i)
    if (i != source && i != saving_ && !caches_[i].in_use) return true;
  return int(caches_.size()) < shape_.caches;
}

// Returns the caches that may be given up, the least recently used first; even_needed: also those of pending copies.
std::vector<int> Prefixes::by_age(int source, bool even_needed) const {
  std::vector<int> found(caches_.size());
  std::iota(found.begin(), found.end(), 0);
  std::erase_if(found, [&](int i) { return even_needed ? i == source || i == saving_ || !caches_[i].open : needed(i, source); });
  std::sort(found.begin(), found.end(), [&](int a, int b) { return caches_[a].last_used < caches_[b].last_used; });
  return found;
}

// Whether a cache cannot be given up: it is free, or being saved, or a copy from or to it is not done yet.
bool Prefixes::needed(int index, int source) const {
  const auto copies = [&](const KvOp& op) { return op.kind == KvOp::copy && (op.from == index || op.cache == index); };
  return index == source || index == saving_ || !caches_[index].open || std::any_of(ops_.begin(), ops_.end(), copies);
}

// Drops positions that no window before the end needs, nor one before a start. Returns false where there are none.
bool Prefixes::thin(int index, bool keep_starts) {
  if (!shape_.window) return false;
  Cache& cache = caches_[index];
  const int end = static_cast<int>(cache.ids.size());
  bool thinner = false;
  for (int page = 0; shape_.page * (page + 1) <= end - shape_.window + 1; ++page) {
    const auto needs = [&](int start) { return in_window_of(page, start); };
    if (cache.dropped[page] || (keep_starts && std::any_of(cache.starts.begin(), cache.starts.end(), needs))) continue;
    ops_.push_back({KvOp::release, true, int16_t(index), 0, shape_.page * page, shape_.page * (page + 1)});
    drop(cache, page, true);
    thinner = true;
  }
  return thinner;
}

// Whether a window before the start needs the page.
bool Prefixes::in_window_of(int page, int start) const {
  return shape_.page * page < start && start - shape_.window + 1 < shape_.page * (page + 1);
}

void Prefixes::drop(Cache& cache, size_t page, bool dropped) {
  cache.pages_dropped += dropped - cache.dropped[page];
  cache.dropped[page] = dropped;
}

}  // namespace laneformer
