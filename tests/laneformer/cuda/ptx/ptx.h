// The instructions of PTX that are more than an expression of registers (operations.py), over the emulated machine.
//
// emit.py writes a function for each kernel, which calls these. Addresses of global memory and generic ones are the
// host's; those of shared memory begin at kSharedAt, as on a GPU, where 1 KiB is the system's. What would be undefined on
// a GPU is an error that names the line of the PTX.
#pragma once
#include <tuple>

#include "launch.h"
#include "warp.h"

using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using f32 = float;
using pred = bool;

namespace ptx {
using namespace emulator;

constexpr u32 kSharedAt = 1024;
constexpr u64 kEvictFirst = 0x12f0000000000000;  // what createpolicy gives: asked for again where a copy takes a policy

// ---- registers ----

// a register's bits as a type of its size, or the low ones of a larger register
template <class To, class From>
inline To as(From value) {
  if constexpr (sizeof(To) == sizeof(From))
    return std::bit_cast<To>(value);
  else
    return static_cast<To>(value);
}
// a value into a register of its size, or extended by its sign into a larger one
template <class Register, class Value>
inline void put(Register& to, Value value) {
  to = as<Register>(value);
}
template <class Whole, class... Parts>
inline Whole pack(Parts... parts) {  // the first one lowest
  u64 whole = 0;
  int at = 0;
  ((whole |= u64(as<std::conditional_t<sizeof(Parts) == 2, u16, u32>>(parts)) << at, at += 8 * sizeof(Parts)), ...);
  return as<Whole>(whole);
}
template <class... Parts>
inline void unpack(u64 whole, Parts&... parts) {
  ((put(parts, as<std::conditional_t<sizeof(Parts) == 2, u16, u32>>(whole)), whole >>= 8 * sizeof(Parts)), ...);
}
template <class... Registers>
struct Several {
  std::tuple<Registers&...> registers;
  explicit Several(Registers&... given) : registers(given...) {}
  template <class T>
  void operator=(const std::array<T, sizeof...(Registers)>& values) {
    std::apply([&](auto&... each) { size_t i = 0; (put(each, values[i++]), ...); }, registers);
  }
};

template <class... Registers>
inline Several<Registers...> several(Registers&... registers) {
  return Several<Registers...>(registers...);
}

inline u32 thread_x() { return my_warp().index * kLanes + me->lane; }
inline u32 block_x() { return my_block().index; }
inline u64 global_timer() {
  look();
  return machine->clock_ns;
}

// ---- numbers ----

template <class T>
inline T div_of(T a, T b) {
  if (b == 0) fail("divides by 0");
  return a / b;
}
template <class T>
inline T rem_of(T a, T b) {
  if (b == 0) fail("divides by 0");
  return a % b;
}
template <class T>
inline T insert_bits(T what, T into, u32 at, u32 count) {
  const T mask = (count >= 8 * sizeof(T) ? ~T{0} : (T{1} << count) - 1) << at;
  return (into & ~mask) | (what << at & mask);
}
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
inline float maximum(float a, float b) {
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return fmaxf(a, b);
}
// rounded towards -infinity; the product is exact in double, and `error` is what the sum there lacks
inline float fma_down(float x, float y, float z) {
  const double a = double(x) * y, b = z, sum = a + b, of_b = sum - a, error = (a - (sum - of_b)) + (b - of_b);
  const float nearest = float(sum);
  const bool above = nearest > sum || (nearest == sum && error < 0);
  return above && std::isfinite(nearest) ? nextafterf(nearest, -INFINITY) : nearest;
}

// ---- memory ----

template <class T, size_t N>
inline std::array<T, N> read(const char* at) {
  std::array<T, N> values;
  memcpy(&values, at, sizeof values);
  return values;
}
template <class T, size_t N>
inline void write(char* at, std::array<T, N> values) {
  memcpy(at, &values, sizeof values);
}
[[gnu::noinline, gnu::cold]] inline void bad_address(u64 at, u32 bytes, int line, const char* what) {
  fail(format("line %d: %u bytes at 0x%llx, %s", line, bytes, static_cast<unsigned long long>(at), what));
}
inline void check_aligned(u64 at, u32 bytes, int line) {
  if (at % bytes) bad_address(at, bytes, line, "which is no multiple of that");
  if (at < 1 << 16) bad_address(at, bytes, line, "which is no memory");
}
inline char* shared_at(u32 at, u32 bytes, u32 align, int line) {
  const u32 size = machine->shared_bytes;
  if (at < kSharedAt || at - kSharedAt > size || bytes > size - (at - kSharedAt))
    bad_address(at, bytes, line, "outside of the block's shared memory");
  if (at % align) bad_address(at, bytes, line, "not aligned");
  return my_block().shared + (at - kSharedAt);
}
inline u64 generic_of_shared(u64 at) { return reinterpret_cast<u64>(my_block().shared) + at - kSharedAt; }
inline u64 shared_of_generic(u64 at) { return at - reinterpret_cast<u64>(my_block().shared) + kSharedAt; }

template <class T, size_t N>
inline std::array<T, N> load_shared(u32 at, int line) {
  return read<T, N>(shared_at(at, sizeof(T) * N, sizeof(T) * N, line));
}
template <class T, size_t N>
inline void store_shared(u32 at, int line, std::array<T, N> values) {
  write(shared_at(at, sizeof values, sizeof values, line), values);
}
template <class T, size_t N>
inline std::array<T, N> load(u64 at, int line) {
  check_aligned(at, sizeof(T) * N, line);
  return read<T, N>(reinterpret_cast<const char*>(at));
}
template <class T, size_t N>
inline void store(u64 at, int line, std::array<T, N> values) {
  check_aligned(at, sizeof values, line);
  write(reinterpret_cast<char*>(at), values);
}

// Strong accesses: others come between any two of them. A look that shows the same again is given up for a while.
template <class T>
[[gnu::noinline]] inline T look_at(u64 at) {
  maybe_pause();
  look();
  const volatile T* place = reinterpret_cast<const volatile T*>(at);
  me->polled = reinterpret_cast<const void*>(at);
  if (fruitless(me->polled, *place)) {
    if (sizeof(T) == 8)
      machine->wait(Wait::word, me->polled, *place);
    else
      wait_for_change();
    fruitless(me->polled, *place);
  }
  return *place;
}
// each element is whole; those of a vector are loaded apart, in any order
template <class T, size_t N>
inline std::array<T, N> load_relaxed(u64 at, int line) {
  check_aligned(at, sizeof(T) * N, line);
  std::array<T, N> values;
  const size_t first = machine->random() % N;
  for (size_t i = 0; i < N; ++i) values[(first + i) % N] = look_at<T>(at + (first + i) % N * sizeof(T));
  return values;
}
template <class T, size_t N>
inline void store_relaxed(u64 at, int line, std::array<T, N> values) {
  check_aligned(at, sizeof values, line);
  const size_t first = machine->random() % N;
  for (size_t i = 0; i < N; ++i) {
    maybe_pause();
    const size_t element = (first + i) % N;
    *reinterpret_cast<volatile T*>(at + element * sizeof(T)) = values[element];
    ++report.stores, ++machine->changes, ++machine->progress;
  }
}
inline u32 compare_and_swap(u64 at, u32 expected, u32 value) {
  check_aligned(at, 4, 0);
  maybe_pause();
  u32* place = reinterpret_cast<u32*>(at);
  const u32 old = *place;
  if (old == expected) *place = value, ++machine->changes, ++machine->progress;
  return old;
}

// ---- the warp and the block ----

// the lanes of a warp come to the same instruction, not only to an equal one
inline void aligned(int line) {
  Warp& w = my_warp();
  if (w.arrived && w.line != line) fail(format("diverged: line %d, lanes %08x wait at line %d", line, w.arrived, w.line));
  w.line = line;
}
inline void check_whole(u32 members) {
  if (members != kAllLanes) fail(format("members %08x; only whole warps are executed", members));
}
inline void sync_block(u32 barrier, int line) {
  if (barrier) fail(format("bar.sync %u; only barrier 0 is executed", barrier));
  aligned(line), machine->arrive(kBlockSync);
}
inline void sync_warp(u32 members) { check_whole(members), machine->arrive(kWarpSync); }
inline void shuffle_xor(u32& value, pred& inside, u32 of, u32 mask, u32 clamp, u32 members) {
  check_whole(members);
  if (clamp != kLanes - 1) fail(format("shfl.bfly with clamp 0x%x; only 0x1f is executed", clamp));
  value = shuffle(of, int(mask)), inside = true;
}
inline void elect(u32& leader, pred& elected, u32 members) {
  check_whole(members);
  machine->arrive(kElect);
  leader = 0, elected = me->lane == 0;
}
template <bool Bf16>
inline std::array<float, 4> multiply(int line, std::array<u32, 4> a, std::array<u32, 2> b, std::array<float, 4> c) {
  aligned(line);
  float sum[4] = {c[0], c[1], c[2], c[3]};
  emulator::multiply<Bf16>(sum, {a[0], a[1], a[2], a[3], b[0], b[1]});
  return {sum[0], sum[1], sum[2], sum[3]};
}

// ---- barriers of copies, and the copy engine ----

inline Barrier& barrier(u32 at) { return machine->barrier_at(shared_at(at, 8, 8, 0)); }
inline void init_barrier(u32 at, u32 arrivals) {
  if (arrivals < 1 || arrivals >= 1 << 20) fail(format("a barrier of %u arrivals; allowed: 1 to 2^20 - 1", arrivals));
  machine->make_barrier(shared_at(at, 8, 8, 0), int(arrivals)).maker = me;
}
inline void fence_barriers() {
  for (Barrier& b : machine->barriers)
    if (b.maker == me) b.maker = nullptr;
}
// with each arrival: the first one of a phase finds the last phase awaited
inline void begin_phase(Barrier& b) {
  if (b.begun == b.phase + 1) return;
  if (b.unawaited) fail("a copy to a barrier whose last copy nobody has waited for");
  b.begun = b.phase + 1, b.unawaited = true;
}
[[gnu::noinline]] inline void arrive_expecting(u32 at, u32 bytes) {
  maybe_pause();
  Barrier& b = barrier(at);
  begin_phase(b), machine->arrive_at(b, 1, bytes);
}
inline void arrive(u32 at) {
  maybe_pause();
  Barrier& b = barrier(at);
  begin_phase(b), machine->arrive_at(b, 1, 0);
}
inline char* spoilt(u32 to, u64 from, u32 bytes) {  // what is read before the copy is there, is no number
  if ((to | from | bytes) % 16 || !bytes)
    fail(format("a copy of %u bytes from 0x%llx to 0x%x: all must be multiples of 16", bytes,
                static_cast<unsigned long long>(from), to));
  return static_cast<char*>(memset(shared_at(to, bytes, 16, 0), 0xff, bytes));
}
// in two parts, which come apart
[[gnu::noinline]] inline void copy_bulk(u32 to, u64 from, u32 bytes, u32 at, u64 policy) {
  maybe_pause();
  Barrier& b = barrier(at);
  if (policy != kEvictFirst) fail("a bulk copy with a policy that createpolicy has not given");
  if (b.maker) fail("a bulk copy to a barrier that no fence has made known to the copy engine");
  char* place = spoilt(to, from, bytes);
  const char* source = reinterpret_cast<const char*>(from);
  const u32 half = bytes / 32 * 16;
  if (half) machine->send(b, {{place, source, half}}, false);
  machine->send(b, {{place + half, source + half, bytes - half}}, false);
}
inline void copy_async(u32 to, u64 from, u32 bytes) {
  me->copies.push_back({spoilt(to, from, bytes), reinterpret_cast<const char*>(from), bytes});
}
// an arrival when this thread's copies are there; without .noinc, one more has to come
[[gnu::noinline]] inline void arrive_after_copies(u32 at, int more) {
  maybe_pause();
  Barrier& b = barrier(at);
  begin_phase(b);
  b.missing += more;
  machine->send(b, std::move(me->copies), true);
  me->copies.clear();
}
// A look that fails waits for the phase: the loops around it do nothing else.
[[gnu::noinline]] inline pred wait_parity(u32 at, u32 parity) {
  maybe_pause();
  if (parity > 1) fail(format("a wait for parity %u; allowed: 0 and 1", parity));
  if ((barrier(at).phase & 1) == parity) machine->wait(Wait::barrier, shared_at(at, 8, 8, 0), parity);
  Barrier& b = barrier(at);
  if (!b.in_flight) b.unawaited = false;
  return (b.phase & 1) != parity;
}
inline void prefetch_bulk(u64 at, u32 bytes) {
  if (at % 16 || bytes % 16) fail("a bulk prefetch: place and bytes must be multiples of 16");
}
inline void prefetch_line(u64) {}
inline void previous_is_done() {}
inline void next_may_start() {}

}  // namespace ptx
