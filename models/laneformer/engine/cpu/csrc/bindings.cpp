// laneformer.engine.cpu._core: the decoder for Python. Sizes are checked here as well, so that no mistake in Python can
// read beyond a buffer; everything that takes time runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "content_hash.h"
#include "decoder.h"
#include "spin.h"

namespace nb = nanobind;
using namespace laneformer;

namespace {

using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ro, nb::c_contig, nb::device::cpu>;

DType dtype_named(const std::string& name) {  // of what comes in, and of the embedding
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::fp16;
  if (name == "fp32") return DType::fp32;
  throw std::invalid_argument("dtype = '" + name + "' is unknown; choose from bf16, fp16, fp32");
}
DType matrix_dtype_named(const std::string& name) { return name == "int8" ? DType::int8 : dtype_named(name); }

void expect_values(const Bytes& array, DType dtype, size_t count, const std::string& what) {
  if (array.nbytes() != count * bytes_of(dtype))
    throw std::invalid_argument(what + " has " + std::to_string(array.nbytes()) + " bytes; expected " +
                                std::to_string(count * bytes_of(dtype)));
}

size_t matrix_values(const ModelSpec& s, const std::string& part) {
  const size_t hidden = s.hidden, lanes = s.lanes;
  if (part == "wq" || part == "wo") return hidden * hidden;
  if (part == "wk" || part == "wv") return hidden * s.kv_rows() * lanes;
  if (part == "w1" || part == "w2" || part == "w3") return hidden * s.intermediate;
  if (part == "lm_head") return hidden * s.vocab;
  throw std::invalid_argument("unknown matrix '" + part + "'");
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(const std::vector<T>& values) {
  auto* copy = new std::vector<T>(values);
  nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy->data(), {copy->size()}, owner);
}

ModelSpec spec_from(nb::dict d) {
  const auto number = [&](const char* name) { return nb::cast<int>(d[name]); };
  ModelSpec s{};
  s.hidden = number("hidden_size"), s.intermediate = number("intermediate_size");
  s.layers = number("num_hidden_layers"), s.query_heads = number("num_attention_heads");
  s.kv_heads = number("num_key_value_heads"), s.lanes = number("num_lanes"), s.vocab = number("vocab_size");
  s.context = number("max_position_embeddings"), s.delay = number("broadcast_delay");
  s.norm_eps = nb::cast<float>(d["norm_eps"]);
  s.head = static_cast<Head>(number("head"));
  s.sum_before_norm = nb::cast<bool>(d["pre_norm_lane_agg"]);
  s.shared_scale = nb::cast<bool>(d["replicated_rmsn_scale"]);
  s.window = nb::cast<std::vector<int>>(d["window"]);
  const auto joins = nb::cast<std::vector<std::vector<int>>>(d["join"]);
  const auto delayed = nb::cast<std::vector<std::vector<int>>>(d["adds_delayed"]);
  for (int module = 0; module < 2; ++module) {
    for (const int how : joins.at(module)) s.join[module].push_back(static_cast<Join>(how));
    s.adds_delayed[module].assign(delayed.at(module).begin(), delayed.at(module).end());
  }
  return s;
}

SamplingOptions sampling_from(nb::dict d) {
  const auto number = [&](const char* name) { return nb::cast<double>(d[name]); };
  SamplingOptions s;
  s.temperature = number("temperature"), s.top_p = number("top_p"), s.min_p = number("min_p");
  s.repetition_penalty = number("repetition_penalty"), s.frequency_penalty = number("frequency_penalty");
  s.presence_penalty = number("presence_penalty");
  s.top_k = nb::cast<int>(d["top_k"]), s.min_new_tokens = nb::cast<int>(d["min_new_tokens"]);
  s.seed = nb::cast<uint64_t>(d["seed"]);
  s.logit_bias = nb::cast<std::vector<std::pair<int, double>>>(d["logit_bias"]);
  s.stop_ids = nb::cast<std::vector<int>>(d["stop_ids"]);
  return s;
}

Request generation_from(nb::dict d) {
  Request request;
  request.prompts = nb::cast<std::vector<std::vector<int>>>(d["prompts"]);
  request.sampling = sampling_from(d);
  request.max_new_tokens = nb::cast<int>(d["max_new_tokens"]);
  request.reuse_prefix = nb::cast<bool>(d["reuse_prefix"]);
  request.speculate = nb::cast<int>(d["speculate"]);
  request.top_logprobs = nb::cast<int>(d["top_logprobs"]);
  request.probe_every = nb::cast<int>(d["probe_every"]);
  request.compare_barriers = d.contains("compare_barriers") && nb::cast<bool>(d["compare_barriers"]);
  return request;
}

void expect_ids(const std::vector<int>& ids, int vocab) {
  for (const int id : ids)
    if (id < 0 || id >= vocab) throw std::invalid_argument("token id " + std::to_string(id) + " out of range");
}

void expect_sampling(const SamplingOptions& sampling, int vocab) {
  expect_ids(sampling.stop_ids, vocab);
  for (const auto& [id, bias] : sampling.logit_bias) expect_ids({id}, vocab);
}

class PyDecoder {
 public:
  PyDecoder(nb::dict spec, const std::string& dtype, const std::string& embedding_dtype, int threads,
            const std::string& isa, bool bf16_math, std::vector<int> cpus)
      : spec_(spec_from(spec)),
        decoder_(spec_, matrix_dtype_named(dtype), dtype_named(embedding_dtype), threads, choose_kernels(isa.c_str()),
                 bf16_math, std::move(cpus)) {}

