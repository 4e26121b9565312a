// A schedule whose executor is Python: one thread asks for passes, and sleeps here, without the GIL, between them.
#include "bindings.h"

#include <condition_variable>
#include <mutex>

namespace laneformer {

namespace {

using IdArray = nb::ndarray<const int32_t, nb::ro, nb::c_contig, nb::device::cpu>;

class HostSchedule {
 public:
  HostSchedule(const Limits& limits, const KvShape& shape)
      : limits_(limits), schedule_(limits, shape, [this] { wake(false); }) {}

  Schedule& schedule() { return schedule_; }
  void leave(int64_t ticket) { schedule_.leave(ticket); }
  void leave_all() { schedule_.leave_all(); }
  void expect_loaded() const {}

  // Waits until there is something to run; returns false after `close`.
  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return woken_ || closed_; });
    return std::exchange(woken_, false) || !closed_;
  }
  void close() { wake(true); }

  // `given` holds the results of the pass that this returned last.
  const Pass* next(const PassResult& given) {
    last_ = schedule_.next(last_ ? &given : nullptr);
    schedule_.tell_news();
    return last_;
  }
  const Pass& last() const {
    if (!last_) throw std::runtime_error("no pass is under way");
    return *last_;
  }
  void expect(const PassResult& given, size_t picked, size_t rows) const {
    if (!last_ || given.refused >= 0 || given.error || last_->chunk_tokens) return;
    const size_t columns = last_->columns;
    if (given.passes < 1 || given.passes > 1 + last_->extra_passes || (limits_.picks && picked < given.passes * columns))
      throw std::invalid_argument("picked: a row of the columns' tokens for each pass, as many as may have been made");
    if (rows < size_t(last_->logit_columns) || (rows && given.stride != size_t(limits_.vocab)))
      throw std::invalid_argument("logits: a row of the vocabulary for each column that needs them");
    for (size_t i = 0; i < picked; ++i)
      if (given.picked[i] < (i < columns ? 0 : -1) || given.picked[i] >= limits_.vocab)
        throw std::invalid_argument("the executor drew token " + std::to_string(given.picked[i]));
  }

 private:
  void wake(bool close) {
    {
      std::lock_guard lock(mutex_);
      (close ? closed_ : woken_) = true;
    }
    changed_.notify_all();
  }

  const Limits limits_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false, closed_ = false;
  const Pass* last_ = nullptr;
  Schedule schedule_;
};

const Pass* next(HostSchedule& host, std::optional<IdArray> picked, std::optional<Floats> logits, int refused,
                 std::optional<std::string> error) {
  PassResult given;
  given.refused = refused, given.error = error ? error->c_str() : nullptr;
  if (picked) given.picked = picked->data(), given.passes = static_cast<int>(picked->shape(0));
  if (logits) given.logits = logits->data(), given.stride = logits->shape(1);
  host.expect(given, picked ? picked->size() : 0, logits ? logits->shape(0) : 0);
  nb::gil_scoped_release release;
  return host.next(given);
}

void score_chunk(HostSchedule& host, int position, Floats logprobs, IdArray ids, Floats tops) {
  const size_t count = logprobs.size(), top = host.schedule().prompt_chunk(host.last()).top;
  if (ids.size() != count * top || tops.size() != count * top) throw std::invalid_argument("scores of another number");
  host.schedule().score_chunk(host.last(), position, count, logprobs.data(), ids.data(), tops.data());
}

// A drafter with past outputs of its own, for tests.
struct OneDrafter {
  OneDrafter(std::vector<int> prediction, std::vector<int> prompt, std::vector<std::vector<int>> outputs)
      : drafter(prediction, prompt, &past) {
    for (const auto& output : outputs) past.add(output);
  }
  std::pair<std::vector<int>, std::vector<double>> propose(int most) {
    std::pair<std::vector<int>, std::vector<double>> found;
    drafter.propose(most, found.first, found.second);
    return found;
  }
  PastOutputs past;
  SuffixDrafter drafter;
};

// Parts of a schedule, for tests.
void bind_parts(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Pace>(m, "Pace")
      .def(nb::init<>())
      .def("columns", &Pace::columns)
      .def("learn", &Pace::learn, "columns"_a, "seconds"_a);
  nb::class_<Cost>(m, "Cost")
      .def(nb::init<>())
      .def("of", &Cost::of, "columns"_a)
      .def("learn", &Cost::learn, "columns"_a, "seconds"_a);
  nb::class_<OneDrafter>(m, "Drafter")
      .def(nb::init<std::vector<int>, std::vector<int>, std::vector<std::vector<int>>>(), "prediction"_a, "prompt"_a,
           "past"_a)
      .def("extend", [](OneDrafter& d, int id) { d.drafter.extend(id); }, "id"_a)
      .def("propose", &OneDrafter::propose, "most"_a)
      .def("learn", [](OneDrafter& d, int n, int right) { d.drafter.learn(n, right); }, "drafts"_a, "right"_a);
}

}  // namespace

