// The scheduler of the emulated machine (machine.h): who runs next, when copies arrive, and when nothing can go on.
#pragma once
#include "machine.h"

namespace emulator {

inline void Machine::add_block(int grid, int index) {
  Block b{.grid = grid, .index = index};
  b.memory = std::make_unique<char[]>(shared_bytes + 2 * kGuardBytes + 128);
  memset(b.memory.get(), 0xff, shared_bytes + 2 * kGuardBytes + 128);
  b.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b.memory.get()) + kGuardBytes + 127) & ~127ull);
  for (int i = 0; i < warps_per_block; ++i) warps.push_back({.block = int(blocks.size()), .index = i});
  blocks.push_back(std::move(b));
}
// One mapping for all launches; below each stack lies a page that traps. The tops are spread over cache sets.
inline void Machine::prepare_stacks(void (*start)()) {
  static char* stacks = nullptr;
  static size_t held = 0;
  if (held < fibers.size()) {
    if (stacks) munmap(stacks, held * kStackBytes);
    held = fibers.size();
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, held * kStackBytes, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (at == MAP_FAILED) abort();
    stacks = static_cast<char*>(at);
    for (size_t i = 0; i < held; ++i) mprotect(stacks + i * kStackBytes, 4096, PROT_NONE);
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    void** top = reinterpret_cast<void**>(stacks + (i + 1) * kStackBytes - i % 64 * 192);
    std::fill_n(top - 8, 8, nullptr);  // six registers, the start, and where it would return to
    top[-2] = reinterpret_cast<void*>(start);
    fibers[i].stack_pointer = top - 8;
  }
}
inline bool Machine::can_go(const Fiber& f) const {
  if (f.wait == Wait::change) return f.waits_for.bits != changes;
  if (f.wait == Wait::barrier)
    return (barriers[index_of(f.waits_for.at)].phase & 1) != f.waits_for.bits;
  uint64_t bits;
  memcpy(&bits, f.waits_for.at, 8);
  return bits != f.waits_for.bits;
}
inline bool Machine::runnable(Warp& w) {
  if (w.waiting && w.checked != changes) {
    const Fiber* lanes = &fibers[(&w - warps.data()) * kLanes];
    for (Lanes left = w.waiting; left; left &= left - 1) {
      const Lanes bit = left & -left;
      if (can_go(lanes[std::countr_zero(left)])) w.ready |= bit, w.waiting &= ~bit;
    }
    w.checked = changes;
  }
  return w.ready;
}
// The warps of the next stretch: all, or those of a random part of the blocks, for one step or for thousands.
inline void Machine::draw_warps(bool all) {
  drawn_.clear();
  const int kind = all ? 0 : random() % 4, one = random() % blocks.size();
  for (size_t b = 0; b < blocks.size(); ++b)
    if (kind == 0 || (kind == 1 && random() & 1) || (kind == 2 && int(b) != one) || (kind == 3 && int(b) == one))
      for (int i = 0; i < warps_per_block; ++i) drawn_.push_back(int(b) * warps_per_block + i);
  draw_at_ = steps + (1ull << random() % 12);
}
inline Warp* Machine::next_warp() {
  if (steps >= draw_at_) draw_warps(false);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const size_t count = drawn_.size(), from = count ? random() % count : 0;
    for (size_t i = 0; i < count; ++i) {
      Warp& w = warps[drawn_[from + i < count ? from + i : from + i - count]];
      if (runnable(w)) return &w;
    }
    draw_warps(true);
  }
  return nullptr;
}
// each ready lane (now and then: some) up to where it gives up its turn, in random order
inline void Machine::take_turn(Warp& w) {
  const uint64_t draw = random();
  const Lanes some = draw >> 4;
  Lanes lanes = w.ready;
  if (draw % 4 == 0 && lanes & some) lanes &= some;
  const int from = draw >> 36 & (kLanes - 1), stride = (draw >> 41 & (kLanes - 1)) | 1;
  Fiber* of_warp = &fibers[(&w - warps.data()) * kLanes];
  for (int i = 0; i < kLanes && error.empty(); ++i) {
    const int lane = (from + i * stride) & (kLanes - 1);
    if (!(lanes >> lane & 1)) continue;
    me = &of_warp[lane];
    emulator_switch(&scheduler_, me->stack_pointer);
    me = nullptr;
  }
}
inline void Machine::deliver(size_t i) {
  const Copy copy = std::move(in_flight_[i]);
  if (i + 1 < in_flight_.size()) in_flight_[i] = std::move(in_flight_.back());
  in_flight_.pop_back();
  int64_t bytes = 0;
  for (const Piece& p : copy.pieces) memcpy(p.to, p.from, p.bytes), bytes += p.bytes;
  Barrier& b = barriers[copy.barrier];
  --b.in_flight;
  arrive_at(b, copy.arrives, copy.arrives ? 0 : -bytes);
}
inline void Machine::deliver_due() {
  for (size_t i = in_flight_.size(); i-- > 0;)
    if (in_flight_[i].due <= steps) deliver(i);
}
// Nobody can run: deliver a copy, or let all who wait for memory look again. False: that has been of no use for long.
inline bool Machine::sweep() {
  if (!in_flight_.empty()) {
    deliver(random() % in_flight_.size());
    return true;
  }
  if (sweep_progress_ != progress) sweeps_ = 0, sweep_progress_ = progress;
  if (flags & kWatchdog) clock_ns += 1000ull << std::min(sweeps_, 20);
  if (++sweeps_ > (flags & kWatchdog ? kWatchdogSweeps : kDeadSweeps)) return false;
  for (Warp& w : warps) {
    for (Lanes left = w.waiting; left; left &= left - 1) {
      const int lane = std::countr_zero(left);
      if (fibers[(&w - warps.data()) * kLanes + lane].wait != Wait::barrier)
        w.ready |= kOneLane << lane, w.waiting &= ~(kOneLane << lane);
    }
  }
  return true;
}
inline void Machine::check_end() {
  for (const Fiber& f : fibers)
    if (!f.copies.empty()) return fail(place(f.warp, f.lane) + ": has ended, and nobody can wait for its cp.async");
  for (const Barrier& b : barriers) {
    if (flags & kWatchdog) break;
    if (b.unawaited) return fail("a block has ended and nobody has waited for its last copy");
    if (b.missing != b.arrivals || b.bytes) return fail("a block has ended in the midst of a barrier's phase");
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const char* guard : {blocks[b].shared - kGuardBytes, blocks[b].shared + shared_bytes})
      for (size_t i = 0; i < kGuardBytes; ++i)
        if (guard[i] != char(0xff))
          return fail(place(int(b) * warps_per_block) + ": wrote outside its shared memory, at byte " +
                      std::to_string(guard + i - blocks[b].shared) + " of " + std::to_string(shared_bytes));
  }
}
inline void Machine::run(void (*start)()) {
  prepare_stacks(start);
  alive_ = fibers.size();
  while (alive_ && error.empty()) {
    ++steps, clock_ns += kStepNs;
    if (!in_flight_.empty()) deliver_due();
    if (Warp* w = next_warp())
      take_turn(*w);
    else if (!sweep())
      fail(deadlock_report());
  }
  if (error.empty()) check_end();
}

}  // namespace emulator
