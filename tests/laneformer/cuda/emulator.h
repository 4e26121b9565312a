// The decode kernels on the CPU: what CUDA C++ has built in and primitives.cuh offers, over an emulated machine.
//
// A translation unit is: the generated prefix, this header, the kernels, and EMULATE(kernel, Params) for each of them.
// emulator.py builds and starts it. The emulator can do one launch at a time.
#pragma once
#include <math.h>

#include "launch.h"
#include "warp.h"

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
DEVICE float shuffle_xor(float value, int mask) { return float_of(emulator::shuffle(bits_of(value), mask)); }
DEVICE int shuffle_xor(int value, int mask) { return int(emulator::shuffle(uint32_t(value), mask)); }
DEVICE char* dynamic_shared() { return emulator::my_block().shared; }
DEVICE uint64_t now_ns() {
  emulator::look();
  return emulator::machine->clock_ns;
}


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

SLOW void init_full(uint64_t* full) { emulator::machine->make_barrier(full, 1); }
DEVICE void fence_full() {}
// The slot is spoilt when the first lane comes; the bytes are there some time after lane 0, or all lanes, have come.
SLOW void copy_chunk(void* slot, const void* source, uint32_t bytes, uint64_t* full) {
  using namespace emulator;
  maybe_pause();
  Barrier& b = machine->barrier_at(full);
  const char* shared = dynamic_shared();
  char* to = static_cast<char*>(slot);
  if ((reinterpret_cast<uintptr_t>(slot) | reinterpret_cast<uintptr_t>(source) | bytes) % 16 || !bytes)
    fail(format("copy_chunk of %u bytes from %p to %p: all must be multiples of 16", bytes, source, slot));
  if (to < shared || to + bytes > shared + machine->shared_bytes) fail("copy_chunk to outside shared memory");
  if (b.lanes >> me->lane & 1) fail(format("copy_chunk again, only lanes %08x came to the copy before", b.lanes));
  if (b.lanes == 0) {
    if (b.unawaited) fail("copy_chunk to a barrier whose last copy nobody has waited for");
    b.copy = {to, static_cast<const char*>(source), bytes}, b.unawaited = true;
    memset(slot, 0xff, bytes);
  } else if (b.copy.to != to || b.copy.from != source || b.copy.bytes != bytes) {
    fail("copy_chunk: the lanes of the warp differ in what they copy");
  }
  see_copy(to, bytes, int(index_of(full)), b.phase + 1);
  b.lanes |= kOneLane << me->lane;
  if (machine->copies_by_lane_0 ? me->lane == 0 : b.lanes == kAllLanes) machine->send(b, {b.copy}, true);
  if (b.lanes == kAllLanes) b.lanes = 0;
  ++machine->progress;
}
SLOW void wait_full(uint64_t* full, uint32_t parity) {
  emulator::maybe_pause();
  if (parity > 1) emulator::fail("wait_full with parity " + std::to_string(parity) + "; allowed: 0 and 1");
  if ((emulator::machine->barrier_at(full).phase & 1) == parity)
    emulator::machine->wait(emulator::Wait::barrier, full, parity);
  emulator::Barrier& b = emulator::machine->barrier_at(full);
  if (!b.in_flight) b.unawaited = false;
  emulator::see_wait(int(emulator::index_of(full)), b.phase);
}
DEVICE void prefetch_l2(const void* at, uint32_t bytes) {}
DEVICE void wait_for_previous() {}
DEVICE void let_next_start() {}

// ---- 16-bit numbers: two in a 32-bit word, the first one low ----

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

SLOW void multiply_tile(float (&sum)[4], uint4 a, uint2 b) {
  emulator::multiply<WEIGHTS_BF16>(sum, {a.x, a.y, a.z, a.w, b.x, b.y});
}
