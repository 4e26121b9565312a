// Threads and the loop over passes.
#include "executor.h"

#include <stdexcept>
#include <utility>

namespace laneformer {

namespace {

// Returns a layer's KV heads by thread; a lane's are with the first of its threads.
std::vector<int> kv_heads_of(const Model& model) {
  std::vector<int> heads;
  for (int t = 0; t < model.threads(); ++t) {
    const ThreadPlan& plan = model.plan(t);
    const int lanes = plan.leader == t ? plan.last_lane - plan.first_lane : 0;
    heads.push_back(lanes * (model.spec().kv_heads / model.spec().lanes));
  }
  return heads;
}

Limits limits_of(const ModelSpec& spec, const Kernels& kernels) {
  Limits limits{spec.vocab, spec.context};
  limits.partials = size_t(spec.layers) * 2 * spec.lanes * spec.hidden;
  limits.log_sum_exp = kernels.log_sum_exp;
  return limits;
}

}  // namespace

CpuExecutor::CpuExecutor(const Model& model, Team& team, const Kernels& kernels, Math math, double processors)
    : team_(team),
      shared_(model, kernels, math, model.threads() <= processors ? 1000 : 0),
      orders_(shared_.orders),
      kv_(model.spec(), kv_heads_of(model)),
      schedule_(limits_of(model.spec(), kernels), kv_.shape(), [this] { wake(); }),
      layers_(shared_, kv_, schedule_),
      head_(shared_, layers_, schedule_),
      orders_seen_(team.size()) {
  const ModelSpec& spec = model.spec();
  if (!spec.draft_layers) return;
  const auto [block, rows] = model.draft_bytes();
  const auto share = [&](size_t bytes) { return double(bytes) / double(model.bytes()); };
  schedule_.draft_with_mtp({spec.draft_ids, share(block), share(block + rows)});
}

CpuExecutor::~CpuExecutor() {
  leave_all();
  if (!forked()) team_.wait();
}

void CpuExecutor::leave(int64_t ticket) {
  if (!forked()) schedule_.leave(ticket);
}

void CpuExecutor::leave_all() {
  if (!forked()) schedule_.leave_all();
}

void CpuExecutor::on_all_threads(const std::function<void(int)>& job) {
  if (schedule_.running()) throw std::runtime_error("the engine is busy with another request");
  team_.run(job);
}

// Starts the threads, as there is something to run again.
void CpuExecutor::wake() {
  team_.wait();  // until all have left run_passes, so that nobody still reads the last order
  team_.post([this](int t) { run_passes(t); });
}

void CpuExecutor::run_passes(int t) {
  for (;;) {
    const uint64_t next = ++orders_seen_[t].value;
    if (t == 0) {
      issue_pass();
      orders_.issued.value.store(next, std::memory_order_release);
      schedule_.tell_news();  // while the others are at work already
    } else {
      shared_.exchange.wait_until([&] { return orders_.issued.value.load(std::memory_order_acquire) >= next; });
    }
    if (!orders_.runs) return;
    by(orders_.pass).run_pass(t, orders_.pass);
    meet(t);  // all have read the order, which the first thread overwrites next, and written what it hands in
  }
}

void CpuExecutor::run_pass(int t, const Pass& pass) {
  if (pass.ops && !apply_ops(t, pass)) return;
  if (pass.columns) layers_.run(t, pass);
  if (pass.logit_columns) head_.run(t, pass);
}

void CpuExecutor::draft_with(CpuExecutor& small) {
  const Model &large = shared_.model, &other = small.shared_.model;
  if (&small == this || other.threads() != large.threads())
    throw std::invalid_argument("a draft model needs as many threads as its model");
  if (other.spec().vocab != large.spec().vocab) throw std::invalid_argument("a draft model needs the same vocabulary");
  on_all_threads([](int) {});  // throws while a request runs
  draft_ = &small;
  schedule_.draft_with(small.kv_.shape(), double(other.bytes()) / double(large.bytes()));
}

// Hands in the results of the last pass, and asks for the next one: in the first thread, while all others wait.
void CpuExecutor::issue_pass() {
  CpuExecutor& last = by(orders_.pass);
  PassResult result{last.head_.logits(), last.head_.stride(), last.orders_.overflowed.exchange(0),
                    last.orders_.kv_overflowed.exchange(0)};
  if (orders_.pass.ops && last.orders_.applied < orders_.pass.ops) result.refused = last.orders_.applied;
  const bool ran = std::exchange(orders_.runs, false);
  const Pass* next = schedule_.next(ran ? &result : nullptr);
  if (!next) return;
  orders_.pass = *next;
  orders_.runs = true;
}

// Runs the pass's KV operations, before its layers. Returns false where there is no memory for one.
bool CpuExecutor::apply_ops(int t, const Pass& pass) {
  if (t == 0) orders_.applied = kv_.apply(pass);
  meet(t);  // copies need the caches that the first thread has opened, and all threads its verdict
  if (orders_.applied < pass.ops) return false;
  kv_.copy(t, pass);
  return true;
}

}  // namespace laneformer
