// Threads, loading, and the loop over passes.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace laneformer {

namespace {
int broadcast_delay(const ModelSpec& spec) {
  for (const auto& module : spec.adds_delayed)
    if (std::find(module.begin(), module.end(), 1) != module.end()) return spec.delay;
  return 0;
}
}  // namespace

Decoder::Decoder(const ModelSpec& spec, DType dtype, DType embedding_dtype, int threads, const Kernels* kernels,
                 Math math, std::vector<int> cpus, double processors, Place place)
    : spec_(spec),
      dtype_(dtype),
      embedding_dtype_(embedding_dtype),
      kernels_(kernels),
      math_(math),
      delay_(broadcast_delay(spec)),
      ring_layers_(2 * delay_ + 2),
      cpus_(std::move(cpus)),
      place_(std::move(place)),
      first_(place_.rank * threads),
      own_(threads),
      plans_(plan_tapes(spec, threads * place_.processes, dtype)),
      workers_(plans_.size()),
      spin_turns_(this->threads() <= processors ? 1000 : 0),
      memory_(place_.memory),
      exchange_(shape(), spin_turns_, memory_.take(shape().bytes())),
      orders_memory_(memory_.take(sizeof(Orders))),
      orders_(*reinterpret_cast<Orders*>(orders_memory_.bytes())) {
  const ThreadPlan& last = plans_[first_ + own_ - 1];
  if (plans_[first_].leader != first_ || last.leader + last.members > first_ + own_)
    throw std::invalid_argument("a lane's threads must be in one process");
  const size_t hidden = spec.padded_hidden(), vocab = round_up(spec.vocab, 16);
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };

  embedding_ = Pages(embedding_bytes());
  norms_ = floats((2 * spec.layers + 1) * (spec.shared_scale ? 1 : spec.lanes) * hidden);
  if (spec.qkv_bias) biases_ = floats(size_t(spec.layers) * spec.lanes * round_up(spec.qkv_rows(), 32));
  if (spec.head_norms) head_norms_ = floats(size_t(spec.layers) * 2 * spec.padded_head_dim());
  const auto shared = [&](size_t count) { return memory_.take(count * sizeof(float)); };
  logits_ = shared(kMaxColumns * vocab);
  if (spec.head == Head::lane) lane_logits_ = shared(spec.lanes * kMaxColumns * vocab);
  if (spec.head == Head::replicate) final_streams_ = shared(spec.lanes * kMaxColumns * hidden);
  std::vector<int> heads;  // what other processes' threads work with is reserved, but never touched
  for (int t = 0; t < this->threads(); ++t) {
    reserve(t);
    const int own = plans_[t].last_lane - plans_[t].first_lane;
    heads.push_back(plans_[t].leader == t ? own * (spec.kv_heads / spec.lanes) : 0);
  }
  kv_ = std::make_unique<KvMemory>(spec_, std::move(heads));
  const size_t partials = size_t(spec_.layers) * 2 * spec_.lanes * spec_.hidden;
  const Limits limits{spec_.vocab, spec_.context, partials, kernels_->log_sum_exp};
  if (place_.rank == 0) schedule_ = std::make_unique<Schedule>(limits, kv_->shape(), [this] { wake(); });
  team_ = std::make_unique<Team>(own_, [cpus = cpus_, first = first_](int t) {
    if (!cpus.empty()) pin_to(cpus[(first + t) % cpus.size()]);
  });
}

Exchange::Shape Decoder::shape() const {
  return {ring_layers_, spec_.lanes, threads(), kMaxColumns * size_t(spec_.padded_hidden())};
}

// What thread t works with.
void Decoder::reserve(int t) {
  const size_t hidden = spec_.padded_hidden();
  const size_t widest_in = std::max({hidden, round_up(spec_.q_rows(), 32), round_up(spec_.ff_rows(), 32)});
  const size_t widest_out = std::max({hidden, round_up(spec_.qkv_rows(), 32), size_t(spec_.gate_up_rows())});
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };
  Worker& w = workers_[t];
  const size_t own = plans_[t].last_lane - plans_[t].first_lane;
  const bool leads = plans_[t].leader == t;  // what a lane's group shares lies with its leader
  w.tape = Pages(plans_[t].tape_bytes, true);
  w.streams = floats(own * kMaxColumns * hidden);
  w.x = floats(kMaxColumns * widest_in), w.y = floats(kMaxColumns * widest_out);
  w.prepared = Pages(prepared_bytes(dtype_, widest_in));
  if (leads) w.attended = floats(kMaxColumns * round_up(spec_.q_rows(), 32));
  if (leads) w.gated = floats(kMaxColumns * round_up(spec_.ff_rows(), 32));
  w.total = floats(2 * hidden);
  w.head_inputs = floats(plans_[t].head.size() * kMaxColumns * hidden);
  w.head_x.resize(plans_[t].head.size());
  for (size_t i = 0; i < plans_[t].head.size(); ++i) w.head_prepared.emplace_back(prepared_bytes(dtype_, hidden));
  const size_t dim = spec_.padded_head_dim(), group = spec_.query_heads / spec_.kv_heads;
  const size_t queries = std::max(size_t{kBlockQueries}, group), chunks = spec_.context / kChunkPositions + 2;
  w.query = floats(queries * dim), w.mixed = floats(queries * dim), w.states = floats(queries * (dim + kStateExtra));
  w.scores = floats(queries * kChunkPositions), w.totals = floats(2 * queries);
  w.widened = floats(2 * kChunkPositions * dim);
  if (leads && plans_[t].members > 1)
    w.partials = floats(chunks * kMaxSequences * (spec_.query_heads / spec_.lanes) * (dim + kStateExtra));
}

