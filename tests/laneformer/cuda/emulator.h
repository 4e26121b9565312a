// The decode kernels on the CPU: what CUDA C++ has built in and primitives.cuh offers, over an emulated machine.
//
// A translation unit is: the generated prefix, this header, the kernels, and EMULATE(kernel, Params) for each of them.
// emulator.py builds and starts it. The emulator can do one launch at a time.
#pragma once
#include <math.h>

#include "machine.h"
#include "order.h"
#include "races.h"

// ---- the language ----

#define DEVICE inline
#define DEVICE_CALL [[gnu::noinline]] inline
#define SLOW [[gnu::noinline]] inline  // out of line: compiles sooner
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
DEVICE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
DEVICE int min(int a, int b) { return a < b ? a : b; }
DEVICE int max(int a, int b) { return a > b ? a : b; }
DEVICE uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
DEVICE uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
DEVICE float rsqrtf(float x) { return 1 / sqrtf(x); }
DEVICE float __expf(float x) { return expf(x); }
DEVICE float __logf(float x) { return logf(x); }
DEVICE float __fdividef(float a, float b) { return a / b; }

// ---- threads ----

DEVICE int block_index() { return emulator::my_block().index; }
DEVICE int thread_index() { return emulator::my_warp().index * emulator::kLanes + emulator::me->lane; }
DEVICE int here(int value) { return value; }
DEVICE void sync_block() { emulator::machine->arrive(emulator::kBlockSync); }
DEVICE void sync_warp() { emulator::machine->arrive(emulator::kWarpSync); }
DEVICE uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return made;
}
DEVICE uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
DEVICE float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
// Two sets of values: a fast lane comes to the next shuffle before a slow one has taken its value of this one.
SLOW uint32_t emulated_shuffle(uint32_t value, int mask) {
  if (mask < 0 || mask >= emulator::kLanes) emulator::fail("shuffle_xor with mask " + std::to_string(mask));
  emulator::Warp* warp = &emulator::my_warp();
  const int set = warp->time & 1, lane = emulator::me->lane;
  warp->exchanged[set][lane] = value;
  emulator::machine->arrive(emulator::kShuffle + mask);
  return warp->exchanged[set][lane ^ mask];
}
DEVICE float shuffle_xor(float value, int mask) { return float_of(emulated_shuffle(bits_of(value), mask)); }
DEVICE int shuffle_xor(int value, int mask) { return int(emulated_shuffle(uint32_t(value), mask)); }
DEVICE char* dynamic_shared() { return emulator::my_block().shared; }
DEVICE uint64_t now_ns() {
  emulator::look();
  return emulator::machine->clock_ns;
}

DEVICE uint64_t cycles() { return emulator::machine->steps; }
DEVICE void add_to(uint64_t* at, uint64_t value) { *at += value; }

// ---- words ----

struct WordPair {
  Word a, b;
};
#if GRAPH  // kernels follow each other: a plain number, which is there
DEVICE void store_word(Word* at, float value, uint32_t) { at->value = value; }
DEVICE Word load_word(const Word* at) { return *at; }
DEVICE WordPair load_words(const Word* at) { return {at[0], at[1]}; }
DEVICE bool is_of(Word, uint32_t) { return true; }
DEVICE void accept(const Word*, uint32_t) {}
#else
DEVICE bool is_of(Word word, uint32_t epoch) { return word.epoch == epoch; }
DEVICE void store_word(Word* at, float value, uint32_t epoch) { emulator::store(at, value, epoch); }
DEVICE Word word_of(uint64_t bits) { return {float_of(uint32_t(bits)), uint32_t(bits >> 32)}; }
SLOW Word load_word(const Word* at) {
  emulator::maybe_pause();
  emulator::look();
  emulator::me->polled = at;
  const auto* word = reinterpret_cast<const volatile uint64_t*>(at);
  uint64_t bits = *word;
  if (emulator::fruitless(at, bits)) {
    emulator::machine->wait(emulator::Wait::word, at, bits);
    bits = *word;
    emulator::fruitless(at, bits);
  }
  return word_of(bits);
}
// the two are loaded apart, in any order
DEVICE WordPair load_words(const Word* at) {
  if (reinterpret_cast<uintptr_t>(at) % 16) emulator::fail("load_words of " + emulator::name(at) + ": not 16-aligned");
  const bool second_first = emulator::machine->random() & 1;
  const Word b = second_first ? load_word(at + 1) : Word{}, a = load_word(at);
  return {a, second_first ? b : load_word(at + 1)};
}
DEVICE void accept(const Word* at, uint32_t epoch) { emulator::accept(at, epoch); }
#endif
constexpr bool kBulkCopies = true;
DEVICE void tell_host(uint64_t* at, float value, uint32_t epoch) {
  emulator::maybe_pause();
  *at = uint64_t(epoch) << 32 | bits_of(value);
  ++emulator::machine->progress;
}

