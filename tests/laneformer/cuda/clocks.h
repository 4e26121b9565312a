// Vector clocks of the emulated threads: what each of them knows to lie behind the others.
//
// An entry stands for a warp, and is exact for each lane: a warp's lanes know of each other only at its syncs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
using Lanes = uint32_t;  // a bit for each
constexpr Lanes kOneLane = 1, kAllLanes = ~Lanes{0};

// What is known of one warp: all its lanes up to sync `time`, and of what follows the first releases of each lane.
struct Stamp {
  uint32_t time = 0;
  uint16_t releases[kLanes] = {};
  void raise(uint32_t to) {
    if (to > time) *this = {.time = to};
  }
  void raise(uint32_t at, int lane, uint16_t count) {
    raise(at);
    if (at == time) releases[lane] = std::max(releases[lane], count);
  }
  void join(const Stamp& other) {
    if (other.time > time) *this = other;
    if (other.time == time)
      for (int i = 0; i < kLanes; ++i) releases[i] = std::max(releases[i], other.releases[i]);
  }
};
using Clock = std::vector<Stamp>;
struct Event {  // a read or a write: which lane of which warp, after its warp's sync `time` and so many releases
  int warp = -1, lane = 0;
  uint32_t time = 0;
  uint16_t releases = 0;
};
inline void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i].join(other[i]);
}

}  // namespace emulator