// Of all columns of a pass; 0 where products read fp32 inputs as they are.
size_t Decoder::prepared_bytes(DType dtype, size_t inputs) const {
  const Product& how = product(dtype);
  if (!how.multiply)
    throw std::invalid_argument(std::string("this math does not take ") + kDTypes[int(dtype)].name + " weights");
  return how.prepare ? kMaxColumns * how.column_bytes(static_cast<int>(inputs / 2)) : 0;
}

Decoder::~Decoder() {
  leave_all();
  if (getpid() != process_) (void)team_.release();  // a forked child has none of the threads to wait for
}

size_t Decoder::weight_bytes() const {
  size_t total = 0;
  for (const auto& plan : plans_) total += plan.tape_bytes;
  return total;
}

// --- threads ----------------------------------------------------------------------------------------------------

void Decoder::on_all_threads(const std::function<void(int)>& job) {
  {
    if (schedule_ && schedule_->running()) throw std::runtime_error("the engine is busy with another request");
    std::unique_lock lock(team_->mutex);
    team_->changed.wait(lock, [&] { return !team_->busy(); });  // the last request is on its way out
    team_->post([&](int t) { job(first_ + t); });
  }
  team_->wait();
}

// --- loading ----------------------------------------------------------------------------------------------------

bool Decoder::set_matrix(const std::string& part, int layer, const void* data, DType from) {
  const auto lane_data = [&](int lane, int rows, int inputs) {
    return static_cast<const char*>(data) + size_t(lane) * rows * inputs * bytes_of(from);
  };
  std::atomic<bool> finite{true};
  if (mapped_) throw std::runtime_error("the packed weights are mapped read-only");
  on_all_threads([&](int t) {
    const ThreadPlan& plan = plans_[t];
    const auto pack = [&](const Matrix& to, const void* source, int rows, int inputs, int first_row, int half) {
      if (!pack_rows({source, from, rows, inputs, first_row, half}, to, workers_[t].tape.bytes()))
        finite = false;
    };
    const auto pack_head = [&](int owner) {
      const int rows = spec_.head_rows(), inputs = spec_.head_inputs();
      char* tape = workers_[owner].tape.bytes();
      for (int i = 0; const Matrix& head : plans_[owner].head) {
        const int lane = plans_[owner].first_lane + i++;
        const void* source = spec_.head == Head::replicate ? data : lane_data(lane, rows, inputs);
        if (!pack_rows({source, from, rows, inputs}, head, tape)) finite = false;
      }
    };
    // tied embeddings are read from the head, so every process has all of it
    const int stride = spec_.tied ? own_ : threads();
    for (int owner = t % stride; part == "lm_head" && owner < threads(); owner += stride) pack_head(owner);
    const int q = spec_.q_rows(), kv = spec_.kv_rows(), ff = spec_.ff_rows(), hidden = spec_.hidden;
    for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
      if (part == "lm_head") break;
      const int own = lane - plan.first_lane;
      const LaneLayer& matrices = plan.layers[layer][own];
      if (part == "wq") pack(matrices.qkv, lane_data(lane, q, hidden), q, hidden, 0, -1);
      if (part == "wk") pack(matrices.qkv, lane_data(lane, kv, hidden), kv, hidden, q, -1);
      if (part == "wv") pack(matrices.qkv, lane_data(lane, kv, hidden), kv, hidden, q + kv, -1);
      if (part == "wo") pack(matrices.wo, lane_data(lane, hidden, q), hidden, q, 0, -1);
      if (part == "w1") pack(matrices.gate_up, lane_data(lane, ff, hidden), ff, hidden, 0, 0);
      if (part == "w3") pack(matrices.gate_up, lane_data(lane, ff, hidden), ff, hidden, 0, 1);
      if (part == "w2") pack(matrices.w2, lane_data(lane, hidden, ff), hidden, ff, 0, -1);
    }
  });
  return finite;
}

bool Decoder::set_embedding(const void* data, DType from) {
  if (mapped_) throw std::runtime_error("the packed weights are mapped read-only");
  std::atomic<bool> finite{true};
  on_all_threads([&](int t) {  // each touches a part first, so every memory node holds some of it
    const size_t first = size_t(spec_.vocab) * (t - first_) / own_, end = size_t(spec_.vocab) * (t - first_ + 1) / own_;
    const char* rows = static_cast<const char*>(data) + first * spec_.hidden * bytes_of(from);
    char* to = embedding_.bytes() + first * spec_.hidden * bytes_of(embedding_dtype_);
    if (!convert(rows, from, (end - first) * spec_.hidden, to, embedding_dtype_)) finite = false;
  });
  return finite;
}

