// What the decode kernels ask of the machine: words with an epoch, a bulk copy with a barrier, shuffles, conversions.
//
// Everything that only a GPU understands stands here, so that the kernels themselves are plain C++. The tests compile
// them for the CPU with an emulator that offers the same functions (tests/laneformer/cuda/emulator.h).
//
// No header is included: NVRTC compiles this without a CUDA toolkit on the machine. PTX: mbarrier and cp.async need
// sm_80, cp.async.bulk sm_90.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__  // rarely run, and hungry for registers

DEVICE int block_index() { return blockIdx.x; }
DEVICE int thread_index() { return threadIdx.x; }
// The same number, of which the compiler knows nothing: what is computed from it is computed where it is used. Ahead of
// the loop over layers, there would be more such addresses than registers.
DEVICE int here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE char* dynamic_shared() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}
// four of the eight bytes of low and high, one for each four bits of `selector`, the lowest first
DEVICE uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }
DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// ---- words, stored and loaded whole ----

// A word: a number, and the epoch that says which of them it is. Both halves are stored and loaded at once, so no flag
// and no fence.
#if GRAPH  // kernels follow each other: a plain number, which is there

struct Word {
  float value;
};
struct alignas(8) WordPair {
  Word a, b;
};
DEVICE void store_word(Word* at, float value, uint32_t) { at->value = value; }
DEVICE Word load_word(const Word* at) { return *at; }
DEVICE WordPair load_words(const Word* at) { return *reinterpret_cast<const WordPair*>(at); }
DEVICE bool is_of(Word, uint32_t) { return true; }

#else

struct alignas(8) Word {
  float value;
  uint32_t epoch;
};
struct WordPair {
  Word a, b;
};
DEVICE uint64_t bits_of_word(float value, uint32_t epoch) { return static_cast<uint64_t>(epoch) << 32 | bits_of(value); }
DEVICE Word word_of(uint64_t bits) { return {float_of(static_cast<uint32_t>(bits)), static_cast<uint32_t>(bits >> 32)}; }
DEVICE bool is_of(Word word, uint32_t epoch) { return word.epoch == epoch; }

#if DEVICES > 1
#define SCOPE "sys"  // peers write over NVLink
#else
#define SCOPE "gpu"
#endif

DEVICE void store_word(Word* at, float value, uint32_t epoch) {
  const uint64_t bits = bits_of_word(value, epoch);
  asm volatile("st.relaxed." SCOPE ".global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
DEVICE Word load_word(const Word* at) {
  uint64_t bits;
  asm volatile("ld.relaxed." SCOPE ".global.b64 %0, [%1];" : "=l"(bits) : "l"(at) : "memory");
  return word_of(bits);
}
// two neighbours in one access; each of them is whole, the pair need not be: both epochs are to be looked at
DEVICE WordPair load_words(const Word* at) {
  uint64_t a, b;
  asm volatile("ld.relaxed." SCOPE ".global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
  return {word_of(a), word_of(b)};
}

#endif

// a word for the host, in its memory
DEVICE void tell_host(uint64_t* at, float value, uint32_t epoch) {
  const uint64_t bits = static_cast<uint64_t>(epoch) << 32 | bits_of(value);
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}

// the polled word was the awaited one; the tests' emulator checks here that no other order of events could have lost it
DEVICE void accept(const Word*, uint32_t) {}

DEVICE int load_flag(const int* at) {
  int value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// after everything that this thread wrote before it, for the host as well
DEVICE void publish_flag(int* at, int value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
DEVICE bool set_first(int* at) { return atomicCAS(at, 0, 1) == 0; }

// ---- chunks of weights: copied to shared memory by the copy engine, which then completes a barrier ----

DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

constexpr bool kBulkCopies = __CUDA_ARCH__ >= 900;  // by one thread, of any length
constexpr int kFullArrivals = kBulkCopies ? 1 : 32;

DEVICE void init_full(uint64_t* full) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(full)), "r"(kFullArrivals) : "memory");
}
// makes the barriers of this thread known to the copy engine; before the first copy
DEVICE void fence_full() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// All threads of a warp start one copy; `full` completes its phase when the bytes (a multiple of 16) are there.
DEVICE void copy_chunk(void* slot, const void* source, uint32_t bytes, uint64_t* full) {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, -1; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  if (!elected) return;
  uint64_t once;  // weights are read once a token: they must not push words and keys out of the L2
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(slot)),
      "l"(source), "r"(bytes), "r"(shared_address(full)), "l"(once)
      : "memory");
#else
  for (uint32_t at = thread_index() % 32 * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(slot) + at),
                 "l"(static_cast<const char*>(source) + at)
                 : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
#endif
}
DEVICE void wait_full(uint64_t* full, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(full)), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(shared_address(full)), "r"(parity)
                 : "memory");
#endif
}
// a hint: bring these bytes (16-aligned, a multiple of 16) to the L2
DEVICE void prefetch_l2(const void* at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
#else
  for (uint32_t i = 0; i < bytes; i += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(at) + i) : "memory");
#endif
}

// ---- a chain of kernels: what a kernel does before `wait_for_previous` overlaps with the one before it ----

DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- 16-bit numbers: two in a 32-bit word, the first one low ----

#if WEIGHTS_BF16
DEVICE float low_half(uint32_t pair) { return float_of(pair << 16); }
DEVICE float high_half(uint32_t pair) { return float_of(pair & 0xffff0000u); }
DEVICE uint32_t pack_halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
DEVICE float low_half(uint32_t pair) {
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(pair));
  return value;
}
DEVICE float high_half(uint32_t pair) {
  float value;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(value) : "r"(pair));
  return value;
}
DEVICE uint32_t pack_halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

// ---- a warp's matrix product: sum (16 x 8) += a (16 x 16, 16-bit) b (16 x 8, 16-bit), in float32; sm_80 ----
//
// Thread t has, with g = t / 4 and c = t % 4: of a, rows g, g + 8, g, g + 8 at columns 2c, 2c + 1 (a.x, a.y) and 2c + 8,
// 2c + 9 (a.z, a.w); of b, the same as rows, in column g; of sum, rows g (0, 1) and g + 8 (2, 3), columns 2c, 2c + 1.

DEVICE void multiply_tile(float (&sum)[4], uint4 a, uint2 b) {
#if WEIGHTS_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
