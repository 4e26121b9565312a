// Races on plain data, shared memory and named buffers, in any order of the threads: what order.h does for words.
//
// With -DSEES_PLAIN -fsanitize=thread, gcc calls one of the functions below at every load and store; no ThreadSanitizer
// is linked. A read must happen after the last write, a write after the last write and all reads since: by syncs, by
// accepted words, or by a wait for the copy. A lane sees what a copy brings when it has itself waited for it.
#pragma once
#include "order.h"

namespace emulator {

#ifdef SEES_PLAIN
#define UNSEEN [[gnu::noinline, gnu::no_sanitize_thread]] inline

struct Reads {  // of one warp, at its latest time: older ones lie before these
  uint32_t time;
  Lanes lanes;
  uint16_t releases[kLanes];
};
struct Granule {   // 4 bytes
  Event writer;    // none in this launch: warp -1
  int barrier;     // of the copy that wrote them, or -1
  uint32_t phase;  // that this copy completes
  Reads* reads;    // since then, [warp of the block]
};
struct Area {
  const char* name;
  const char* base;
  uint64_t bytes;
  int block;  // whose shared memory it is; -1: a named buffer, which may have been written before this launch
  Granule* granules;
  Reads* reads;
};
// plain arrays: what is called from here is instrumented too, and slow
inline Area areas[4096];
inline int area_count, block_warps;
inline Warp* all_warps;
inline uint32_t* awaited;  // [barrier][lane]: phases; a barrier's copies and waits are one warp's
inline std::vector<uint32_t> awaited_;
inline uint64_t plain_reads, plain_writes;
inline bool inside;

UNSEEN void add_area(const char* name, const void* base, uint64_t bytes, int block) {
  if (area_count == 4096) abort();
  const uint64_t count = (bytes + 3) / 4;
  Area& a = areas[area_count++];
  a = {strdup(name), static_cast<const char*>(base), bytes, block, static_cast<Granule*>(malloc(count * sizeof(Granule))),
       static_cast<Reads*>(calloc(count * machine->warps_per_block, sizeof(Reads)))};
  for (uint64_t i = 0; i < count; ++i) a.granules[i] = {{}, -1, 0, a.reads + i * machine->warps_per_block};
}
inline std::vector<Range> plain_ranges;  // for the next launch
UNSEEN void begin_plain() {
  for (; area_count; --area_count) {
    const Area& a = areas[area_count - 1];
    free(const_cast<char*>(a.name)), free(a.granules), free(a.reads);
  }
  inside = false, plain_reads = plain_writes = 0;
  awaited_.clear();
  all_warps = machine->warps.data(), block_warps = machine->warps_per_block;
  for (size_t i = 0; i < machine->blocks.size(); ++i)
    add_area("shared memory", machine->blocks[i].shared, machine->shared_bytes, int(i));
  for (const Range& r : plain_ranges) add_area(r.name.c_str(), r.base, r.bytes, -1);
  plain_ranges.clear();
}

UNSEEN void race(const Area& area, uint64_t i, const char* what, const std::string& after) {
  fail(format("race: %s of byte %llu of %s, in no order after ", what, 4ull * i, area.name) + after);
}
// as order.h's; the releases of a lane are looked at only where its warp's time does not tell
UNSEEN bool lies_before(const Stamp* known, int warp, int lane, uint32_t time, uint16_t releases) {
  if (warp == me->warp && (lane == me->lane || time < all_warps[warp].time)) return true;
  return known[warp].time > time || (known[warp].time == time && known[warp].releases[lane] > releases);
}
UNSEEN void check_write_before(const Area& area, uint64_t i, const Stamp* known, const char* what) {
  const Granule& g = area.granules[i];
  if (g.barrier >= 0) {
    if (g.writer.warp != me->warp || awaited[g.barrier * kLanes + me->lane] < g.phase)
      race(area, i, what, "a copy that this lane has not waited for");
  } else if (g.writer.warp >= 0 && !lies_before(known, g.writer.warp, g.writer.lane, g.writer.time, g.writer.releases)) {
    race(area, i, what, "the write of " + place(g.writer.warp, g.writer.lane));
  }
}
UNSEEN void read_plain(Area& area, uint64_t i, const Stamp* known) {
  Granule& g = area.granules[i];
  if (area.block >= 0 && g.writer.warp < 0) race(area, i, "read", "any write");
  check_write_before(area, i, known, "read");
  const Warp& w = all_warps[me->warp];
  Reads& mine = g.reads[w.index];
  if (mine.time != w.time) mine.lanes = 0;
  mine.time = w.time, mine.lanes |= kOneLane << me->lane, mine.releases[me->lane] = w.releases[me->lane];
  ++plain_reads;
}
UNSEEN void write_plain(Area& area, uint64_t i, const Stamp* known, const char* what) {
  Granule& g = area.granules[i];
  check_write_before(area, i, known, what);
  const int first = me->warp / block_warps * block_warps;
  for (int w = 0; w < block_warps; ++w) {
    const Reads& reads = g.reads[w];
    for (Lanes left = known[first + w].time > reads.time ? 0 : reads.lanes; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (!lies_before(known, first + w, lane, reads.time, reads.releases[lane]))
        race(area, i, what, "the read of " + place(first + w, lane));
    }
    g.reads[w].lanes = 0;
  }
  const Warp& w = all_warps[me->warp];
  g.writer = {me->warp, me->lane, w.time, w.releases[me->lane]}, g.barrier = -1;
  ++plain_writes;
}
UNSEEN Area* area_of(const char* at) {
  const int block = me->warp / block_warps;
  if (uint64_t(at - areas[block].base) < areas[block].bytes) return &areas[block];
  for (int i = 0; i < area_count; ++i)
    if (areas[i].block < 0 && uint64_t(at - areas[i].base) < areas[i].bytes) return &areas[i];
  return nullptr;
}
UNSEEN void see(const void* from, uint64_t bytes, bool writes) {
  if (inside || !me) return;
  const char* at = static_cast<const char*>(from);
  Area* area = area_of(at);
  if (!area) return;
  inside = true;
  const Stamp* known = me->known->data();
  const uint64_t byte = at - area->base;
  for (uint64_t i = byte / 4, end = (byte + bytes + 3) / 4; i < end; ++i)
    writes ? write_plain(*area, i, known, "write") : read_plain(*area, i, known);
  inside = false;
}
UNSEEN void know_barrier(int barrier) {
  if (awaited_.size() <= size_t(barrier) * kLanes) awaited_.resize((barrier + 1) * kLanes), awaited = awaited_.data();
}
// a copy to a slot begins: by lane 0 for all, or of each lane's own 16 bytes of 512
UNSEEN void see_copy(const char* slot, uint32_t bytes, int barrier, uint32_t phase) {
  const bool alone = machine->copies_by_lane_0;
  if (alone && me->lane != 0) return;
  inside = true;
  know_barrier(barrier);
  Area& area = areas[me->warp / block_warps];
  for (uint32_t at = alone ? 0 : 16 * me->lane; at < bytes; at += alone ? 16 : 512)
    for (uint64_t i = (slot + at - area.base) / 4, end = i + 4; i < end; ++i) {
      write_plain(area, i, me->known->data(), "copy");
      area.granules[i].barrier = barrier, area.granules[i].phase = phase;
    }
  inside = false;
}
UNSEEN void see_wait(int barrier, uint32_t phases) {
  know_barrier(barrier);
  awaited[barrier * kLanes + me->lane] = phases;
}

#else

inline void begin_plain() {}
inline void see_copy(const char*, uint32_t, int, uint32_t) {}
inline void see_wait(int, uint32_t) {}

#endif

}  // namespace emulator

