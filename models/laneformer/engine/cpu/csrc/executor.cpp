// Threads and the loop over passes.
#include "executor.h"

#include <stdexcept>
#include <utility>

namespace laneformer {

namespace {

// KV heads of a layer by thread; a lane's are with the first of its threads.
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

CpuExecutor::CpuExecutor(const Model& model, Team& team, const Kernels& kernels, Math math, double processors,
                         Place place)
    : team_(team),
      place_(std::move(place)),
      shared_(model, kernels, math, model.threads() <= processors ? 1000 : 0, place_.memory),
      orders_(shared_.orders),
      kv_(model.spec(), kv_heads_of(model)),
      schedule_(place_.rank ? nullptr
                            : std::make_unique<Schedule>(limits_of(model.spec(), kernels), kv_.shape(),
                                                         [this] { wake(); })),
      layers_(shared_, kv_, schedule_.get(), team.first(), team.size()),
      head_(shared_, layers_, schedule_.get(), team.first(), team.size()),
      orders_seen_(team.size()) {
  const ModelSpec& spec = model.spec();
  if (!schedule_ || !spec.draft_layers) return;
  const auto [block, rows] = model.draft_bytes();
  const auto share = [&](size_t bytes) { return double(bytes) / double(model.bytes()); };
  schedule_->draft_with_head({spec.draft_ids, share(block), share(block + rows)});
}

CpuExecutor::~CpuExecutor() {
  leave_all();
  if (!forked()) team_.wait();
}

Schedule& CpuExecutor::schedule() {
  if (!schedule_) throw std::logic_error("the schedule is with rank 0");
  return *schedule_;
}

void CpuExecutor::leave(int64_t ticket) {
  if (!forked()) schedule().leave(ticket);
}

void CpuExecutor::leave_all() {
  if (schedule_ && !forked()) schedule_->leave_all();
}

void CpuExecutor::on_all_threads(const std::function<void(int)>& job) {
  if (schedule_ && schedule_->running()) throw std::runtime_error("the engine is busy with another request");
  team_.run(job);
}

// There is something to run again.
void CpuExecutor::wake() {
  if (place_.wake) place_.wake();
  team_.wait();  // its threads are on their way out
  gone_ = 0;
  team_.post([this](int t) { serve(t); });
}

void CpuExecutor::work() {
  wake();
  team_.wait();
}

void CpuExecutor::serve(int t) {
  meet(t);  // nobody issues a pass before everybody has read the last order
  run_passes(t);
  if (lost() && ++gone_ == team_.size() && schedule_) schedule_->fail();
}

void CpuExecutor::run_passes(int t) {
  std::atomic<uint64_t>& seen = orders_seen_[t - team_.first()].value;
  while (!lost()) {
    const uint64_t next = ++seen;
    if (t == 0) {
      issue_pass();
      orders_.issued.value.store(next, std::memory_order_release);
      schedule_->tell_news();  // while the others are at work already
    } else {
      const auto issued = [&] { return orders_.issued.value.load(std::memory_order_acquire) >= next; };
      if (!shared_.exchange.wait_until(issued)) return;
    }
    if (!orders_.runs) return;
    by(orders_.pass).run_pass(t, orders_.pass);
    meet(t);
  }
}

void CpuExecutor::run_pass(int t, const Pass& pass) {
  if (pass.ops && !apply_ops(t, pass)) return;
  if (pass.columns) layers_.run(t, pass);
  if (pass.head_columns && !lost()) head_.run(t, pass);
}

void CpuExecutor::draft_with(CpuExecutor& small) {
  const Model &large = shared_.model, &other = small.shared_.model;
  if (&small == this || place_.memory >= 0 || other.threads() != large.threads())
    throw std::invalid_argument("a draft model needs as many threads as its model, and both one process");
  if (other.spec().vocab != large.spec().vocab) throw std::invalid_argument("a draft model needs the same vocabulary");
  on_all_threads([](int) {});  // throws while a request runs
  draft_ = &small;
  schedule_->draft_with(small.kv_.shape(), double(other.bytes()) / double(large.bytes()));
}

// By rank 0's first thread, while all others wait: what the last pass gave, and what comes next.
void CpuExecutor::issue_pass() {
  CpuExecutor& last = by(orders_.pass);
  PassResult result{last.head_.logits(), last.head_.stride(), last.orders_.overflowed.exchange(0),
                    last.orders_.kv_overflowed.exchange(0)};
  if (last.orders_.ops < orders_.pass.ops) result.refused = last.orders_.ops;
  const bool ran = std::exchange(orders_.runs, false);
  const Pass* next = lost() ? nullptr : schedule_->next(ran ? &result : nullptr);
  if (!next) return;
  orders_.pass = *next;
  by(*next).orders_.ops = next->ops;
  orders_.runs = true;
}

// What happens to KV caches before the layers; false where a process has no memory for it.
bool CpuExecutor::apply_ops(int t, const Pass& pass) {
  if (t == team_.first()) {
    const int applied = kv_.apply(pass);
    for (int least = orders_.ops; applied < least && !orders_.ops.compare_exchange_weak(least, applied);) {
    }
  }
  meet(t);
  if (orders_.ops < pass.ops) return false;
  kv_.copy(t, pass);
  return true;
}

}  // namespace laneformer
