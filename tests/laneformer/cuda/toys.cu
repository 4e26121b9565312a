// Toy kernels for the emulator's own test: most of them wrong in a way that a real GPU might let pass.
#include "emulator.h"

struct Params {
  Word* words;  // [2][32 lanes]
  const float* in;
  float* out;
  int* flag;
  int rounds;
};

DEVICE float take(const Params& p, const Word* at, uint32_t epoch) {
  const uint64_t start = now_ns();
  for (;;) {
    const Word word = load_word(at);
    if (word.epoch == epoch) {
      accept(at, epoch);
      return word.value;
    }
    if (load_flag(p.flag)) return 0;
    if (now_ns() - start > 2'000'000'000 && set_first(p.flag)) p.out[thread_index()] = 1;
  }
}
DEVICE float warp_sum(float x) {
  for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// Another thread tells that thread 0 has read: true only behind a sync of the two.
enum Behind { the_reader_itself, nothing, warp_sync, block_sync };
DEVICE void acknowledge(const Params& p, Behind behind, int teller) {
  const int thread = thread_index();
  for (int round = 1; round <= p.rounds; ++round) {
    if (block_index() == 0 && thread == 0) {
      store_word(p.words, round, round);
      take(p, p.words + 1, round);
    } else if (block_index() == 1) {
      if (behind == the_reader_itself && thread == 0) store_word(p.words + 1, 0, round);  // and reads only then
      if (thread == 0) take(p, p.words, round);
      if (behind == warp_sync) sync_warp();
      if (behind == block_sync) sync_block();
      if (behind != the_reader_itself && thread == teller) store_word(p.words + 1, 0, round);
    }
  }
}
extern "C" __global__ void acknowledged(const Params p) { acknowledge(p, warp_sync, 1); }
extern "C" __global__ void acknowledged_by_a_warp(const Params p) { acknowledge(p, block_sync, 32); }
extern "C" __global__ void acknowledged_early(const Params p) { acknowledge(p, nothing, 1); }
extern "C" __global__ void acknowledged_before_reading(const Params p) { acknowledge(p, the_reader_itself, 0); }
extern "C" __global__ void acknowledged_early_by_a_warp(const Params p) { acknowledge(p, warp_sync, 32); }

// so late that the reader has long been there, in nearly all orders; but nothing makes it sure
extern "C" __global__ void overwrites_late(const Params p) {
  if (block_index() == 1) {
    take(p, p.words + thread_index(), 1);
    return;
  }
  store_word(p.words + thread_index(), 1, 1);
  for (int i = 0; i < 10'000; ++i) sync_warp();
  store_word(p.words + thread_index(), 1, 2);
}
extern "C" __global__ void two_writers(const Params p) {
  if (thread_index() == 0) store_word(p.words, 1, 1 + block_index());
}
extern "C" __global__ void two_lanes_write(const Params p) {
  if (thread_index() < 2) store_word(p.words, 1, 1 + thread_index());
}
extern "C" __global__ void waits_forever(const Params p) {
  if (thread_index() < 32) take(p, p.words + 7, 1);
  sync_block();
}

extern "C" __global__ void copies_unawaited(const Params p) {
  auto* full = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (thread_index() == 0) init_full(full);
  sync_warp();
  for (int i = 1; i <= p.rounds; ++i) copy_chunk(dynamic_shared() + i * 128, p.in, 128, full), sync_warp();
}
extern "C" __global__ void diverges(const Params p) {
  if (thread_index() < 16)
    warp_sum(1);
  else
    sync_warp();
}
extern "C" __global__ void leaves_early(const Params p) {
  if (thread_index() != 5) sync_warp();
}
extern "C" __global__ void writes_outside(const Params p) { dynamic_shared()[64 + thread_index()] = 0; }

EMULATE(acknowledged, Params)
EMULATE(acknowledged_by_a_warp, Params)
EMULATE(acknowledged_early, Params)
EMULATE(acknowledged_before_reading, Params)
EMULATE(acknowledged_early_by_a_warp, Params)
EMULATE(overwrites_late, Params)
EMULATE(two_writers, Params)
EMULATE(two_lanes_write, Params)
EMULATE(waits_forever, Params)
EMULATE(copies_unawaited, Params)
EMULATE(diverges, Params)
EMULATE(leaves_early, Params)
EMULATE(writes_outside, Params)