#ifdef SEES_PLAIN

#define CALLED [[gnu::noinline, gnu::no_sanitize_thread, gnu::used]]
#define SEES(bytes)                                                                    \
  CALLED void __tsan_read##bytes(void* at) { emulator::see(at, bytes, false); }           \
  CALLED void __tsan_write##bytes(void* at) { emulator::see(at, bytes, true); }           \
  CALLED void __tsan_unaligned_read##bytes(void* at) { emulator::see(at, bytes, false); } \
  CALLED void __tsan_unaligned_write##bytes(void* at) { emulator::see(at, bytes, true); }
extern "C" {
SEES(1) SEES(2) SEES(4) SEES(8) SEES(16)
CALLED void __tsan_read_range(void* at, uint64_t bytes) { emulator::see(at, bytes, false); }
CALLED void __tsan_write_range(void* at, uint64_t bytes) { emulator::see(at, bytes, true); }
CALLED void __tsan_vptr_update(void**, void*) {}
CALLED void __tsan_init() {}
CALLED void __tsan_func_entry(void*) {}
CALLED void __tsan_func_exit() {}
// of shared_ptr; one thread runs all
CALLED int __tsan_atomic32_load(const volatile int* at, int) { return *at; }
CALLED int __tsan_atomic32_fetch_add(volatile int* at, int value, int) {
  const int old = *at;
  *at = old + value;
  return old;
}
CALLED void emulator_plain(const char* name, const void* base, uint64_t bytes) {
  emulator::plain_ranges.push_back({name, static_cast<const char*>(base), bytes});
}
CALLED void emulator_plain_report(uint64_t* reads_writes) {
  reads_writes[0] = emulator::plain_reads, reads_writes[1] = emulator::plain_writes;
}
}

#endif
