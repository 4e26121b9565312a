// Threads, loading, and the bandwidth probe; requests.cpp has what a request does with them.
#include "decoder.h"

#include <algorithm>
#include <array>
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

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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
  caches_ = std::make_unique<KvPool>(spec_, std::move(heads));
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
  cancel();
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
    std::lock_guard lock(team_->mutex);
    if (team_->busy()) throw std::runtime_error("the engine is busy with another request");
    team_->post([&](int t) { job(first_ + t); });
  }
  team_->wait();
}

// --- for measurements -------------------------------------------------------------------------------------------

void Decoder::set_latency(const Latency& latency) {
  const auto in_range = [](double value, double most) { return value >= 0.0 && value <= most; };
  if (!in_range(latency.link_s, 1.0) || !in_range(latency.jitter, 2.0))
    throw std::invalid_argument("latency: 0 to 1 s, its jitter 0 to 2; got " + std::to_string(latency.link_s) +
                                " and " + std::to_string(latency.jitter));
  std::vector<int> first_of_lane;
  for (const ThreadPlan& plan : plans_) first_of_lane.push_back(plan.leader);
  on_all_threads([](int) {});  // throws while a request runs
  exchange_.set_latency(latency, std::move(first_of_lane));
}

void Decoder::set_ladder() {
  for (const auto& joins : spec_.join)
    if (std::find_if(joins.begin(), joins.end(), [](Join how) { return how != Join::present; }) != joins.end())
      throw std::invalid_argument("ladder: every join of the model must be PRESENT; set broadcast_delay = 0");
  on_all_threads([](int) {});
  ladder_ = true;
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

// --- prefetch distance ------------------------------------------------------------------------------------------

size_t Decoder::tune(int64_t bytes) {
  constexpr size_t kLeast = size_t{64} << 20, kMost = size_t{96} << 20;  // more than caches; enough to tell apart
  constexpr int kRounds = 5, kCount = std::size(kAhead);
  if (bytes >= 0) return ahead_ = static_cast<size_t>(bytes);
  if (weight_bytes() < kLeast) return ahead_;
  std::array<std::array<double, kRounds>, kCount> seconds;
  on_all_threads([&](int t) {
    for (int turn = -1; turn < kRounds * kCount; ++turn) {  // the first one touches the pages
      const int i = (turn + kCount) % kCount;
      meet(t);
      const double began = now_s();
      if (t == first_) ahead_ = kAhead[i];
      meet(t);
      read_tape(t, kMost / plans_.size());
      meet(t);
      if (t == first_ && turn >= 0) seconds[i][turn / kCount] = now_s() - began;
    }
  });
  const auto median = [](std::array<double, kRounds> of) {
    std::nth_element(of.begin(), of.begin() + kRounds / 2, of.end());
    return of[kRounds / 2];
  };
  const auto faster = [&](const auto& a, const auto& b) { return median(a) < median(b); };
  return ahead_ = kAhead[std::min_element(seconds.begin(), seconds.end(), faster) - seconds.begin()];
}

// Multiplies as decoding does, layer by layer, until `most` bytes of this thread's tape are read.
void Decoder::read_tape(int t, size_t most) {
  Worker& w = workers_[t];
  for (const auto& layer : plans_[t].layers)
    for (const LaneLayer& lane : layer)
      for (const Matrix* matrix : {&lane.qkv, &lane.wo, &lane.gate_up, &lane.w2}) {
        if (matrix->offset > most) return;
        multiply(t, *matrix, w.x.floats(), 0, w.y.floats() - matrix->first_row, 0, 1);
      }
}

// --- passes -----------------------------------------------------------------------------------------------------

void Decoder::serve(int t) {
  if (request_->probe_every)  // untouched pages would all be the same zero page
    std::memset(probe_buffer_.bytes() + kProbeBytes / plans_.size() * t, 1, kProbeBytes / plans_.size());
  meet(t);
  uint64_t seen = pass_issued_.value.load(std::memory_order_acquire);
  meet(t);  // nobody issues a pass before everybody knows the number of the last one
  if (t == first_) request_began_s_ = now_s();
  while (!exchange_.lost()) {
    ++seen;
    if (t == first_) {
      pass_ = next_pass();
      pass_issued_.value.store(seen, std::memory_order_release);
      if (std::exchange(tells_news_, false)) team_->changed.notify_all();  // while the others are at work already
    } else {
      const auto issued = [&] { return pass_issued_.value.load(std::memory_order_acquire) >= seen; };
      spin_until(spin_turns_, [&] { return issued() || exchange_.lost(); });
      if (!issued()) return;
    }
    const Pass pass = pass_;
    if (pass.step == Step::end) return;
    if (pass.step == Step::probe) {
      probe(t);
    } else {
      run_layers(t, pass);
      if (pass.head_columns && !exchange_.lost()) run_head(t, pass);
    }
    const bool gives = pass.head_columns && !pass.scores && spec_.head != Head::lane;
    meet(t, gives ? Gives::logits : Gives::nothing);
  }
}

// Every thread waits for every other, in all processes.
void Decoder::meet(int t, Gives gives) {
  exchange_.meet(Exchange::kMet, t, first_, first_ + own_);
  if (place_.processes == 1) return;
  const uint64_t number = exchange_.published(Exchange::kMet, t);
  if (t == first_) {
    said(number, place_.rank) = {plan_hash_, overflowed_, kv_overflowed_, cancelled_};
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

// The best of a few plain read loops over every thread's share of a large buffer.
void Decoder::probe(int t) {
  const size_t share = kProbeBytes / plans_.size() / 1024 * 1024;
  double best = 0.0;
  for (const size_t ahead : kAhead) {
    meet(t);
    const double began = now_s();
    volatile uint64_t sink = kernels_->read(probe_buffer_.bytes() + share / 64 * 64 * t, share, ahead);
    (void)sink;
    meet(t);
    best = std::max(best, static_cast<double>(share * plans_.size()) / (now_s() - began));
  }
  if (t == first_) timings_.probe_bytes_per_s.push_back(best);
}

}  // namespace laneformer