void bind_schedule(nb::module_& m, double (*log_sum_exp)(const float* x, int n)) {
  using namespace nb::literals;
  bind_parts(m);
  nb::class_<Limits>(m, "Limits")
      .def("__init__", [log_sum_exp](Limits* self, int vocab, int context) {
        new (self) Limits{.vocab = vocab, .context = context, .log_sum_exp = log_sum_exp};
      }, "vocab"_a, "context"_a)
      .def_rw("columns", &Limits::columns).def_rw("sequences", &Limits::sequences).def_rw("paced", &Limits::paced)
      .def_rw("picks", &Limits::picks).def_rw("max_chunk_tokens", &Limits::max_chunk_tokens).def_rw("unread", &Limits::unread)
      .def_rw("extra_passes", &Limits::extra_passes);
  nb::class_<KvShape>(m, "KvShape")
      .def("__init__", [](KvShape* self, int context, int caches, int ring, int back) {
        new (self) KvShape{.context = context, .page = context, .caches = caches, .ring = ring, .back = back};
      }, "context"_a, "caches"_a, "ring"_a, "back"_a);
  nb::class_<Column>(m, "Column")
      .def_ro("token", &Column::token).def_ro("position", &Column::position).def_ro("cache", &Column::cache)
      .def_ro("sequence", &Column::sequence);
  nb::enum_<KvOp::Kind>(m, "KvKind").value("open", KvOp::open).value("close", KvOp::close)
      .value("release", KvOp::release).value("copy", KvOp::copy);
  nb::class_<KvOp>(m, "KvOp")
      .def_ro("kind", &KvOp::kind).def_ro("cache", &KvOp::cache).def_ro("source", &KvOp::from).def_ro("end", &KvOp::end);
  nb::class_<Draw>(m, "Draw")
      .def_prop_ro("rule", [](const Draw& d) { return nb::bytes(&d.rule, sizeof d.rule); })  // ../sampling.py's Sampling
      .def_prop_ro("stops", [](const Draw& d) { return std::vector<int>(d.stops, d.stops + d.stop_count); });
  nb::class_<Pass>(m, "Pass")  // stands until `next` is called again
      .def_ro("chunk_tokens", &Pass::chunk_tokens).def_ro("extra_passes", &Pass::extra_passes)
      .def_prop_ro("columns", [](const Pass& p) { return std::vector<Column>(p.column, p.column + p.columns); })
      .def_prop_ro("start", [](const Pass& p) { return p.column[0]; })  // where a chunk begins
      .def_prop_ro("logit_columns", [](const Pass& p) { return std::vector<int>(p.logit_column, p.logit_column + p.logit_columns); })
      .def_prop_ro("ops", [](const Pass& p) { return std::vector<KvOp>(p.op, p.op + p.ops); })
      .def("draw", [](const Pass& p, int sequence) { return p.draw[sequence]; }, "sequence"_a);
  nb::class_<Schedule::PromptChunk>(m, "PromptChunk")
      .def_ro("ids", &Schedule::PromptChunk::ids).def_ro("first_row", &Schedule::PromptChunk::first_row)
      .def_ro("top", &Schedule::PromptChunk::top).def_ro("keeps_logits", &Schedule::PromptChunk::keeps_logits);
  nb::class_<HostSchedule> schedule(m, "Schedule");
  bind_requests(schedule);
  schedule.def(nb::init<const Limits&, const KvShape&>(), "limits"_a, "shape"_a)
      .def("wait", &HostSchedule::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &HostSchedule::close, nb::call_guard<nb::gil_scoped_release>())
      .def("next", &next, "picked"_a = nb::none(), "logits"_a = nb::none(), "refused"_a = -1, "error"_a = nb::none(),
           nb::rv_policy::reference)
      .def("interrupts", [](HostSchedule& h) { return h.schedule().interrupts(); })
      .def("prompt_chunk", [](HostSchedule& h) { return h.schedule().prompt_chunk(h.last()); })
      .def("score_chunk", &score_chunk, "position"_a, "logprobs"_a, "ids"_a, "tops"_a)
      .def("keep_logits", [](HostSchedule& h, int position, Floats rows) {
        h.schedule().keep_logits(h.last(), position, rows.shape(0), rows.data());
      }, "position"_a, "rows"_a)
      .def("fail", [](HostSchedule& h, std::string why) { h.schedule().fail(std::move(why)); }, "why"_a)
      .def_prop_ro("failure", [](HostSchedule& h) { return h.schedule().failure(); });
}

}  // namespace laneformer
