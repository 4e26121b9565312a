// primitives.cuh for AMD GPUs: warps are wavefronts of 64 threads. Compiled for gfx942 and run in the tests' emulator;
// never run on a GPU, and nothing launches it yet.
//
// No header is included: clang's builtins stand for HIP's library. No GPU of AMD's up to gfx942 has a barrier that copies
// complete. A wavefront's loads end in their order, so to wait for a chunk is to wait until no more loads are under way
// than were begun after it. The same order makes a word wait for the chunks that were begun before it.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __constant__ __attribute__((constant))
#define __grid_constant__
// one block a compute unit: the waves on each of its four SIMDs share 512 registers a thread
#define __launch_bounds__(threads, blocks) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu((threads + 255) / 256)))

#define INFINITY __builtin_inff()
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#define DEVICE __attribute__((host, device)) inline __attribute__((always_inline))  // host: in constants
#define DEVICE_CALL DEVICE

#include "vectors.cuh"

DEVICE int min(int a, int b) { return a < b ? a : b; }
DEVICE int max(int a, int b) { return a > b ? a : b; }
DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float rsqrtf(float x) { return __builtin_amdgcn_rsqf(x); }
DEVICE float expf(float x) { return __builtin_elementwise_exp(x); }
DEVICE float logf(float x) { return __builtin_elementwise_log(x); }

DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int here(int value) {
  asm volatile("" : "+v"(value));
  return value;
}
DEVICE void sync_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void sync_warp() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE int shuffle_xor(int value, int mask) {
  return __builtin_amdgcn_ds_bpermute(((thread_index() % WARP_THREADS) ^ mask) * 4, value);
}
DEVICE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEVICE float shuffle_xor(float value, int mask) { return float_of(shuffle_xor(static_cast<int>(bits_of(value)), mask)); }
DEVICE char* dynamic_shared() {
  extern __attribute__((shared, aligned(128))) char shared[];
  return shared;
}
DEVICE uint64_t now_ns() { return __builtin_readsteadycounter() * 10; }  // a clock of 100 MHz

// ---- words, stored and loaded whole ----

#include "words.cuh"

#if !GRAPH
#if DEVICES > 1
#define SCOPE __HIP_MEMORY_SCOPE_SYSTEM
#else
#define SCOPE __HIP_MEMORY_SCOPE_AGENT  // all chiplets; there is no scope of one chiplet
#endif

DEVICE void store_word(Word* at, float value, uint32_t epoch) {
  __hip_atomic_store(reinterpret_cast<uint64_t*>(at), bits_of_word(value, epoch), __ATOMIC_RELAXED, SCOPE);
}
DEVICE Word load_word(const Word* at) {
  return word_of(__hip_atomic_load(reinterpret_cast<const uint64_t*>(at), __ATOMIC_RELAXED, SCOPE));
}
DEVICE WordPair load_words(const Word* at) { return {load_word(at), load_word(at + 1)}; }
#endif

DEVICE int load_flag(const int* at) { return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void publish_flag(int* at, int value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE bool set_first(int* at) {
  int expected = 0;
  return __hip_atomic_compare_exchange_strong(at, &expected, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                              __HIP_MEMORY_SCOPE_AGENT);
}

// ---- chunks of weights: global memory to shared memory past the registers, 4 bytes a thread at once ----

constexpr int kCopyBytes = 4 * WARP_THREADS;  // of one instruction

DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>((__attribute__((address_space(3))) const char*)pointer));
}
DEVICE void init_full(uint64_t*) {}
DEVICE void fence_full() {}
// All threads of a warp, whole segments. What they read of the slot has arrived before it is overwritten (lgkmcnt). In
// assembly, because of the builtin the compiler knows not which chunk it fills: each read would wait for all copies.
DEVICE void copy_chunk(void* slot, const void* source, uint32_t bytes, uint64_t*) {
  const uint32_t to = __builtin_amdgcn_readfirstlane(shared_address(slot));
  const char* from = static_cast<const char*>(source) + thread_index() % WARP_THREADS * 4;
  for (uint32_t at = 0; at < bytes; at += 4 * kCopyBytes)
    asm volatile(
        "s_waitcnt lgkmcnt(0)\n\ts_mov_b32 m0, %0\n\ts_nop 0\n\tglobal_load_lds_dword %1, off nt\n\t"
        "global_load_lds_dword %1, off offset:256 nt\n\tglobal_load_lds_dword %1, off offset:512 nt\n\t"
        "global_load_lds_dword %1, off offset:768 nt" ::"s"(to + at),
        "v"(from + at)
        : "memory");
}
// `Newer` chunks or more were begun after this one. What the compiler loads itself only makes the wait longer.
template <int Newer = 0>
DEVICE void wait_full(uint64_t*, uint32_t) {
  constexpr int kLoads = Newer * kChunkBytes / kCopyBytes;
  asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kLoads < 63 ? kLoads : 63) : "memory");  // the counter has six bits
}
DEVICE void prefetch_l2(const void*, uint32_t) {}  // there is no such instruction

DEVICE void wait_for_previous() {}
DEVICE void let_next_start() {}

// ---- 16-bit numbers: two in a 32-bit word, the first one low ----

#if WEIGHTS_BF16
DEVICE float low_half(uint32_t pair) { return float_of(pair << 16); }
DEVICE float high_half(uint32_t pair) { return float_of(pair & 0xffff0000u); }
using Half = __bf16;
#else
using Half = _Float16;
DEVICE float low_half(uint32_t pair) { return __builtin_bit_cast(Half, static_cast<uint16_t>(pair)); }
DEVICE float high_half(uint32_t pair) { return __builtin_bit_cast(Half, static_cast<uint16_t>(pair >> 16)); }
#endif
DEVICE uint32_t bits_of_half(float value) { return __builtin_bit_cast(uint16_t, static_cast<Half>(value)); }
DEVICE uint32_t pack_halves(float low, float high) { return bits_of_half(high) << 16 | bits_of_half(low); }