SLOW int load_flag(const int* at) {
  emulator::maybe_pause();
  const volatile int* flag = at;
  if (emulator::fruitless(at, uint32_t(*flag))) emulator::wait_for_change();
  return *flag;
}
DEVICE void emulated_flag(int* at, int value) {
  *at = value;
  ++emulator::machine->changes, ++emulator::machine->progress;
}
DEVICE void publish_flag(int* at, int value) {
  emulator::maybe_pause();
  emulated_flag(at, value);
}
DEVICE bool set_first(int* at) {
  emulator::maybe_pause();
  if (*at) return false;
  emulated_flag(at, 1);
  return true;
}

// ---- chunks of weights ----

SLOW void init_full(uint64_t* full) {
  emulator::machine->barriers.push_back({.block = emulator::my_warp().block});
  *full = emulator::kBarrierMagic | (emulator::machine->barriers.size() - 1);
}
DEVICE void fence_full() {}
SLOW emulator::Barrier& barrier_at(const uint64_t* full) {
  auto& barriers = emulator::machine->barriers;
  if (*full >> 32 != emulator::kBarrierMagic >> 32 || uint32_t(*full) >= barriers.size() ||
      barriers[uint32_t(*full)].block != emulator::my_warp().block)
    emulator::fail(emulator::format("%p is not a barrier of this block", full));
  return barriers[uint32_t(*full)];
}
// The slot is spoilt when the first lane comes; the bytes are there some time after lane 0, or all lanes, have come.
SLOW void copy_chunk(void* slot, const void* source, uint32_t bytes, uint64_t* full) {
  using namespace emulator;
  maybe_pause();
  Barrier& b = barrier_at(full);
  const char* shared = dynamic_shared();
  char* to = static_cast<char*>(slot);
  if ((reinterpret_cast<uintptr_t>(slot) | reinterpret_cast<uintptr_t>(source) | bytes) % 16 || !bytes)
    fail(format("copy_chunk of %u bytes from %p to %p: all must be multiples of 16", bytes, source, slot));
  if (to < shared || to + bytes > shared + machine->shared_bytes) fail("copy_chunk to outside shared memory");
  if (b.lanes >> me->lane & 1) fail(format("copy_chunk again, only lanes %08x came to the copy before", b.lanes));
  if (b.lanes == 0) {
    if (b.unawaited) fail("copy_chunk to a barrier whose last copy nobody has waited for");
    b.slot = to, b.source = static_cast<const char*>(source), b.bytes = bytes, b.in_flight = b.unawaited = true;
    memset(slot, 0xff, bytes);
  } else if (b.slot != to || b.source != source || b.bytes != bytes) {
    fail("copy_chunk: the lanes of the warp differ in what they copy");
  }
  see_copy(to, bytes, int(index_of(full)), b.phase + 1);
  b.lanes |= kOneLane << me->lane;
  if (machine->copies_by_lane_0 ? me->lane == 0 : b.lanes == kAllLanes) machine->send(b);
  if (b.lanes == kAllLanes) b.lanes = 0;
  ++machine->progress;
}
SLOW void wait_full(uint64_t* full, uint32_t parity) {
  emulator::maybe_pause();
  if (parity > 1) emulator::fail("wait_full with parity " + std::to_string(parity) + "; allowed: 0 and 1");
  if ((barrier_at(full).phase & 1) == parity) emulator::machine->wait(emulator::Wait::barrier, full, parity);
  emulator::Barrier& b = barrier_at(full);
  if (!b.in_flight) b.unawaited = false;
  emulator::see_wait(int(emulator::index_of(full)), b.phase);
}
DEVICE void prefetch_l2(const void* at, uint32_t bytes) {}
DEVICE void wait_for_previous() {}
DEVICE void let_next_start() {}