void Decoder::copy_parts() {
  Pages embedding(embedding_bytes(), true);
  on_all_threads([&](int t) {
    Pages tape(plans_[t].tape_bytes, true);
    std::memcpy(tape.bytes(), workers_[t].tape.bytes(), plans_[t].tape_bytes);
    workers_[t].tape = std::move(tape);
    const size_t first = embedding_bytes() * (t - first_) / own_, end = embedding_bytes() * (t - first_ + 1) / own_;
    std::memcpy(embedding.bytes() + first, embedding_.bytes() + first, end - first);
  });
  embedding_ = std::move(embedding);
}

bool Decoder::set_norm(int index, const void* data, DType from) {
  const int scales = spec_.shared_scale ? 1 : spec_.lanes;
  bool finite = true;
  for (int i = 0; i < scales; ++i) {
    const char* row = static_cast<const char*>(data) + size_t(i) * spec_.hidden * bytes_of(from);
    float* to = norms_.floats() + (size_t(index) * scales + i) * spec_.padded_hidden();
    finite &= convert(row, from, spec_.hidden, to, DType::fp32);
  }
  return finite;
}

void Decoder::set_rope(const float* cosine, const float* sine) {
  const size_t count = size_t(spec_.context) * (spec_.head_dim() / 2);
  cosine_.assign(cosine, cosine + count);
  sine_.assign(sine, sine + count);
}

// --- passes -----------------------------------------------------------------------------------------------------

Schedule& Decoder::schedule() {
  if (!schedule_) throw std::logic_error("the schedule is with rank 0");
  return *schedule_;
}

void Decoder::leave(int64_t ticket) {
  if (getpid() == process_) schedule().leave(ticket);
}

void Decoder::leave_all() {
  if (schedule_ && getpid() == process_) schedule_->leave_all();
}

// There is something to run again.
void Decoder::wake() {
  if (place_.wake) place_.wake();
  std::unique_lock lock(team_->mutex);
  team_->changed.wait(lock, [&] { return !team_->busy(); });  // the threads are on their way out
  gone_ = 0;
  team_->post([this](int t) { serve(first_ + t); });
}

void Decoder::work() {
  wake();
  team_->wait();
}

void Decoder::serve(int t) {
  meet(t);  // nobody issues a pass before everybody has read the last order
  run_passes(t);
  if (exchange_.lost() && ++gone_ == own_ && schedule_) schedule_->fail();
}

void Decoder::run_passes(int t) {
  while (!exchange_.lost()) {
    const uint64_t seen = ++workers_[t].orders;
    if (t == 0) {
      issue_pass();
      orders_.issued.value.store(seen, std::memory_order_release);
      schedule_->tell_news();  // while the others are at work already
    } else {
      const auto issued = [&] { return orders_.issued.value.load(std::memory_order_acquire) >= seen; };
      spin_until(spin_turns_, [&] { return issued() || exchange_.lost(); });
      if (!issued()) return;
    }
    if (!orders_.runs) return;
    const Pass& pass = orders_.pass;
    if (!pass.ops || apply_ops(t, pass)) {
      if (pass.columns) run_layers(t, pass);
      if (pass.head_columns && !exchange_.lost()) run_head(t, pass);
    }
    meet(t);
  }
}

// By rank 0's first thread, while all others wait: what the last pass gave, and what comes next.
void Decoder::issue_pass() {
  PassResult result{logits_.floats(), size_t(round_up(spec_.vocab, 16)), orders_.overflowed.exchange(0),
                    orders_.kv_overflowed.exchange(0)};
  if (orders_.ops < orders_.pass.ops) result.refused = orders_.ops;
  const bool ran = std::exchange(orders_.runs, false);
  const Pass* next = exchange_.lost() ? nullptr : schedule_->next(ran ? &result : nullptr);
  if (!next) return;
  orders_.pass = *next;
  orders_.ops = next->ops;
  orders_.runs = true;
}

// What happens to KV caches before the layers; false where a process has no memory for it.
bool Decoder::apply_ops(int t, const Pass& pass) {
  if (t == first_) {
    const int applied = kv_->apply(pass);
    for (int least = orders_.ops; applied < least && !orders_.ops.compare_exchange_weak(least, applied);) {
    }
  }
  meet(t);
  if (orders_.ops < pass.ops) return false;
  kv_->copy(t, pass);
  return true;
}

// The threads that share a lane wait for each other; nothing to do where a lane has one thread.
void Decoder::meet_group(int t) {
  const ThreadPlan& plan = plans_[t];
  if (plan.members > 1) exchange_.meet(Exchange::kGroupMet, t, plan.leader, plan.leader + plan.members);
}

}  // namespace laneformer
