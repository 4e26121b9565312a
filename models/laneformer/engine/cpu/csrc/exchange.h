// What threads give each other: a mailbox of modules' partial outputs, and a counter for each thread and kind of event.
//
// A thread writes a slot, then publishes its count; whoever has seen the count may read the slot. Slots are
// a ring over layers. All of it lies in one region.
//
// A delay line, for measurements: what a thread publishes becomes readable by threads of other lanes a time
// after it was published, as over a link of that latency. The publisher stamps when; the reader waits for
// the count, then for the clock.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "model.h"
#include "system.h"

namespace laneformer {

struct alignas(128) Counter {  // a line of Apple's cores, and the two that x86 fetches together
  std::atomic<uint64_t> value{0};
};

class Exchange {
 public:
  enum Count : int { kModulesDone, kMet, kLaneMet };  // kMet: meetings of all threads; kLaneMet: of those of a lane
  struct Shape {
    int ring_layers, lanes, threads;
    size_t floats;  // in a slot
    size_t counters() const { return kCounts * size_t(threads); }
    size_t slots() const { return ring_layers * 2 * size_t(lanes); }
    // A counter's stamps are a ring: whoever waits for a count is less than this behind the thread that publishes it.
    size_t stamps() const { return size_t(8) * ring_layers; }
    size_t counter_bytes() const { return counters() * (sizeof(Counter) + stamps() * sizeof(Stamp)); }
    size_t bytes() const { return counter_bytes() + slots() * floats * sizeof(float); }
  };

  Exchange(const Shape& shape, int spin_turns)
      : shape_(shape),
        spin_turns_(spin_turns),
        memory_(shape.bytes()),
        counters_(reinterpret_cast<Counter*>(memory_.bytes())),
        stamps_(reinterpret_cast<Stamp*>(memory_.bytes() + shape.counters() * sizeof(Counter))),
        slots_(reinterpret_cast<float*>(memory_.bytes() + shape.counter_bytes())) {}

  // Sets the time from publishing a count to its arrival; 0: no delay line. No thread may use the exchange meanwhile.
  // first_of_lane: for each thread the first one of those that share its lane.
  void set_latency(double link_s, std::vector<int> first_of_lane) {
    link_s_ = link_s;
    first_of_lane_ = std::move(first_of_lane);
  }

  float* slot(uint64_t layer, Module module, int lane) const {
    return slots_ + ((layer % shape_.ring_layers * 2 + module) * shape_.lanes + lane) * shape_.floats;
  }

  // Only thread t calls this for its counters; counts go up one by one.
  void publish(Count what, int t, uint64_t count) {
    if (link_s_ > 0.0) [[unlikely]] stamp_arrival(what, t, count);
    counter(what, t).store(count, std::memory_order_release);
  }
  // Waits until every thread of [first, last) but t has published `count` or more.
  void wait_for(Count what, int t, int first, int last, uint64_t count) const {
    for (int peer = first; peer < last; ++peer) {
      if (peer == t) continue;
      spin_until(spin_turns_, [&] { return counter(what, peer).load(std::memory_order_acquire) >= count; });
      if (link_s_ > 0.0) [[unlikely]] await_arrival(what, t, peer, count);
    }
  }
  // Every thread waits for every other.
  void meet(int t) { meet(kMet, t, 0, shape_.threads); }
  // The threads that share a lane wait for each other; nothing to do where a lane has one thread.
  void meet_lane(int t, const ThreadPlan& plan) {
    if (plan.members > 1) meet(kLaneMet, t, plan.leader, plan.leader + plan.members);
  }
  // Waits until every thread has finished so many modules, counted over all passes.
  void wait_for_modules(int t, uint64_t modules) const {
    wait_for(kModulesDone, t, 0, shape_.threads, modules);
  }
  template <class Ready>
  void wait_until(const Ready& ready) const {
    spin_until(spin_turns_, ready);
  }

 private:
  static constexpr int kCounts = 3;
  using Stamp = std::atomic<int64_t>;  // nanoseconds of the steady clock
  void meet(Count what, int t, int first, int last) {
    const uint64_t number = published(what, t) + 1;
    publish(what, t, number);
    wait_for(what, t, first, last, number);
  }
  std::atomic<uint64_t>& counter(Count what, int t) const { return counters_[what * shape_.threads + t].value; }
  Stamp& stamp(Count what, int t, uint64_t count) const {
    return stamps_[(what * shape_.threads + t) * shape_.stamps() + count % shape_.stamps()];
  }
  uint64_t published(Count what, int t) const { return counter(what, t).load(std::memory_order_relaxed); }
  static int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // Comes before the count, whose release orders the stamp for whoever reads it.
  void stamp_arrival(Count what, int t, uint64_t count) {
    stamp(what, t, count).store(now_ns() + static_cast<int64_t>(1e9 * link_s_), std::memory_order_relaxed);
  }
  void await_arrival(Count what, int t, int peer, uint64_t count) const {
    if (first_of_lane_[t] == first_of_lane_[peer]) return;
    const int64_t arrival_ns = stamp(what, peer, count).load(std::memory_order_relaxed);
    while (now_ns() < arrival_ns) spin_turns_ ? pause_briefly() : std::this_thread::yield();
  }

  const Shape shape_;
  const int spin_turns_;
  const Pages memory_;
  Counter* const counters_;
  Stamp* const stamps_;
  float* const slots_;
  double link_s_ = 0.0;
  std::vector<int> first_of_lane_;
};

}  // namespace laneformer
