#include "kv_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

namespace laneformer {

KvMemory::KvMemory(const ModelSpec& spec, std::vector<int> heads)
    : spec_(spec),
      heads_(std::move(heads)),
      position_bytes_(kv_position_bytes(spec.padded_head_dim(), spec.kv_dtype)),
      head_bytes_(round_up(spec.cache_slots() * position_bytes_, page_bytes())),
      all_heads_(std::accumulate(heads_.begin(), heads_.end(), 0)) {
  for (const int count : heads_) bytes_.push_back(2 * spec.all_layers() * count * head_bytes_);
}

KvShape KvMemory::shape() const {
  KvShape shape{.context = spec_.context, .layers = spec_.all_layers()};
  // at least a page of a head's keys
  shape.page = static_cast<int>(round_up((page_bytes() + position_bytes_ - 1) / position_bytes_, 16));
  for (int layer = 0; layer < spec_.all_layers(); ++layer)
    if (windowed(layer)) shape.window = std::max(shape.window, spec_.window[layer]), ++shape.windowed;
  shape.layer_bytes = 2 * position_bytes_ * all_heads_;
  return shape;
}

int KvMemory::apply(const Pass& pass) {
  std::lock_guard lock(mutex_);
  for (int i = 0; i < pass.ops; ++i) try {
      const KvOp& op = pass.op[i];
      if (op.kind == KvOp::open) open(op.cache);
      if (op.kind == KvOp::close) caches_[op.cache].clear();
      if (op.kind == KvOp::release) release(op);
    } catch (const std::bad_alloc&) {
      return i;
    }
  return pass.ops;
}

void KvMemory::open(int cache) {
  auto given = given_.extract(cache);
  Cache memory = given ? std::move(given.mapped()) : make();
  caches_.resize(std::max(caches_.size(), size_t(cache) + 1));
  caches_[cache] = std::move(memory);
}

KvMemory::Cache KvMemory::make() const {
  Cache memory;
  for (const size_t bytes : bytes_) memory.push_back(Pages::sparse(bytes));
  return memory;
}

void KvMemory::give(int cache, Cache memory) {
  std::lock_guard lock(mutex_);
  given_[cache] = std::move(memory);
}

KvMemory::Segment KvMemory::segment(const Cache& cache, int index) const {
  const int layer = index / (2 * all_heads_);
  int head = index / 2 % all_heads_, t = 0;
  while (head >= heads_[t]) head -= heads_[t++];
  return {cache[t].bytes() + at(layer, head, t) + (index % 2 ? bytes_[t] / 2 : 0), head_bytes_};
}

KvMemory::Segment KvMemory::segment(int cache, int index) {
  std::lock_guard lock(mutex_);
  return segment(caches_.at(cache), index);
}

void KvMemory::release(const KvOp& op) {
  const size_t first = op.begin * position_bytes_, size = std::max(0, op.end - op.begin) * position_bytes_;
  for (int t = 0; t < static_cast<int>(heads_.size()); ++t)
    for (int layer = 0; layer < spec_.all_layers(); ++layer)
      for (int head = 0; head < heads_[t] && (windowed(layer) || !op.windows_only); ++head) {
        caches_[op.cache][t].release(at(layer, head, t) + first, size);
        caches_[op.cache][t].release(at(layer, head, t) + bytes_[t] / 2 + first, size);
      }
}

void KvMemory::copy(int t, const Pass& pass) const {
  for (int i = 0; i < pass.ops; ++i)
    if (pass.op[i].kind == KvOp::copy) copy(t, pass.op[i]);
}

// Copies keys and values; in layers with windows, only the pages that a window before the end needs.
void KvMemory::copy(int t, const KvOp& c) const {
  const KvShape whole = shape();
  for (int layer = 0; layer < spec_.all_layers(); ++layer) {
    const size_t from = windowed(layer) ? std::max(0, c.end - whole.window + 1) / whole.page * whole.page : 0;
    const size_t skipped = from * position_bytes_, size = round_up(c.end, 16) * position_bytes_ - skipped;
    for (int head = 0; head < heads_[t]; ++head) {
      std::memcpy(keys(t, c.cache, layer, head) + skipped, keys(t, c.from, layer, head) + skipped, size);
      std::memcpy(values(t, c.cache, layer, head) + skipped, values(t, c.from, layer, head) + skipped, size);
    }
  }
}

}  // namespace laneformer
