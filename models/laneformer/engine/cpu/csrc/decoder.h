// A model, what executes it, and the threads of both.
#pragma once
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "executor.h"
#include "team.h"
#include "weights.h"

namespace laneformer {

struct Decoder {
  // Thread t stays on cpus[t % size]; with no cpus the system decides.
  Decoder(const ModelSpec& spec, DType dtype, DType embedding_dtype, int threads, const Kernels* kernels, Math math,
          const std::vector<int>& cpus = {}, double processors = usable_cpus())
      : team(std::make_unique<Team>(threads,
                                    [cpus](int t) {
                                      if (!cpus.empty()) pin_to(cpus[t % cpus.size()]);
                                    })),
        model(spec, dtype, embedding_dtype, *team),
        executor(model, *team, *kernels, math, processors) {}
  ~Decoder() {
    if (executor.forked()) (void)team.release();  // a forked child has none of the threads to wait for
  }

  Schedule& schedule() { return executor.schedule(); }
  void leave(int64_t ticket) { executor.leave(ticket); }
  void leave_all() { executor.leave_all(); }
  void expect_loaded() const {
    if (!model.loaded()) throw std::invalid_argument("the weights are not loaded yet");
  }

  std::unique_ptr<Team> team;  // jobs are handed over under its mutex; within a request only counters are used
  Model model;
  CpuExecutor executor;
};

}  // namespace laneformer
