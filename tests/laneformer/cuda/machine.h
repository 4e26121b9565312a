// A GPU's machine on the CPU: every CUDA thread is a fiber, and one OS thread runs them all in a random, seeded order.
//
// A fiber gives up its turn at syncs, at fruitless looks at memory, and now and then. Stretches in which only some blocks
// run make the skew that a real GPU shows rarely. What would be undefined there is an error here: lanes of a warp that
// diverge at a sync, a copy to a barrier that is busy, a launch in which nothing can go on.
//
// The machine also keeps what every thread knows of the others (vector clocks), so that a check can tell what is
// ordered by the program from what merely happened in this order (order.h).
#pragma once
#if !defined(__x86_64__)
#error "the CUDA emulator switches stacks with x86-64 assembly"
#endif

#include <sys/mman.h>

#include <bit>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.local emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace emulator {

constexpr int kDeadSweeps = 64, kWatchdogSweeps = 100'000;  // of no use: the launch stands still
constexpr size_t kStackBytes = 64 << 10, kGuardBytes = 512;
constexpr uint64_t kStepNs = 10, kBarrierMagic = 0xba221e50'00000000;
enum Sync : int { kNone, kBlockSync, kWarpSync, kMultiply, kElect, kShuffle };  // kShuffle + mask
enum class Wait { word, change, barrier };
enum Flags { kWatchdog = 1 };

struct Look {
  const void* at = nullptr;
  uint64_t bits = 0;
};
struct Piece {  // to be copied
  char* to;
  const char* from;
  uint32_t bytes;
};
struct Fiber {
  void* stack_pointer;
  int warp, lane;
  std::shared_ptr<Clock> known;  // shared with whoever knows the same; copied before it changes
  Look looks[4];
  int next_look = 0, looked = 0;  // which to replace; how many since the last sync
  Wait wait = Wait::change;
  const void* polled = nullptr;  // the word that it last looked at and has not accepted
  std::vector<Piece> copies;  // begun by this thread (cp.async), and no barrier waits for them
  Look waits_for;  // word: these bits change; barrier: parity in bits; change: bits is the count of changes
};
struct Warp {
  int block, index;
  Lanes ready = kAllLanes, waiting = 0, arrived = 0, exited = 0;  // lanes
  int sync = kNone, line = 0;  // what its lanes come to; of an aligned instruction, the line in the PTX
  uint32_t time = 0;  // syncs so far
  uint32_t exchanged[2][kLanes];
  uint32_t fragments[2][kLanes][6];  // of a matrix product: each lane's a and b
  uint16_t releases[kLanes] = {};
  uint64_t checked = ~0ull;  // the count of changes at which no waiting lane could go on
};
struct Block {
  int grid, index, arrived = 0, exited = 0;  // warps
  std::unique_ptr<char[]> memory;
  char* shared;
};
struct Barrier {  // in shared memory stands its number
  int block, arrivals = 1, missing = 1;  // of a phase; of them, those that have not come
  int64_t bytes = 0;                     // that this phase expects and that are not there
  uint32_t phase = 0, begun = 0;         // phases completed, and begun
  int in_flight = 0;                     // copies begun and not there
  bool unawaited = false;                // copies begun, and nobody came back from a wait for them
  const Fiber* maker = nullptr;          // null: the copy engine knows it
  Lanes lanes = 0;                       // copy_chunk: that came to the running copy, and what this copies
  Piece copy{};
};
struct Copy {  // on its way; then the barrier has one arrival more, or so many bytes
  uint32_t barrier;
  std::vector<Piece> pieces;
  bool arrives;
  uint64_t due;
};

inline class Machine* machine;
inline Fiber* me;  // null in the scheduler

class Machine {
 public:
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<Barrier> barriers;
  int warps_per_block, shared_bytes, flags;
  bool copies_by_lane_0;  // who starts a copy: lane 0 (cp.async.bulk) or all lanes together (cp.async)
  uint64_t steps = 0, clock_ns = 1'000'000'000;
  uint64_t changes = 0;   // of words, flags and barriers
  uint64_t progress = 0;  // and of everything else that shows that the launch goes on
  std::string error;

