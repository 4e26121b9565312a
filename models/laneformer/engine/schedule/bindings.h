// A schedule's callers in Python, whoever executes its passes: decoder.py's Request, Collected and Ended.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "schedule.h"

namespace nb = nanobind;

namespace laneformer {

using Floats = nb::ndarray<const float, nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner);
}

inline SamplingOptions sampling_from(nb::handle r) {
  const auto number = [&](const char* name) { return nb::cast<double>(r.attr(name)); };
  SamplingOptions s;
  const nb::object sampling = r.attr("sampling");  // ../sampling.py's Sampling is this very structure
  const nb::bytes draw{nb::handle(sampling)};
  if (draw.size() != sizeof s.draw) throw std::invalid_argument("sampling is not a Sampling");
  std::memcpy(&s.draw, draw.data(), sizeof s.draw);
  s.repetition_penalty = number("repetition_penalty"), s.frequency_penalty = number("frequency_penalty");
  s.presence_penalty = number("presence_penalty");
  s.min_new_tokens = nb::cast<int>(r.attr("min_new_tokens"));
  s.logit_bias = nb::cast<std::vector<std::pair<int, double>>>(r.attr("logit_bias"));
  s.stop_ids = nb::cast<std::vector<int>>(r.attr("stop_ids"));
  return s;
}

}  // namespace laneformer

// Reads decoder.py's Request, field by field; a field that is missing, or of another type, is a TypeError.
template <>
struct nanobind::detail::type_caster<laneformer::Request> {
  NB_TYPE_CASTER(laneformer::Request, const_name("Request"))
  bool from_python(handle r, uint8_t, cleanup_list*) noexcept try {
    const auto field = [&](const char* name, auto& to) { to = nb::cast<std::decay_t<decltype(to)>>(r.attr(name)); };
    field("prompt", value.prompt), field("max_new_tokens", value.max_new_tokens);
    field("reuse_prefix", value.reuse_prefix), field("speculate", value.speculate);
    field("prediction", value.prediction), field("masked", value.masked);
    field("quiet", value.quiet), field("timed", value.timed), field("score_from", value.score_from);
    field("keep_logits", value.keep_logits), field("keep_partials", value.keep_partials);
    value.top_logprobs = r.attr("logprobs").is_none() ? -1 : nb::cast<int>(r.attr("logprobs"));
    value.sampling = laneformer::sampling_from(r);
    return true;
  } catch (...) {
    return false;
  }
};

namespace laneformer {

// Returns log-probabilities, the likeliest ids, and theirs, flat.
inline nb::tuple as_tuple(Scores s) {
  return nb::make_tuple(to_numpy(std::move(s.logprobs)), to_numpy(std::move(s.top_ids)),
                        to_numpy(std::move(s.top_logprobs)));
}

inline nb::dict as_dict(const Statistics& s) {
  nb::dict d;
  d["reused_tokens"] = s.reused, d["passes"] = s.passes;
  d["proposed_tokens"] = s.proposed, d["accepted_tokens"] = s.accepted;
  return d;
}

template <class T>
nb::object or_none(std::vector<T> values) {
  return values.empty() ? nb::none() : nb::cast(to_numpy(std::move(values)));
}

// Returns the fields of decoder.py's Ended.
inline nb::tuple as_tuple(Ended& ended) {
  const nb::handle kind = ended.fault == Fault::overflow   ? PyExc_OverflowError
                          : ended.fault == Fault::executor ? PyExc_RuntimeError
                                                           : PyExc_ValueError;
  const nb::object error = ended.error.empty() ? nb::none() : kind(ended.error);
  return nb::make_tuple(as_dict(ended.statistics), error, or_none(std::move(ended.logits)),
                        or_none(std::move(ended.partials)), ended.timings.first_token_s,
                        or_none(std::move(ended.timings.token_s)));
}

// Returns the fields of decoder.py's Collected for each request with news.
inline nb::list collect(Schedule& schedule, double timeout_s) {
  std::vector<News> all;
  {
    nb::gil_scoped_release release;
    all = schedule.collect(timeout_s);
  }
  nb::list found;
  for (News& news : all) {
    const nb::object scores = news.scores ? nb::object(as_tuple(std::move(*news.scores))) : nb::none();
    const nb::object ended = news.ended ? nb::object(as_tuple(*news.ended)) : nb::none();
    found.append(nb::make_tuple(news.ticket, news.first, news.tokens, scores, ended));
  }
  return found;
}

// For tests: returns for each draft since the last call the ids before it, how many of these are drafts, and its logits.
inline nb::list recorded_drafts(Schedule& schedule) {
  nb::list found;
  if (schedule.running() || !schedule.pass_drafter()) return found;
  for (auto& drawn : schedule.pass_drafter()->recorded())
    found.append(nb::make_tuple(drawn.ids, drawn.drafts, to_numpy(std::move(drawn.logits))));
  schedule.pass_drafter()->record();
  return found;
}

using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig>;

// Binds the calls about requests; an Owner has `schedule`, `leave`, `leave_all` and `expect_loaded`.
template <class Owner>
void bind_requests(nb::class_<Owner>& owner) {
  using namespace nb::literals;
  const auto join = [](Owner& o, std::vector<Request> requests) {
    o.expect_loaded();
    return o.schedule().join(std::move(requests));
  };
  const auto allow = [](Owner& o, int64_t ticket, int index, Mask mask) {
    o.schedule().allow(ticket, index, Sequence::Mask(mask.data(), mask.data() + mask.size()));
  };
  owner.def("join", join, "requests"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("collect", [](Owner& o, double timeout_s) { return collect(o.schedule(), timeout_s); }, "timeout_s"_a)
      .def("leave", &Owner::leave, "ticket"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("leave_all", &Owner::leave_all, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("running", [](Owner& o) { return o.schedule().running(); })
      .def("allow", allow, "ticket"_a, "index"_a, "mask"_a)
      .def("fix_cost", [](Owner& o, double each, double draft) { o.schedule().fix_cost(each, draft); },
           "each_column"_a, "draft"_a = 0.1)
      .def("recorded_drafts", [](Owner& o) { return recorded_drafts(o.schedule()); })
      .def("statistics", [](Owner& o) { return as_dict(o.schedule().statistics()); });
}

// Binds the schedule for an executor in Python, and what it reads of a pass.
void bind_schedule(nb::module_& m, double (*log_sum_exp)(const float* x, int n));

}  // namespace laneformer
