// How Python starts what is emulated: EMULATE(kernel, Params) for each kernel of a translation unit (emulator.py).
#pragma once
#include "machine.h"
#include "order.h"
#include "races.h"

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
