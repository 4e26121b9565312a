// The proof that words are not overwritten early: what a store may assume must follow from the program, not from luck.
//
// The epochs fix which store a read sees, so one run shows what happens before what in every schedule of this launch:
// a thread that accepts a word then knows all that its writer knew; a sync joins what its threads know. A store is in
// order if every accepted read of the word's last value, and the store of that value, happen before it.
#pragma once
#include <unordered_map>

#include "machine.h"

struct alignas(8) Word {
  float value;
  uint32_t epoch;
};

namespace emulator {

struct WordRecord {
  Event writer;  // of the value it holds; none in this launch: warp -1
  std::shared_ptr<Clock> writer_knew;
  std::vector<Event> reads;  // of the value it holds
};
struct Range {
  std::string name;
  const char* base;
  uint64_t bytes;
};
struct Report {
  uint64_t stores = 0, accepted = 0, overwritten_unread = 0, steps = 0;
};

inline std::vector<Range> ranges;
inline Report report;
inline std::unordered_map<const Word*, WordRecord> words;

inline std::string name(const void* at) {
  const char* byte = static_cast<const char*>(at);
  for (const Range& r : ranges)
    if (byte >= r.base && byte < r.base + r.bytes)
      return format("%s[%lld]", r.name.c_str(), static_cast<long long>((byte - r.base) / 8));
  return format("%p", at);
}
inline Event my_event() { return {me->warp, me->lane, my_warp().time, my_warp().releases[me->lane]}; }

inline bool happens_before_me(const Event& e) {
  if (e.warp == me->warp && (e.lane == me->lane || e.time < my_warp().time)) return true;
  const Stamp& known = (*me->known)[e.warp];
  return known.time > e.time || (known.time == e.time && known.releases[e.lane] > e.releases);
}
[[gnu::noinline]] inline void learn(const Event& writer, const Clock& writer_knew) {
  if (me->known.use_count() > 1) me->known = std::make_shared<Clock>(*me->known);
  join(*me->known, writer_knew);
  (*me->known)[writer.warp].raise(writer.time, writer.lane, writer.releases + 1);
}

[[gnu::noinline]] inline void accept(const Word* at, uint32_t epoch) {
  if (at->epoch != epoch)
    fail(format("overwritten early: %s, epoch %u by %u, before it was accepted", name(at).c_str(), epoch, at->epoch));
  WordRecord& word = words[at];
  if (word.writer.warp >= 0 && !happens_before_me(word.writer)) learn(word.writer, *word.writer_knew);
  word.reads.push_back(my_event());
  me->polled = nullptr;
  ++report.accepted, ++machine->progress;
}
// why a store of this epoch is not in order; empty: it is
[[gnu::noinline]] inline std::string disorder(const Word* at, const WordRecord& word, uint32_t epoch) {
  if (int32_t(epoch - at->epoch) <= 0) return "the epoch does not grow: ";
  if (word.writer.warp >= 0 && !happens_before_me(word.writer))
    return "two stores without an order, the first one of " + place(word.writer.warp, word.writer.lane) + ": ";
  for (const Event& read : word.reads)
    if (!happens_before_me(read))
      return "overwritten early, nothing makes this store wait for the read of " + place(read.warp, read.lane) + ": ";
  return "";
}
[[gnu::noinline]] inline void store(Word* at, float value, uint32_t epoch) {
  maybe_pause();
  if (reinterpret_cast<uintptr_t>(at) % 8) fail(format("%p is no place for a word: not 8-aligned", at));
  WordRecord& word = words[at];
  if (const std::string why = disorder(at, word, epoch); !why.empty())
    fail(why + name(at) + format(", epoch %u by %u", at->epoch, epoch));
  report.overwritten_unread += word.writer.warp >= 0 && word.reads.empty();
  word.writer = my_event(), word.writer_knew = me->known;
  word.reads.clear();
  if (++my_warp().releases[me->lane] == 65535) fail("65535 stores of one lane between two syncs of its warp");
  *at = {value, epoch};
  ++report.stores, ++machine->changes, ++machine->progress;
}

// ---- what stands still ----

// a lane polls a word that was stored in this launch, and its warp has not taken the value: another epoch is gone
inline bool missed(const Fiber& f) {
  const auto found = words.find(static_cast<const Word*>(f.polled));
  if (f.wait == Wait::barrier || found == words.end() || found->second.writer.warp < 0) return false;
  for (const Event& read : found->second.reads)
    if (read.warp == f.warp) return false;
  return true;
}
inline std::string waits_for(const Fiber& f) {
  if (f.wait != Wait::barrier && f.polled)
    return "for " + name(f.polled) + format(", which holds epoch %u", static_cast<const Word*>(f.polled)->epoch);
  if (f.wait != Wait::barrier) return "for a change of memory";
  const Barrier& b = machine->barriers[index_of(f.waits_for.at)];
  return format("for the copy that completes parity %d of a barrier; %u completed, lanes %08x came to the next",
                int(f.waits_for.bits), b.phase, b.lanes);
}
inline std::string deadlock_report() {
  std::string text;
  bool late = false;
  int shown = 0;
  for (const Warp& w : machine->warps) {
    const int index = int(&w - machine->warps.data());
    if (w.exited == kAllLanes) continue;
    const int lane = std::countr_zero(w.waiting);  // kLanes: none
    for (Lanes left = w.waiting; left; left &= left - 1)
      late = late || missed(machine->fibers[index * kLanes + std::countr_zero(left)]);
    if (++shown > 8) continue;
    if (w.arrived) text += "\n" + place(index) + format(" lanes %08x wait at ", w.arrived) + name(w.sync);
    if (lane < kLanes)
      text += "\n" + place(index) + format(" lanes %08x poll; lane %d waits ", w.waiting, lane) +
              waits_for(machine->fibers[index * kLanes + lane]);
  }
  if (shown > 8) text += format("\nand %d warps more", shown - 8);
  return (late ? "deadlock: a word was overwritten early, before it was read, or has a wrong epoch"
               : "deadlock: nothing can go on") + text;
}

}  // namespace emulator