  Machine(int grids, int grid_blocks, int threads, int shared, uint64_t seed, int launch_flags)
      : warps_per_block(threads / kLanes), shared_bytes(shared), flags(launch_flags), random_state_(seed * 2 + 1) {
    for (int i = 0; i < 8; ++i) random();
    copies_by_lane_0 = random() & 1, copy_delay_ = 1ull << random() % 12;
    for (int i = 0; i < grids * grid_blocks; ++i) add_block(i / grid_blocks, i % grid_blocks);
    auto nothing = std::make_shared<Clock>(warps.size());
    fibers.resize(warps.size() * kLanes);
    for (int i = 0; i < int(fibers.size()); ++i)
      fibers[i].warp = i / kLanes, fibers[i].lane = i % kLanes, fibers[i].known = nothing;
  }

  uint64_t random() {
    random_state_ ^= random_state_ >> 12, random_state_ ^= random_state_ << 25, random_state_ ^= random_state_ >> 27;
    return random_state_ * 0x2545f4914f6cdd1d >> 16;
  }
  void run(void (*start)());  // all fibers to their end, or to an error
  void leave() { emulator_switch(&me->stack_pointer, scheduler_); }
  void arrive(int sync);
  void exit_fiber();
  void wait(Wait kind, const void* at, uint64_t bits);
  Barrier& barrier_at(const void* full);  // of this block
  Barrier& make_barrier(void* full, int arrivals);
  void send(Barrier& barrier, std::vector<Piece> pieces, bool arrives);
  void arrive_at(Barrier& barrier, int count, int64_t bytes);

 private:
  uint64_t random_state_, copy_delay_, draw_at_ = 0, sweep_progress_ = ~0ull;
  int sweeps_ = 0;
  void* scheduler_ = nullptr;
  std::vector<int> drawn_;  // the warps that run in this stretch
  std::vector<Copy> in_flight_;
  size_t alive_ = 0;

  void add_block(int grid, int index);
  void prepare_stacks(void (*start)());
  void release(Warp& warp);
  void release_block(Block& block);
  bool can_go(const Fiber& fiber) const;
  bool runnable(Warp& warp);
  void draw_warps(bool all);
  Warp* next_warp();
  void take_turn(Warp& warp);
  void deliver(size_t i);
  void deliver_due();
  bool sweep();
  void check_end();
};

[[gnu::noinline]] inline std::string place(int warp, int lane = -1) {
  const Warp& w = machine->warps[warp];
  const Block& b = machine->blocks[w.block];
  std::string text = "grid " + std::to_string(b.grid) + " block " + std::to_string(b.index) + " warp " +
                     std::to_string(w.index);
  return lane < 0 ? text : text + " lane " + std::to_string(lane);
}
[[gnu::noinline]] inline std::string format(const char* pattern, ...) {
  char text[1024];
  va_list values;
  va_start(values, pattern);
  vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}
// ends the launch: from a fiber it does not return
[[gnu::noinline]] inline void fail(const std::string& what) {
  if (machine->error.empty()) machine->error = me ? place(me->warp, me->lane) + ": " + what : what;
  if (me) machine->leave();
}
std::string deadlock_report();  // order.h: it names the words

inline uint32_t index_of(const void* full) { return uint32_t(*static_cast<const uint64_t*>(full)); }
inline Warp& my_warp() { return machine->warps[me->warp]; }
inline Block& my_block() { return machine->blocks[my_warp().block]; }
inline std::string name(int sync) {
  if (sync == kBlockSync) return "sync_block";
  if (sync == kMultiply) return "multiply_tile";
  if (sync == kElect) return "elect";
  return sync == kWarpSync ? "sync_warp" : "shuffle_xor with mask " + std::to_string(sync - kShuffle);
}

// ---- what fibers call ----

