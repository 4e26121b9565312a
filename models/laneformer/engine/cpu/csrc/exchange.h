// What threads give each other: a mailbox of modules' partial outputs, and a counter of each thread and kind.
//
// A thread writes a slot, then publishes its count; whoever has seen the count may read the slot. Slots are a ring over
// layers. All of it is one region without pointers: its own pages, or zeroed memory of somebody else, such as a mapping
// that several processes share.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>

#include "model.h"
#include "system.h"

namespace laneformer {

struct alignas(128) Counter {  // a line of Apple's cores, and the two that x86 fetches together
  std::atomic<uint64_t> value{0};
};

class Exchange {
 public:
  // meetings of a process's threads; of those that share a lane; of all processes (by rank, of which there are no more)
  enum Count : int { kModulesDone, kMet, kGroupMet, kProcessesMet };
  struct Shape {
    int ring_layers, lanes, threads;
    size_t floats;  // of a slot
    size_t counters() const { return 1 + kCounts * size_t(threads); }
    size_t slots() const { return ring_layers * 2 * size_t(lanes); }
    size_t bytes() const { return counters() * sizeof(Counter) + slots() * floats * sizeof(float); }
  };

  Exchange(const Shape& shape, int spin_turns) : Exchange(shape, spin_turns, Pages(shape.bytes())) {}
  Exchange(const Shape& shape, int spin_turns, Pages memory)
      : shape_(shape),
        spin_turns_(spin_turns),
        memory_(std::move(memory)),
        counters_(reinterpret_cast<Counter*>(memory_.bytes())),
        slots_(reinterpret_cast<float*>(memory_.bytes() + shape.counters() * sizeof(Counter))) {}

  float* slot(uint64_t layer, Module module, int lane) const {
    return slots_ + ((layer % shape_.ring_layers * 2 + module) * shape_.lanes + lane) * shape_.floats;
  }

  // By thread t alone; a count only grows.
  void publish(Count what, int t, uint64_t count) { counter(what, t).store(count, std::memory_order_release); }
  uint64_t published(Count what, int t) const { return counter(what, t).load(std::memory_order_relaxed); }
  // Until every thread of [first, last) but t has published `count` or more; at once where a process is lost.
  void wait_for(Count what, int t, int first, int last, uint64_t count) const {
    for (int peer = first; peer < last; ++peer)
      if (peer != t)
        spin_until(spin_turns_, [&] { return counter(what, peer).load(std::memory_order_acquire) >= count || lost(); });
  }
  // The threads of [first, last), t among them, wait for each other.
  void meet(Count what, int t, int first, int last) {
    const uint64_t number = published(what, t) + 1;
    publish(what, t, number);
    wait_for(what, t, first, last, number);
  }

  // Why no wait ends any more, and nothing that was waited for may be used; 0: all processes are there. It is the first
  // word of the memory.
  enum Loss : uint64_t { kNoLoss, kProcessLost, kProcessesDisagree };
  Loss lost() const { return static_cast<Loss>(counters_[0].value.load(std::memory_order_acquire)); }
  void lose(Loss why) { counters_[0].value.store(why, std::memory_order_release); }

 private:
  static constexpr int kCounts = 4;
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters lie in memory that processes share");
  std::atomic<uint64_t>& counter(Count what, int t) const { return counters_[1 + what * shape_.threads + t].value; }

  const Shape shape_;
  const int spin_turns_;
  const Pages memory_;
  Counter* const counters_;
  float* const slots_;
};

}  // namespace laneformer
