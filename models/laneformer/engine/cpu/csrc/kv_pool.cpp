#include "kv_pool.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace laneformer {

KvPool::KvPool(const ModelSpec& spec, std::vector<int> heads)
    : spec_(spec), position_bytes_(spec.padded_head_dim() * bytes_of(spec.kv_dtype)), memory_(heads.size()) {
  for (const int count : heads) {
    std::vector<size_t> at{0};
    for (int layer = 0; layer < spec.layers; ++layer)
      at.push_back(at.back() + count * spec.cache_slots(layer) * position_bytes_);
    layer_at_.push_back(std::move(at));
  }
}

KvPool::Start KvPool::begin(const std::vector<int>& ids, int most_reusable) {
  const int cache = take(ids, most_reusable);
  Contents& contents = contents_[cache];
  const int position = reusable(contents, ids, most_reusable);
  contents.ids.resize(position);
  contents.ids.reserve(spec_.context);
  if (position == 0) contents.written = 0;
  contents.last_used = ++sequences_;
  contents.in_use = true;
  return {cache, position};
}

void KvPool::ran(int cache, const std::vector<int>& ids, int position, int written) {
  Contents& contents = contents_[cache];
  contents.written = std::max(contents.written, written);
  contents.ids.insert(contents.ids.end(), ids.begin() + static_cast<ptrdiff_t>(contents.ids.size()),
                      ids.begin() + position);
}

void KvPool::forget(int cache) {
  contents_[cache].ids.clear();
  contents_[cache].written = 0;
}

// How many leading ids (at most `most`) need not run again: the common prefix, unless a ring has already overwritten
// keys that the next position's window needs; then none, as a layer's keys depend on every position that the layers
// below it see.
int KvPool::reusable(const Contents& contents, const std::vector<int>& ids, int most) const {
  const auto common =
      std::mismatch(contents.ids.begin(), contents.ids.end(), ids.begin(), ids.end()).first - contents.ids.begin();
  const int kept = std::min(static_cast<int>(common), most);
  for (int layer = 0; layer < spec_.layers; ++layer) {
    const int lost = contents.written - spec_.cache_slots(layer);  // positions below this one are overwritten
    if (lost > 0 && spec_.window[layer] && lost > kept - spec_.window[layer] + 1) return 0;
  }
  return std::max(kept, 0);
}

// The free cache with the longest prefix of the ids, the least recently used one of several; else a new one.
int KvPool::take(const std::vector<int>& ids, int most) {
  int best = -1, best_reused = -1;
  for (int i = 0; i < static_cast<int>(contents_.size()); ++i) {
    if (contents_[i].in_use) continue;
    const int reused = reusable(contents_[i], ids, most);
    const bool older = best >= 0 && contents_[i].last_used < contents_[best].last_used;
    if (reused > best_reused || (reused == best_reused && older)) best = i, best_reused = reused;
  }
  if (best >= 0) return best;
  add();
  contents_.emplace_back();
  return static_cast<int>(contents_.size()) - 1;
}

// All threads get their part of one more cache, or none.
void KvPool::add() {
  std::vector<Memory> parts;
  size_t total = 0;
  for (const auto& at : layer_at_) total += 2 * at.back();
  try {
    for (const auto& at : layer_at_) parts.push_back({Pages(at.back(), true), Pages(at.back(), true)});
  } catch (const std::bad_alloc&) {
    throw std::invalid_argument("keys and values of " + std::to_string(spec_.context) + " positions need more than " +
                                std::to_string(total >> 20) + " MiB, which the system does not give; use a smaller " +
                                "context_tokens, or kv_dtype = 'fp16'");
  }
  for (size_t t = 0; t < parts.size(); ++t) memory_[t].push_back(std::move(parts[t]));
}

}  // namespace laneformer