// ---- 16-bit numbers: two in a 32-bit word, the first one low; rounded to nearest even ----

DEVICE uint32_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// Scaling by powers of two moves the exponent, and lets the FPU round what is subnormal in 16 bits.
DEVICE uint32_t fp16_of(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const float size = fabsf(value);
  if (value != value) return 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | (bits_of(size + 0.5f) - bits_of(0.5f));  // steps of 2^-24
  const uint32_t bits = bits_of(size) - (112u << 23);
  return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}
DEVICE float float_of_fp16(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16, size = (half & 0x7fff) << 13;
  if (size >= 0x7c00u << 13) return float_of(sign | 0x7f800000 | size);  // infinite, or no number
  return float_of(sign | bits_of(float_of(size) * 0x1p112f));
}
#if WEIGHTS_BF16
DEVICE float low_half(uint32_t pair) { return float_of(pair << 16); }
DEVICE float high_half(uint32_t pair) { return float_of(pair & 0xffff0000u); }
DEVICE uint32_t pack_halves(float low, float high) { return bf16_of(high) << 16 | bf16_of(low); }
#else
DEVICE float low_half(uint32_t pair) { return float_of_fp16(pair & 0xffff); }
DEVICE float high_half(uint32_t pair) { return float_of_fp16(pair >> 16); }
DEVICE uint32_t pack_halves(float low, float high) { return fp16_of(high) << 16 | fp16_of(low); }
#endif

// ---- a warp's matrix product, as primitives.cuh describes it ----

// Each sum is made in the order of b's rows; a GPU adds some of them at once, and rounds elsewhere.
SLOW void multiply_tile(float (&sum)[4], uint4 a, uint2 b) {
  emulator::Warp* warp = &emulator::my_warp();
  auto& all = warp->fragments[warp->time & 1];
  const int lane = emulator::me->lane, c = lane % 4;
  const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
  memcpy(all[lane], mine, sizeof mine);
  emulator::machine->arrive(emulator::kMultiply);
  for (int of = 0; of < 4; ++of)  // which of the thread's four sums
    for (int k = 0; k < 16; ++k) {
      const uint32_t row = all[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + of / 2], column = all[(2 * c + of % 2) * 4 + k % 8 / 2][4 + k / 8];
      sum[of] = fmaf(k % 2 ? high_half(row) : low_half(row), k % 2 ? high_half(column) : low_half(column), sum[of]);
    }
}

// ---- for Python ----

extern "C" void emulator_name(const char* name, const void* base, uint64_t bytes) {
  emulator::ranges.push_back({name, static_cast<const char*>(base), bytes});
}
extern "C" void emulator_report(uint64_t* stores_accepted_overwritten_unread_steps) {
  memcpy(stores_accepted_overwritten_unread_steps, &emulator::report, sizeof emulator::report);
}
namespace emulator {
inline int launch(void (*start)(), int grids, int blocks, int threads, int shared, uint64_t seed, int flags,
                  char* error, int error_size) {
  Machine emulated(grids, blocks, threads, shared, seed, flags);
  machine = &emulated;
  report = {}, words.clear();
  begin_plain();
  emulated.run(start);
  report.steps = emulated.steps;
  ranges.clear(), words.clear();
  snprintf(error, error_size, "%s", emulated.error.c_str());
  return emulated.error.empty() ? 0 : 1;
}
}  // namespace emulator

// params: one for each grid
#define EMULATE(kernel, Params)                                                                                       \
  extern "C" int emulate_##kernel(const Params* params, int grids, int blocks, int threads, int shared_bytes,         \
                                  uint64_t seed, int flags, char* error, int error_size) {                            \
    static const Params* all;                                                                                         \
    all = params;                                                                                                     \
    const auto start = [] {                                                                                           \
      kernel(all[emulator::my_block().grid]);                                                                         \
      emulator::machine->exit_fiber();                                                                                \
    };                                                                                                                \
    return emulator::launch(start, grids, blocks, threads, shared_bytes, seed, flags, error, error_size);             \
  }
