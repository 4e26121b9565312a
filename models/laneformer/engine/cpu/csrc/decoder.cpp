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
      spin_turns_((place_.sockets.empty() ? this->threads() : own_) <= processors ? 1000 : 0),
      memory_(place_.memory),
      exchange_(shape(), spin_turns_, memory_.take(shape().bytes())),
      said_(memory_.take(2 * place_.processes * sizeof(Said))) {
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
  logits_ = spec.head == Head::lane ? floats(2 * kMaxColumns * vocab) : shared(2 * kMaxColumns * vocab);
  if (spec.head == Head::lane) lane_logits_ = shared(spec.lanes * kMaxColumns * vocab);
  if (spec.head == Head::replicate) final_streams_ = shared(spec.lanes * kMaxColumns * hidden);
  std::vector<int> heads;  // what other processes' threads work with is reserved, but never touched
  for (int t = 0; t < this->threads(); ++t) {
    reserve(t);
    const int own = plans_[t].last_lane - plans_[t].first_lane;
    heads.push_back(plans_[t].leader == t ? own * (spec.kv_heads / spec.lanes) : 0);
  }
  kv_ = std::make_unique<KvMemory>(spec_, std::move(heads));
  Limits limits{spec_.vocab, spec_.context};
  limits.side_by_side = place_.processes == 1;  // a process alone has all modules' outputs
  if (limits.side_by_side) limits.partials = size_t(spec_.layers) * 2 * spec_.lanes * spec_.hidden;
  limits.log_sum_exp = kernels_->log_sum_exp;
  schedule_ = std::make_unique<Schedule>(limits, kv_->shape(), [this] { wake(); });
  if (!place_.sockets.empty()) mirror_ = std::make_unique<Mirror>(memory_, exchange_, place_.sockets);
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
    if (schedule_->running()) throw std::runtime_error("the engine is busy with another request");
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

void Decoder::leave(int64_t ticket) {
  if (getpid() == process_) schedule_->leave(ticket);
}

void Decoder::leave_all() {
  if (getpid() == process_) schedule_->leave_all();
}

// There is something to run again.
void Decoder::wake() {
  std::unique_lock lock(team_->mutex);
  team_->changed.wait(lock, [&] { return !team_->busy(); });  // the threads are on their way out
  gone_ = 0;
  team_->post([this](int t) { serve(first_ + t); });
}

void Decoder::serve(int t) {
  meet(t);
  const uint64_t seen = pass_issued_.value.load(std::memory_order_acquire);
  meet(t);  // nobody issues a pass before everybody knows the number of the last one
  run_passes(t, seen);
  if (exchange_.lost() && ++gone_ == own_) schedule_->fail();
}

void Decoder::run_passes(int t, uint64_t seen) {
  while (!exchange_.lost()) {
    ++seen;
    if (t == first_) {
      issue_pass();
      pass_issued_.value.store(seen, std::memory_order_release);
      schedule_->tell_news();  // while the others are at work already
    } else {
      const auto issued = [&] { return pass_issued_.value.load(std::memory_order_acquire) >= seen; };
      spin_until(spin_turns_, [&] { return issued() || exchange_.lost(); });
      if (!issued()) return;
    }
    if (!running_) return;
    const Pass pass = pass_;
    kv_->copy(t, pass);
    if (pass.columns) run_layers(t, pass);
    if (pass.head_columns && !exchange_.lost()) run_head(t, pass);
    const bool gives = pass.head_columns && !pass.scores && spec_.head != Head::lane;
    meet(t, gives ? Gives::logits : Gives::nothing);
  }
}

// By the first thread, while the others wait: what the last pass gave, and what comes next.
void Decoder::issue_pass() {
  const Said said = heard();
  PassResult result{logits(pass_), size_t(round_up(spec_.vocab, 16)), said.overflowed, said.kv_overflowed};
  bool ran = std::exchange(running_, false);
  if (exchange_.lost()) return;
  do {
    const Pass* next = schedule_->next(ran ? &result : nullptr, said.left);
    if (!next) return;
    pass_ = *next;
    result.refused = kv_->apply(pass_);
    ran = true;
  } while (result.refused >= 0);
  running_ = true;
  plan_hash_ = 0;
  for (int c = 0; c < pass_.columns; ++c)
    for (const int value : {pass_.column[c].token, pass_.column[c].position, pass_.column[c].cache})
      plan_hash_ = (plan_hash_ ^ static_cast<uint32_t>(value)) * 0x100000001b3ull;  // FNV-1a's prime
}

// Every thread waits for every other, in all processes.
void Decoder::meet(int t, Gives gives) {
  exchange_.meet(Exchange::kMet, t, first_, first_ + own_);
  if (place_.processes == 1) return;
  const uint64_t number = exchange_.published(Exchange::kMet, t);
  if (t == first_) {
    said(number, place_.rank) = {plan_hash_, overflowed_, kv_overflowed_, schedule_->leaving()};
    exchange_.publish(Exchange::kProcessesMet, place_.rank, number);
    if (mirror_) {
      std::vector<iovec> written = given(gives);
      written.push_back({&said(number, place_.rank), sizeof(Said)});
      mirror_->send(written, exchange_.counter_of(Exchange::kProcessesMet, place_.rank));
    }
  }
  exchange_.wait_for(Exchange::kProcessesMet, place_.rank, 0, place_.processes, number);
}

// What this process has written of the running pass's final streams, or logits.
std::vector<iovec> Decoder::given(Gives gives) const {
  std::vector<iovec> pieces;
  const auto add = [&](float* from, size_t count) { pieces.push_back({from, count * sizeof(float)}); };
  const ThreadPlan &first = plans_[first_], &last = plans_[first_ + own_ - 1];
  const size_t vocab = round_up(spec_.vocab, 16), hidden = spec_.padded_hidden(), columns = pass_.head_columns;
  const bool by_lane = gives == Gives::streams || (gives == Gives::logits && spec_.head == Head::lane);
  for (size_t lane = first.first_lane; by_lane && lane < size_t(last.last_lane); ++lane) {
    const size_t each = gives == Gives::streams ? hidden : vocab;
    add((gives == Gives::streams ? final_streams_ : lane_logits_).floats() + lane * kMaxColumns * each, columns * each);
  }
  if (by_lane || gives == Gives::nothing) return pieces;
  const bool replicated = spec_.head == Head::replicate;
  const int from = replicated ? first.head[0].first_row : first.first_lane * spec_.head_rows();
  const int end = replicated ? last.head[0].first_row + last.head[0].rows : last.last_lane * spec_.head_rows();
  for (size_t c = 0; c < columns; ++c) add(logits(pass_) + c * vocab + from, end - from);
  return pieces;
}

// A thread's rows of a module's outputs.
void Decoder::send_partials(int t, uint64_t layer, Module module, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const LaneLayer& matrices = plan.layers[layer % spec_.layers][0];
  const Matrix& matrix = module == kAttention ? matrices.wo : matrices.w2;
  const size_t hidden = spec_.padded_hidden();
  std::vector<iovec> pieces;
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
    float* slot = exchange_.slot(layer, module, lane);
    if (plan.members == 1) pieces.push_back({slot, pass.columns * hidden * sizeof(float)});
    for (int c = 0; plan.members > 1 && matrix.rows && c < pass.columns; ++c)
      pieces.push_back({slot + c * hidden + matrix.first_row, matrix.rows * sizeof(float)});
  }
  mirror_->send(pieces, exchange_.counter_of(Exchange::kModulesDone, t));
}

// By the first thread after a meeting: what all processes have said there. It stands until the meeting after the next.
Said Decoder::heard() {
  const uint64_t number = exchange_.published(Exchange::kMet, first_);
  Said all{plan_hash_, overflowed_.exchange(0), kv_overflowed_.exchange(0)};
  for (int rank = 0; place_.processes > 1 && rank < place_.processes; ++rank) {
    const Said& other = said(number, rank);
    all.overflowed |= other.overflowed, all.kv_overflowed |= other.kv_overflowed;
    if (other.plan != all.plan) exchange_.lose(Exchange::kProcessesDisagree);
  }
  if (place_.processes > 1) all.left = said(number, 0).left;
  return all;
}

// The threads that share a lane wait for each other; nothing to do where a lane has one thread.
void Decoder::meet_group(int t) {
  const ThreadPlan& plan = plans_[t];
  if (plan.members > 1) exchange_.meet(Exchange::kGroupMet, t, plan.leader, plan.leader + plan.members);
}

}  // namespace laneformer
