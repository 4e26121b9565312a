#include "kv_memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace laneformer {

KvMemory::KvMemory(const ModelSpec& spec, std::vector<int> heads)
    : spec_(spec),
      heads_(std::move(heads)),
      position_bytes_(spec.padded_head_dim() * bytes_of(spec.kv_dtype)),
      head_bytes_(round_up(spec.cache_slots() * position_bytes_, page_bytes())) {
  for (const int count : heads_) bytes_.push_back(2 * spec.layers * count * head_bytes_);
}

KvShape KvMemory::shape() const {
  KvShape shape{.context = spec_.context, .layers = spec_.layers};
  // at least a page of a head's keys
  shape.page = static_cast<int>(round_up((page_bytes() + position_bytes_ - 1) / position_bytes_, 16));
  for (int layer = 0; layer < spec_.layers; ++layer)
    if (windowed(layer)) shape.window = std::max(shape.window, spec_.window[layer]), ++shape.windowed;
  shape.layer_bytes = 2 * position_bytes_ * std::accumulate(heads_.begin(), heads_.end(), size_t{0});
  return shape;
}

void KvMemory::open(int cache) {
  std::vector<Pages> memory;
  for (const size_t bytes : bytes_) memory.push_back(Pages::sparse(bytes));
  caches_.resize(std::max(caches_.size(), size_t(cache) + 1));
  caches_[cache] = std::move(memory);
}

void KvMemory::release(int cache, int from, int to, bool windows_only) {
  const size_t first = from * position_bytes_, size = std::max(0, to - from) * position_bytes_;
  for (int t = 0; t < static_cast<int>(heads_.size()); ++t)
    for (int layer = 0; layer < spec_.layers; ++layer)
      for (int head = 0; head < heads_[t] && (windowed(layer) || !windows_only); ++head) {
        caches_[cache][t].release(at(layer, head, t) + first, size);
        caches_[cache][t].release(at(layer, head, t) + bytes_[t] / 2 + first, size);
      }
}

// Of layers with windows, only the pages that a window before the end needs.
void KvMemory::copy(int t, const KvCopy& c) const {
  const KvShape whole = shape();
  for (int layer = 0; layer < spec_.layers; ++layer) {
    const size_t from = windowed(layer) ? std::max(0, c.positions - whole.window + 1) / whole.page * whole.page : 0;
    const size_t skipped = from * position_bytes_, size = round_up(c.positions, 16) * position_bytes_ - skipped;
    for (int head = 0; head < heads_[t]; ++head) {
      std::memcpy(keys(t, c.to, layer, head) + skipped, keys(t, c.from, layer, head) + skipped, size);
      std::memcpy(values(t, c.to, layer, head) + skipped, values(t, c.from, layer, head) + skipped, size);
    }
  }
}

}  // namespace laneformer
