// Executes the passes that the schedule plans (schedule.h), on persistent threads.
//
// The first thread issues a pass and counts it in Orders::issued, for which the others wait; all meet at its end, before the
// next order overwrites it, and after its KV operations, if any. layers.h and head.h have what a thread does in between.
#pragma once
#include <unistd.h>

#include <functional>
#include <vector>

#include "../../schedule/schedule.h"
#include "head.h"
#include "kv_memory.h"
#include "layers.h"
#include "shared.h"

namespace laneformer {

#ifndef LANEFORMER_PROBE_MIB
#define LANEFORMER_PROBE_MIB 256  // far larger than the caches
#endif
constexpr size_t kProbeBytes = size_t{LANEFORMER_PROBE_MIB} << 20;

class CpuExecutor {
 public:
  // Model and team must outlive it. Waits spin where every thread has a processor.
  CpuExecutor(const Model& model, Team& team, const Kernels& kernels, Math math, double processors);
  ~CpuExecutor();

  // The schedule takes requests and gives their results. `leave` and `leave_all` do nothing in a forked child,
  // which has none of the threads, and whose mutexes may never be free.
  Schedule& schedule() { return schedule_; }
  void leave(int64_t ticket);
  void leave_all();
  KvMemory& kv() { return kv_; }
  bool forked() const { return getpid() != process_; }
  const char* isa() const { return shared_.kernels.isa; }

  // measure.cpp. All throw std::runtime_error while a request runs.
  //
  // How far ahead the tapes are prefetched: the fastest of a few distances on the loaded tapes, or `bytes`
  // where that is not negative. It changes no result. Returns the distance.
  size_t tune(int64_t bytes);
  double probe();  // bytes/s at which the threads read memory
  double probe_products();  // multiply-adds/s of the model's products with weights from the caches, for full passes
  // Delays what threads of different lanes give each other; changes no result. False where all threads share all lanes.
  bool set_latency(double link_s);
  // Lets another executor's model, with as many threads and the same vocabulary, draft for this one's, on this one's threads.
  // It must outlive this one, and take no requests of its own. Throws std::invalid_argument where it cannot.
  void draft_with(CpuExecutor& small);
  void set_ladder();  // joins as Ladder Residual does; std::invalid_argument for a model with a delay

 private:
  void on_all_threads(const std::function<void(int)>& job);
  void wake();
  void run_passes(int t);
  void issue_pass();
  void run_pass(int t, const Pass& pass);
  CpuExecutor& by(const Pass& pass) { return pass.network == Network::small_model ? *draft_ : *this; }
  bool apply_ops(int t, const Pass& pass);
  void meet(int t) { shared_.exchange.meet(t); }
  double probe(int t, Pages& buffer);

  Team& team_;
  Shared shared_;
  Orders& orders_;
  KvMemory kv_;
  Schedule schedule_;
  Layers layers_;
  LmHead head_;
  CpuExecutor* draft_ = nullptr;
  std::vector<Counter> orders_seen_;  // by thread: the orders that it has waited for
  const pid_t process_ = getpid();
};

}  // namespace laneformer