  bool set_matrix(const std::string& part, int layer, Bytes data, const std::string& dtype) {
    const DType from = dtype_named(dtype);
    expect_values(data, from, matrix_values(spec_, part), part);
    if (layer < 0 || layer >= spec_.layers) throw std::invalid_argument("no layer " + std::to_string(layer));
    nb::gil_scoped_release release;
    return decoder_.set_matrix(part, layer, data.data(), from);
  }
  bool set_embedding(Bytes data, const std::string& dtype) {
    const DType from = dtype_named(dtype);
    expect_values(data, from, size_t(spec_.vocab) * spec_.hidden, "tok_embeddings");
    nb::gil_scoped_release release;
    return decoder_.set_embedding(data.data(), from);
  }
  bool set_norm(int index, Bytes data, const std::string& dtype) {
    const DType from = dtype_named(dtype);
    expect_values(data, from, size_t(spec_.hidden) * (spec_.shared_scale ? 1 : spec_.lanes), "norm");
    if (index < 0 || index > 2 * spec_.layers) throw std::invalid_argument("no norm " + std::to_string(index));
    return decoder_.set_norm(index, data.data(), from);
  }
  void set_rope(Floats cosine, Floats sine) {
    const size_t expected = size_t(spec_.context) * (spec_.head_dim() / 2);
    if (cosine.size() != expected || sine.size() != expected) throw std::invalid_argument("RoPE tables: wrong size");
    decoder_.set_rope(cosine.data(), sine.data());
    has_rope_ = true;
  }

  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> part(nb::handle self, int index) {
    expect_part(index);
    return {reinterpret_cast<uint8_t*>(decoder_.part(index)), {decoder_.part_bytes(index)}, self};
  }
  void map_part(int index, Bytes data) {
    expect_part(index);
    expect_values(data, DType::bf16, decoder_.part_bytes(index) / 2, "part");
    decoder_.map_part(index, data.data());
  }
  int parts() const { return decoder_.parts(); }

  void start(nb::dict request) { submit(generation_from(request)); }
  void start_scoring(std::vector<int> ids, int score_from, int top_logprobs, bool reuse_prefix, bool keep_logits,
                     std::vector<int> keep_partials) {
    Request request;
    request.prompts = {std::move(ids)}, request.keep_logits = keep_logits, request.reuse_prefix = reuse_prefix;
    request.score_from = score_from, request.top_logprobs = top_logprobs;
    if (score_from < 1 || score_from > static_cast<int>(request.prompts[0].size()) || top_logprobs < 0)
      throw std::invalid_argument("score_from is outside the prompt, or top_logprobs negative");
    int next = 0;
    for (const int position : keep_partials)
      if (position < std::exchange(next, position + 1) || position >= static_cast<int>(request.prompts[0].size()))
        throw std::invalid_argument("keep_partials must be positions of the prompt in ascending order");
    if (!keep_partials.empty() && !keep_logits) throw std::invalid_argument("keep_partials needs keep_logits");
    request.keep_partials = std::move(keep_partials);
    submit(std::move(request));
  }
  nb::tuple poll(size_t from, double timeout_s, bool until_done) {
    bool finished = false;
    std::vector<int> tokens;
    {
      nb::gil_scoped_release release;
      tokens = decoder_.poll(from, timeout_s, until_done, finished);
    }
    return nb::make_tuple(tokens, finished);
  }
  void cancel() { decoder_.cancel(); }

  auto outputs() { return decoder_.outputs(); }
  // Scores of tokens from .. from + count - 1: log-probabilities, best ids, and theirs, flat.
  nb::tuple scores(size_t from, size_t count) const {
    const Scores& s = decoder_.scores();
    if (from > s.logprobs.size() || count > s.logprobs.size() - from) throw std::invalid_argument("no such scores");
    const auto part = [&](const auto& values, size_t each) {
      const auto begin = values.begin() + static_cast<ptrdiff_t>(from * each);
      return to_numpy(std::vector(begin, begin + static_cast<ptrdiff_t>(count * each)));
    };
    return nb::make_tuple(part(s.logprobs, 1), part(s.top_ids, s.top), part(s.top_logprobs, s.top));
  }
  nb::dict statistics() const {
    const Statistics& s = decoder_.statistics();
    nb::dict d;
    d["reused"] = s.reused, d["proposed"] = s.proposed, d["accepted"] = s.accepted, d["passes"] = s.passes;
    return d;
  }
  auto logits() const { return to_numpy(decoder_.kept_logits()); }
  auto partials() const { return to_numpy(decoder_.kept_partials()); }
  double first_token_s() const { return decoder_.timings().first_token_s; }
  auto token_s() const { return to_numpy(decoder_.timings().token_s); }
  auto probe_bytes_per_s() const { return to_numpy(decoder_.timings().probe_bytes_per_s); }
  std::string isa() const { return decoder_.kernels()->isa; }
  int threads() const { return decoder_.threads(); }
  size_t weight_bytes() const { return decoder_.weight_bytes(); }

