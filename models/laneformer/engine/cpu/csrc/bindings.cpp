// laneformer.engine.cpu._core: the decoder for Python. Sizes are checked here as well, so that no mistake in
// Python can read beyond a buffer; everything that takes time runs without the GIL.
#include "../../schedule/bindings.h"

#include <nanobind/stl/map.h>

#include <algorithm>

#include "content_hash.h"
#include "saved_bindings.h"
#include "scalar.h"

using namespace laneformer;

namespace {

using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

DType dtype_named(const std::string& name, int count = 3) {  // others are for matrices, and int8 for the cache
  std::string known;
  for (int i = 0; i < count; ++i) {
    if (name == kDTypes[i].name) return static_cast<DType>(i);
    known += std::string(i ? ", " : "") + kDTypes[i].name;
  }
  throw std::invalid_argument("dtype = '" + name + "' is unknown; choose from " + known);
}

const BlockFormat& blocks_named(const std::string& name) {
  if (const BlockFormat* found = block_format(name)) return *found;
  throw std::invalid_argument("blocks of type '" + name + "' are unknown");
}

nb::dict held_types() {
  nb::dict types;
  for (const BlockFormat& format : block_formats()) types[format.name] = traits_of(format.held).name;
  return types;
}

Math math_named(const std::string& name) {
  for (int i = 0; i < kMaths; ++i)
    if (name == kMathNames[i]) return static_cast<Math>(i);
  throw std::invalid_argument("math = '" + name + "' is unknown");
}

void expect_values(const Bytes& array, DType dtype, size_t count, const std::string& what) {
  if (array.nbytes() != count * bytes_of(dtype))
    throw std::invalid_argument(what + " has " + std::to_string(array.nbytes()) + " bytes; expected " +
                                std::to_string(count * bytes_of(dtype)));
}

size_t matrix_values(const ModelSpec& s, const std::string& part) {
  const size_t hidden = s.hidden, lanes = s.lanes;
  if (part == "wq" || part == "wo") return hidden * s.q_rows() * lanes;
  if (part == "wk" || part == "wv") return hidden * s.kv_rows() * lanes;
  if (part == "w1" || part == "w2" || part == "w3") return hidden * s.intermediate * s.mlps();
  if (part == "router") return hidden * s.experts;
  if (part == "lm_head") return hidden * s.vocab;
  throw std::invalid_argument("unknown matrix '" + part + "'");
}

ModelSpec spec_from(nb::dict d) {
  const auto number = [&](const char* name) { return nb::cast<int>(d[name]); };
  ModelSpec s{};
  s.hidden = number("hidden_size"), s.intermediate = number("intermediate_size");
  s.layers = number("num_hidden_layers"), s.query_heads = number("num_attention_heads");
  s.kv_heads = number("num_key_value_heads"), s.lanes = number("num_lanes"), s.vocab = number("vocab_size");
  s.head_size = number("head_dim"), s.context = number("max_position_embeddings"), s.delay = number("broadcast_delay");
  s.norm_eps = nb::cast<float>(d["norm_eps"]);
  s.head = static_cast<Head>(number("head"));
  s.sum_before_norm = nb::cast<bool>(d["pre_norm_lane_agg"]), s.flush = nb::cast<bool>(d["flush"]);
  s.shared_scale = nb::cast<bool>(d["replicated_rmsn_scale"]);
  s.qkv_bias = nb::cast<bool>(d["attention_bias"]), s.head_norms = nb::cast<bool>(d["qk_norm"]);
  s.tied = nb::cast<bool>(d["tie_word_embeddings"]);
  s.rope = nb::cast<std::vector<int>>(d["rope"]), s.ropes = number("ropes");
  s.pre_norms = nb::cast<bool>(d["pre_norms"]), s.post_norms = nb::cast<bool>(d["post_norms"]);
  s.joint_head_norms = nb::cast<bool>(d["joint_qk_norm"]), s.gate = static_cast<Gate>(number("gate"));
  s.attention_scale = nb::cast<float>(d["attention_scale"]);
  s.embedding_scale = nb::cast<float>(d["embedding_scale"]);
  s.experts = number("experts"), s.active = number("active");
  s.normed_weights = nb::cast<bool>(d["normed_weights"]);
  s.sinks = nb::cast<bool>(d["attention_sinks"]), s.output_bias = nb::cast<bool>(d["output_bias"]);
  s.expert_bias = nb::cast<bool>(d["expert_bias"]);
  if (s.experts && (s.active < 1 || s.active > s.experts))
    throw std::invalid_argument("no, or too many experts are active");
  if (number("gate") < 0 || number("gate") >= kGates) throw std::invalid_argument("no such gate");
  for (const auto& names : nb::cast<std::vector<std::vector<std::string>>>(d["held"])) {
    s.held.emplace_back();
    for (int part = 0; part < kMatrices; ++part) s.held.back()[part] = dtype_named(names.at(part), kDTypeCount);
  }
  s.kv_dtype = dtype_named(nb::cast<std::string>(d["kv_dtype"]), 4);
  s.window = nb::cast<std::vector<int>>(d["window"]);
  const auto joins = nb::cast<std::vector<std::vector<int>>>(d["join"]);
  const auto delayed = nb::cast<std::vector<std::vector<int>>>(d["adds_delayed"]);
  for (int module = 0; module < 2; ++module) {
    for (const int how : joins.at(module)) s.join[module].push_back(static_cast<Join>(how));
    s.adds_delayed[module].assign(delayed.at(module).begin(), delayed.at(module).end());
    const auto delivers = nb::cast<std::vector<std::vector<int>>>(d["delivers"]);
    s.delivers[module].assign(delivers.at(module).begin(), delivers.at(module).end());
  }
  s.draft_layers = number("num_nextn_predict_layers");
  s.draft_ids = nb::cast<std::vector<int>>(d["draft_ids"]);
  expect_ids(s.draft_ids, s.vocab);
  if (std::adjacent_find(s.draft_ids.begin(), s.draft_ids.end(), std::greater_equal<int>()) != s.draft_ids.end())
    throw std::invalid_argument("mtp.draft_ids must be in ascending order, each once");
  return s;
}

void construct(Decoder* self, nb::dict spec, const std::string& dtype, const std::string& embedding_dtype, int threads,
               const std::string& isa, const std::string& math, std::vector<int> cpus, double processors) {
  new (self) Decoder(spec_from(spec), dtype_named(dtype, kDTypeCount), dtype_named(embedding_dtype), threads,
                     choose_kernels(isa.c_str()), math_named(math), std::move(cpus), processors);
}

void expect_layer(const Decoder& decoder, int layer) {
  if (layer < 0 || layer >= decoder.model.spec().all_layers())
    throw std::invalid_argument("no layer " + std::to_string(layer));
}

bool set_matrix(Decoder& decoder, const std::string& part, int layer, Bytes data, const std::string& dtype) {
  const DType from = dtype_named(dtype);
  expect_values(data, from, matrix_values(decoder.model.spec(), part), part);
  expect_layer(decoder, layer);
  nb::gil_scoped_release release;
  return decoder.model.set_matrix(part, layer, data.data(), from);
}

void expect_blocks(const Bytes& data, const BlockFormat& blocks, size_t values, const std::string& part) {
  const size_t expected = values / blocks.inputs * blocks.bytes;
  if (data.nbytes() != expected)
    throw std::invalid_argument(part + " has " + std::to_string(data.nbytes()) + " bytes; expected " +
                                std::to_string(expected));
}

bool set_blocks(Decoder& decoder, const std::string& part, int layer, Bytes data, const std::string& type) {
  const BlockFormat& blocks = blocks_named(type);
  expect_blocks(data, blocks, matrix_values(decoder.model.spec(), part), part);
  expect_layer(decoder, layer);
  nb::gil_scoped_release release;
  return decoder.model.set_blocks(part, layer, data.data(), blocks);
}

// Sets the embedding from plain values, or from rows of blocks.
bool set_embedding(Decoder& decoder, Bytes data, const std::string& dtype) {
  const size_t values = size_t(decoder.model.spec().vocab) * decoder.model.spec().hidden;
  const BlockFormat* blocks = block_format(dtype);
  const DType from = blocks ? DType::fp32 : dtype_named(dtype);
  blocks ? expect_blocks(data, *blocks, values, "tok_embeddings") : expect_values(data, from, values, "tok_embeddings");
  nb::gil_scoped_release release;
  return decoder.model.set_embedding(data.data(), from, blocks);
}

bool set_norm(Decoder& decoder, int index, Bytes data, const std::string& dtype) {
  const ModelSpec& spec = decoder.model.spec();
  const DType from = dtype_named(dtype);
  expect_values(data, from, size_t(spec.hidden) * (spec.shared_scale ? 1 : spec.lanes), "norm");
  if (index < 0 || index >= spec.norms()) throw std::invalid_argument("no norm " + std::to_string(index));
  return decoder.model.set_norm(index, data.data(), from);
}

bool set_bias(Decoder& decoder, const std::string& part, int layer, Bytes data, const std::string& dtype) {
  const DType from = dtype_named(dtype);
  const size_t values = decoder.model.biases().values(part);
  if (!values) throw std::invalid_argument("this model has no biases of " + part);
  expect_values(data, from, values, part);
  expect_layer(decoder, layer);
  return decoder.model.biases().set(part, layer, data.data(), from);
}

bool set_head_norm(Decoder& decoder, const std::string& part, int layer, Bytes data, const std::string& dtype) {
  const DType from = dtype_named(dtype);
  if (!decoder.model.spec().head_norms) throw std::invalid_argument("this model has no norms of heads");
  expect_values(data, from, decoder.model.spec().head_norm_size(part == "k_norm"), part);
  expect_layer(decoder, layer);
  return decoder.model.set_head_norm(part, layer, data.data(), from);
}

void set_rope(Decoder& decoder, Floats cosine, Floats sine) {
  const ModelSpec& spec = decoder.model.spec();
  const size_t expected = size_t(spec.ropes) * spec.context * (spec.head_dim() / 2);
  if (cosine.size() != expected || sine.size() != expected) throw std::invalid_argument("RoPE tables: wrong size");
  decoder.model.set_rope(cosine.data(), sine.data());
}

void set_query_scales(Decoder& decoder, Floats scales) {
  if (scales.size() != size_t(decoder.model.spec().context)) throw std::invalid_argument("query scales: wrong size");
  decoder.model.set_query_scales(scales.data());
}

void expect_part(Decoder& decoder, int index) {
  if (index < 0 || index >= decoder.model.parts()) throw std::invalid_argument("no part " + std::to_string(index));
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> part(nb::handle self, int index) {
  Decoder& decoder = nb::cast<Decoder&>(self);
  expect_part(decoder, index);
  return {reinterpret_cast<uint8_t*>(decoder.model.part(index)), {decoder.model.part_bytes(index)}, self};
}

void map_part(Decoder& decoder, int index, Bytes data) {
  expect_part(decoder, index);
  expect_values(data, DType::bf16, decoder.model.part_bytes(index) / 2, "part");
  decoder.model.map_part(index, data.data());
}

// Draws a token, for tests: after `prompt` and `output`, with the noise of `position`.
int sample(Floats logits, nb::handle request, std::vector<int> prompt, std::vector<int> output, int position) {
  const int vocab = static_cast<int>(logits.size());
  const SamplingOptions sampling = sampling_from(request);
  sampling.expect(vocab), expect_ids(prompt, vocab), expect_ids(output, vocab);
  Sampler sampler(sampling, vocab, prompt);
  for (const int id : output) sampler.accept(id);
  return sampler.choose(logits.data(), position);
}

// Computes the logits after every id, flat, in plain loops (scalar.h), for tests.
auto scalar(nb::dict spec, const std::map<std::string, Floats>& tensors, const std::vector<int>& ids) {
  const ModelSpec s = spec_from(spec);
  PlainTensors plain;
  for (const auto& [name, values] : tensors) plain[name] = {values.data(), values.size()};
  const size_t table = size_t(s.context) * (s.head_dim() / 2);
  expect_ids(ids, s.vocab);
  if (ids.size() > size_t(s.context) || plain["cosine"].size() != table || plain["sine"].size() != table)
    throw std::invalid_argument("ids beyond the context, or RoPE tables of another size");
  return to_numpy(scalar_logits(s, plain, ids));
}

// Rounds rows of fp32 weights to int8, flat, with their scales, which are not finite where a weight is not; for GPUs.
nb::tuple quantise_rows(Floats weights) {
  const size_t rows = weights.shape(0), inputs = weights.shape(1);
  std::vector<int8_t> numbers(rows * inputs);
  std::vector<float> scales(rows);
  const size_t threads = std::max(1, usable_cpus());
  const auto share = [&](size_t t) {
    for (size_t r = rows * t / threads; r < rows * (t + 1) / threads; ++r) {
      const float* row = weights.data() + r * inputs;
      scales[r] = quantise_row({row, row + inputs}, numbers.data() + r * inputs);
    }
  };
  {
    nb::gil_scoped_release release;
    std::vector<std::jthread> others;
    for (size_t t = 1; t < threads; ++t) others.emplace_back(share, t);
    share(0);
  }
  return nb::make_tuple(to_numpy(std::move(numbers)), to_numpy(std::move(scales)));
}

// Multiplies what `job` packs as `dtype` by x (columns, inputs). Returns the packed bytes, and flat outputs (columns, rows).
nb::tuple multiply_packed(const PackJob& job, Floats x, DType dtype, const std::string& math, const std::string& isa) {
  const int rows = job.rows, inputs = job.inputs;
  const int columns = static_cast<int>(x.shape(0)), stride = static_cast<int>(round_up(inputs, kTileRows));
  const Matrix matrix{rows, inputs, dtype, 0, 0, groups_before(job.first_input)};
  const Product& how = choose_kernels(isa.c_str())->products[int(math_named(math))][int(matrix.dtype)];
  if (!how.multiply || x.shape(1) != size_t(inputs)) throw std::invalid_argument("no such product");
  Pages tape(matrix.bytes()), padded(size_t(columns) * stride * sizeof(float)), prepared;
  if (!pack_rows(job, matrix, tape.bytes()))
    throw std::invalid_argument("the weights are not finite");
  for (int c = 0; c < columns; ++c)
    std::memcpy(padded.floats() + size_t(c) * stride, x.data() + size_t(c) * inputs, inputs * sizeof(float));
  Inputs columns_of{padded.bytes(), stride * sizeof(float), 0};
  if (prepares(how, columns)) {
    prepared = Pages(round_up(columns, 16) * how.column_bytes(matrix.k_pairs()));  // in blocks of the matrix unit
    how.prepare(padded.floats(), stride, matrix.k_pairs(), columns, prepared.bytes());
    columns_of = {prepared.bytes(), how.column_bytes(matrix.k_pairs()), 0};
  }
  columns_of.groups_before = matrix.groups_before;
  std::vector<float> y(size_t(columns) * rows);
  how.multiply(tape.bytes(), rows, matrix.k_pairs(), columns_of, y.data(), rows, columns);
  return nb::make_tuple(to_numpy(std::vector<uint8_t>(tape.bytes(), tape.bytes() + matrix.bytes())), to_numpy(y));
}

// For tests: multiply by weights (rows, inputs) in float32; or by rows of blocks, which come back from the tape, too.
nb::tuple multiply(Floats weights, Floats x, const std::string& dtype, const std::string& math,
                   const std::string& isa) {
  const int rows = static_cast<int>(weights.shape(0)), inputs = static_cast<int>(weights.shape(1));
  return multiply_packed({weights.data(), DType::fp32, rows, inputs}, x, dtype_named(dtype, kDTypeCount), math, isa);
}

nb::tuple multiply_blocks(Bytes data, Floats x, const std::string& type, const std::string& isa, int first_input) {
  const BlockFormat& blocks = blocks_named(type);
  const int inputs = static_cast<int>(x.shape(1)), before = groups_before(first_input);
  PackJob job{data.data(), DType::fp32, static_cast<int>(data.shape(0)), inputs};
  job.blocks = &blocks, job.row_bytes = data.shape(1), job.first_input = first_input;
  const nb::tuple product = multiply_packed(job, x, blocks.held, "int8", isa);
  const auto tape = nb::cast<nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>>(product[0]);
  std::vector<float> rows(size_t(job.rows) * inputs);
  for (int r = 0; r < job.rows; ++r)
    unpack_row({job.rows, inputs, blocks.held, 0, 0, before}, r, reinterpret_cast<const char*>(tape.data()),
               rows.data() + size_t(r) * inputs);
  return nb::make_tuple(to_numpy(rows), product[1]);
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
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Decoder> decoder(m, "Decoder");
  bind_requests(decoder);
  bind_saved(m, decoder);
  decoder
      .def("__init__", &construct, "spec"_a, "dtype"_a, "embedding_dtype"_a, "threads"_a, "isa"_a, "math"_a,
           "cpus"_a, "processors"_a)
      .def("set_matrix", &set_matrix, "part"_a, "layer"_a, "data"_a, "dtype"_a)
      .def("set_blocks", &set_blocks, "part"_a, "layer"_a, "data"_a, "type"_a)
      .def("set_embedding", &set_embedding, "data"_a, "dtype"_a)
      .def("set_norm", &set_norm, "index"_a, "data"_a, "dtype"_a)
      .def("set_bias", &set_bias, "part"_a, "layer"_a, "data"_a, "dtype"_a)
      .def("set_head_norm", &set_head_norm, "part"_a, "layer"_a, "data"_a, "dtype"_a)
      .def("set_rope", &set_rope, "cosine"_a, "sine"_a)
      .def("set_query_scales", &set_query_scales, "scales"_a)
      .def("part", &part, "index"_a)
      .def("map_part", &map_part, "index"_a, "data"_a, nb::keep_alive<1, 3>())
      .def("copy_parts", [](Decoder& d) { d.model.copy_parts(); }, unlocked)
      .def_prop_ro("parts", [](const Decoder& d) { return d.model.parts(); })
      .def("tune", [](Decoder& d, int64_t bytes) { return d.executor.tune(bytes); }, "bytes"_a, unlocked)
      .def("probe", [](Decoder& d) { return d.executor.probe(); }, unlocked)
      .def("probe_products", [](Decoder& d) { return d.executor.probe_products(); }, unlocked)
      .def("set_latency", [](Decoder& d, double link_s) { return d.executor.set_latency(link_s); }, "link_s"_a)
      .def("draft_with", [](Decoder& d, Decoder& small) { d.executor.draft_with(small.executor); }, "small"_a,
           nb::keep_alive<1, 2>())
      .def("set_ladder", [](Decoder& d) { d.executor.set_ladder(); })
      .def("set_cache_limit", [](Decoder& d, size_t bytes) { d.schedule().set_cache_limit(bytes); }, "bytes"_a)
      .def_prop_ro("kv_bytes", [](Decoder& d) { return d.schedule().kv_bytes(); })
      .def_prop_ro("draft_kv_bytes", [](Decoder& d) { return d.schedule().draft_kv_bytes(); })
      .def_prop_ro("isa", [](const Decoder& d) { return d.executor.isa(); })
      .def_prop_ro("threads", [](const Decoder& d) { return d.model.threads(); })
      .def_prop_ro("weight_bytes", [](const Decoder& d) { return d.model.bytes(); })
      .def_prop_ro("draft_weight_bytes", [](const Decoder& d) {
        const auto [block, rows] = d.model.draft_bytes();
        return block + rows;
      });
  bind_schedule(m, choose_kernels("auto")->log_sum_exp);
  m.attr("MAX_SEQUENCES") = kMaxSequences;
  m.def("sample", &sample, "logits"_a, "request"_a, "prompt"_a, "output"_a, "position"_a);
  m.def("scalar_logits", &scalar, "spec"_a, "tensors"_a, "ids"_a);
  m.def("quantise_rows", &quantise_rows, "weights"_a);
  m.def("multiply_blocks", &multiply_blocks, "data"_a, "x"_a, "type"_a, "isa"_a, "first_input"_a = 0);
  m.def("multiply", &multiply, "weights"_a, "x"_a, "dtype"_a, "math"_a, "isa"_a);
  m.def("largest_share", &largest_share, "lanes"_a, "threads"_a);
  m.def("isa_of", [](const std::string& isa) { return choose_kernels(isa.c_str())->isa; }, "isa"_a);
  m.attr("BLOCKS") = held_types();
  m.def("content_hash", &hash_of, "data"_a);
  m.def("random_values", &random_values, "out"_a, "dtype"_a, "key"_a, "deviation"_a);
}