[[gnu::noinline]] inline void Machine::arrive(int sync) {
  Warp& w = my_warp();
  if (w.exited) fail(format("diverged: comes to %s, lanes %08x have ended", name(sync).c_str(), w.exited));
  if (w.arrived && w.sync != sync)
    fail(format("diverged: comes to %s, lanes %08x wait at %s", name(sync).c_str(), w.arrived, name(w.sync).c_str()));
  if (sync == kBlockSync && my_block().exited) fail("comes to sync_block, warps of its block have ended");
  w.sync = sync, w.arrived |= kOneLane << me->lane, w.ready &= ~(kOneLane << me->lane);
  me->looked = 0, me->polled = nullptr;
  if (w.arrived == kAllLanes) {
    ++progress;
    if (sync != kBlockSync)
      release(w);
    else if (++my_block().arrived == warps_per_block)
      release_block(my_block());
  }
  leave();
}
inline void Machine::exit_fiber() {
  Warp& w = my_warp();
  if (w.arrived) fail(format("diverged: ends, lanes %08x wait at %s", w.arrived, name(w.sync).c_str()));
  w.ready &= ~(kOneLane << me->lane), w.exited |= kOneLane << me->lane;
  ++progress, --alive_;
  if (w.exited == kAllLanes) ++my_block().exited;
  if (w.exited == kAllLanes && my_block().arrived) fail("ends, warps of its block wait at sync_block");
  leave();
}
[[gnu::noinline]] inline void Machine::wait(Wait kind, const void* at, uint64_t bits) {
  Warp& w = my_warp();
  me->wait = kind, me->waits_for = {at, bits}, me->looked = 0;
  w.ready &= ~(kOneLane << me->lane), w.waiting |= kOneLane << me->lane, w.checked = ~0ull;
  leave();
}
inline Barrier& Machine::make_barrier(void* full, int arrivals) {
  barriers.push_back({.block = my_warp().block, .arrivals = arrivals, .missing = arrivals});
  *static_cast<uint64_t*>(full) = kBarrierMagic | (barriers.size() - 1);
  return barriers.back();
}
[[gnu::noinline]] inline Barrier& Machine::barrier_at(const void* full) {
  const uint64_t bits = *static_cast<const uint64_t*>(full);
  if (bits >> 32 != kBarrierMagic >> 32 || uint32_t(bits) >= barriers.size() ||
      barriers[uint32_t(bits)].block != my_warp().block)
    fail(format("%p is not a barrier of this block", full));
  return barriers[uint32_t(bits)];
}
inline void Machine::send(Barrier& barrier, std::vector<Piece> pieces, bool arrives) {
  ++barrier.in_flight, ++progress;
  in_flight_.push_back({uint32_t(&barrier - barriers.data()), std::move(pieces), arrives, steps + random() % copy_delay_});
}
// so many arrivals, and bytes that are expected (or, negative, are there): the last of both completes the phase
inline void Machine::arrive_at(Barrier& barrier, int count, int64_t bytes) {
  barrier.missing -= count, barrier.bytes += bytes, ++progress;
  if (barrier.missing < 0) fail("more arrivals at a barrier than its phase has");
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.arrivals, ++barrier.phase, ++changes;
}
// now and then, so that others come between any two accesses of memory
inline void maybe_pause() {
  if (machine->random() % 16 == 0) machine->leave();
}
inline void wait_for_change() { machine->wait(Wait::change, nullptr, machine->changes); }
// one of many looks without a sync: a loop over more than `looks` holds, or over the clock
inline void look() {
  if (++me->looked > 16) wait_for_change();
}
// whether a look at memory showed what this fiber saw there before: then others should run
inline bool fruitless(const void* at, uint64_t bits) {
  Look* last = std::find_if(me->looks, me->looks + 4, [&](const Look& look) { return look.at == at; });
  if (last == me->looks + 4) last = &me->looks[me->next_look++ % 4];
  const bool same = last->at == at && last->bits == bits;
  *last = {at, bits};
  return same;
}

// ---- syncs ----

inline void Machine::release(Warp& w) {
  Fiber* lanes = &fibers[(&w - warps.data()) * kLanes];
  const auto first = lanes[0].known;
  auto joined = first;
  for (int i = 1; i < kLanes; ++i) {
    if (lanes[i].known == first) continue;
    if (joined == first) joined = std::make_shared<Clock>(*first);
    join(*joined, *lanes[i].known);
  }
  if (joined != first)
    for (int i = 0; i < kLanes; ++i) lanes[i].known = joined;
  std::fill_n(w.releases, kLanes, 0);
  ++w.time, w.arrived = 0, w.ready = kAllLanes;
}
inline void Machine::release_block(Block& block) {
  const int first = int(&block - blocks.data()) * warps_per_block;
  auto joined = std::make_shared<Clock>(warps.size());
  for (int i = first; i < first + warps_per_block; ++i) {
    release(warps[i]);
    join(*joined, *fibers[i * kLanes].known);
    (*joined)[i].raise(warps[i].time);
  }
  for (int i = first * kLanes; i < (first + warps_per_block) * kLanes; ++i) fibers[i].known = joined;
  block.arrived = 0;
}

}  // namespace emulator

#include "scheduler.h"