 private:
  void expect_part(int index) const {
    if (index < 0 || index >= decoder_.parts()) throw std::invalid_argument("no part " + std::to_string(index));
  }
  void submit(Request request) {
    if (!has_rope_) throw std::invalid_argument("the weights are not loaded yet");
    if (request.prompts.empty() || request.prompts.size() > kMaxSequences || request.max_new_tokens < 0)
      throw std::invalid_argument("between 1 and " + std::to_string(kMaxSequences) + " prompts are possible");
    for (const auto& prompt : request.prompts) {
      const size_t longest = size_t(spec_.context) + (request.scores() && !request.keep_logits);
      if (prompt.empty() || prompt.size() > longest)
        throw std::invalid_argument("prompt is empty or longer than the context");
      expect_ids(prompt, spec_.vocab);
    }
    expect_sampling(request.sampling, spec_.vocab);
    if (request.top_logprobs > spec_.vocab || request.speculate < 0 || request.probe_every < 0)
      throw std::invalid_argument("top_logprobs, speculate or probe_every is out of range");
    nb::gil_scoped_release release;  // a new KV cache may have to be mapped
    decoder_.start(std::move(request));
  }
  ModelSpec spec_;
  Decoder decoder_;
  bool has_rope_ = false;
};

// One draw, for tests: after `prompt` and `output`, with the random number of token `index`.
int sample(Floats logits, nb::dict options, std::vector<int> prompt, std::vector<int> output, uint64_t index) {
  const int vocab = static_cast<int>(logits.size());
  const SamplingOptions sampling = sampling_from(options);
  expect_sampling(sampling, vocab), expect_ids(prompt, vocab), expect_ids(output, vocab);
  Sampler sampler(sampling, vocab, prompt);
  for (const int id : output) sampler.accept(id);
  return sampler.choose(logits.data(), index);
}

void random_values(nb::ndarray<nb::c_contig, nb::device::cpu> out, const std::string& dtype, uint64_t key,
                   float deviation) {
  nb::gil_scoped_release release;
  const DType to = dtype_named(dtype);
  fill_random(out.data(), to, out.nbytes() / bytes_of(to), key, deviation);
}

std::string hash_of(Bytes data) {
  nb::gil_scoped_release release;
  return content_hash(data.data(), data.nbytes(), usable_cpus());
}

}  // namespace

NB_MODULE(_core, m) {
  using namespace nb::literals;
  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<nb::dict, const std::string&, const std::string&, int, const std::string&, bool,
                    std::vector<int>>(),
           "spec"_a, "dtype"_a, "embedding_dtype"_a, "threads"_a, "isa"_a, "bf16_math"_a, "cpus"_a)
      .def("set_matrix", &PyDecoder::set_matrix, "part"_a, "layer"_a, "data"_a, "dtype"_a)
      .def("set_embedding", &PyDecoder::set_embedding, "data"_a, "dtype"_a)
      .def("set_norm", &PyDecoder::set_norm, "index"_a, "data"_a, "dtype"_a)
      .def("set_rope", &PyDecoder::set_rope, "cosine"_a, "sine"_a)
      .def("part", [](nb::handle self, int index) { return nb::cast<PyDecoder&>(self).part(self, index); }, "index"_a)
      .def("map_part", &PyDecoder::map_part, "index"_a, "data"_a, nb::keep_alive<1, 3>())
      .def_prop_ro("parts", &PyDecoder::parts)
      .def("start", &PyDecoder::start, "request"_a)
      .def("start_scoring", &PyDecoder::start_scoring, "ids"_a, "score_from"_a, "top_logprobs"_a, "reuse_prefix"_a,
           "keep_logits"_a, "keep_partials"_a = std::vector<int>())
      .def("poll", &PyDecoder::poll, "from_index"_a, "timeout_s"_a, "until_done"_a)
      .def("cancel", &PyDecoder::cancel)
      .def("outputs", &PyDecoder::outputs)
      .def("scores", &PyDecoder::scores, "from_index"_a, "count"_a)
      .def("statistics", &PyDecoder::statistics)
      .def("logits", &PyDecoder::logits)
      .def("partials", &PyDecoder::partials)
      .def("token_s", &PyDecoder::token_s)
      .def("probe_bytes_per_s", &PyDecoder::probe_bytes_per_s)
      .def_prop_ro("first_token_s", &PyDecoder::first_token_s)
      .def_prop_ro("isa", &PyDecoder::isa)
      .def_prop_ro("threads", &PyDecoder::threads)
      .def_prop_ro("weight_bytes", &PyDecoder::weight_bytes);
  m.def("sample", &sample, "logits"_a, "options"_a, "prompt"_a, "output"_a, "index"_a);
  m.def("content_hash", &hash_of, "data"_a);
  m.def("random_values", &random_values, "out"_a, "dtype"_a, "key"_a, "deviation"_a);
}
