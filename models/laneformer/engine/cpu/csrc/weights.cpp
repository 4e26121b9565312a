#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace laneformer {

Model::Model(const ModelSpec& spec, DType dtype, DType embedding_dtype, Team& team)
    : spec_(spec),
      dtype_(dtype),
      embedding_dtype_(embedding_dtype),
      plans_(plan_tapes(spec, team.size(), dtype)),
      team_(team),
      biases_(spec_) {
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };
  for (const ThreadPlan& plan : plans_) tapes_.emplace_back(plan.tape_bytes, true);
  embedding_ = Pages(embedding_bytes());
  norms_ = floats(spec.norms() * scales() * size_t(spec.padded_hidden()));
  if (spec.head_norms) head_norms_ = floats(size_t(spec.all_layers()) * 2 * round_up(spec.head_norm_size(false), 16));
}

size_t Model::bytes() const {
  size_t total = 0;
  for (const ThreadPlan& plan : plans_) total += plan.read_bytes;
  return total;
}

std::vector<DType> Model::dtypes() const {
  std::vector<DType> all;
  const auto add = [&](const Matrix& matrix) {
    if (std::find(all.begin(), all.end(), matrix.dtype) == all.end()) all.push_back(matrix.dtype);
  };
  const ThreadPlan& plan = plans_.front();  // all have the same
  for (const auto& layer : plan.layers)
    for (const LaneLayer& lane : layer)
      for (const Matrix& matrix : lane.matrices(1)) add(matrix);
  for (const Matrix& head : plan.head) add(head);
  return all;
}

Model::DraftBytes Model::draft_bytes() const {
  DraftBytes found{};
  for (const ThreadPlan& plan : plans_) {
    size_t copied = 0;
    for (const Matrix& rows : plan.draft_head) found.rows += rows.bytes(), copied += rows.bytes();
    if (spec_.draft_ids.empty()) copied = 0;  // then the rows are the LM head itself
    found.block += plan.tape_bytes - plan.model_bytes - copied;
  }
  return found;
}

// --- loading ----------------------------------------------------------------------------------------------------

void Model::expect_writable() const {
  if (mapped_) throw std::runtime_error("the packed weights are mapped read-only");
}

bool Model::set_matrix(const std::string& part, int layer, const void* data, DType from) {
  return pack(part, layer, {data, from, 0, 0});
}

bool Model::set_blocks(const std::string& part, int layer, const void* data, const BlockFormat& blocks) {
  PackJob whole{data, DType::fp32, 0, 0};
  whole.blocks = &blocks;
  return pack(part, layer, whole);
}

namespace {

size_t source_bytes(const PackJob& job, size_t values) {
  return job.blocks ? values / job.blocks->inputs * job.blocks->bytes : values * bytes_of(job.from);
}

// A lane's part of a whole matrix (out, in): `rows` of its own, or with `takes_inputs` its inputs of all rows. Then plain
// values lie lane by lane in the source, and blocks, which cannot be cut, row by row.
struct LanePart {
  int rows, inputs;
  bool takes_inputs = false;
  int first_row = 0;         // where its rows begin in the packed matrix, as q, k and v share one
  int interleave_half = -1;  // see PackJob
};

PackJob lane_job(PackJob job, int lane, int lanes, const LanePart& part) {
  job.rows = part.rows, job.inputs = part.inputs;
  job.first_row = part.first_row, job.interleave_half = part.interleave_half;
  if (job.blocks) {
    job.first_input = part.takes_inputs ? lane * part.inputs : 0;
    job.row_bytes = size_t(part.takes_inputs ? lanes * part.inputs : part.inputs) / job.blocks->inputs * job.blocks->bytes;
  }
  const size_t row = job.blocks ? job.row_bytes : size_t(part.inputs) * bytes_of(job.from);
  const size_t first = job.blocks && part.takes_inputs ? 0 : size_t(lane) * part.rows * row;
  job.source = static_cast<const char*>(job.source) + first;
  return job;
}

}  // namespace

bool Model::pack(const std::string& part, int layer, const PackJob& whole) {
  expect_writable();
  std::atomic<bool> finite{true};
  team_.run([&](int t) {
    const ThreadPlan& plan = plans_[t];
    if (part == "lm_head") {
      if (!pack_head(t, whole)) finite = false;
      return;
    }
    const int q = spec_.q_rows(), kv = spec_.kv_rows(), ff = spec_.ff_rows(), hidden = spec_.hidden;
    for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
      const auto take = [&](const Matrix& to, const LanePart& own, int expert = 0) {
        PackJob of_expert = whole;
        const size_t stacked = source_bytes(whole, size_t(spec_.intermediate) * hidden);
        of_expert.source = static_cast<const char*>(whole.source) + expert * stacked;
        const PackJob job = lane_job(of_expert, part == "router" ? 0 : lane, spec_.lanes, own);
        if (!pack_rows(job, to, tapes_[t].bytes())) finite = false;
      };
      const LaneLayer& matrices = plan.layers[layer][lane - plan.first_lane];
      for (const Matrix& qkv : matrices.qkv) {
        if (part == "wq") take(qkv, {.rows = q, .inputs = hidden});
        if (part == "wk") take(qkv, {.rows = kv, .inputs = hidden, .first_row = q});
        if (part == "wv") take(qkv, {.rows = kv, .inputs = hidden, .first_row = q + kv});
      }
      if (part == "wo") take(matrices.wo, {.rows = hidden, .inputs = q, .takes_inputs = true});
      if (part == "router") take(matrices.router, {.rows = spec_.experts, .inputs = hidden});
      for (int e = 0; e < spec_.mlps(); ++e) {
        const Mlp& mlp = matrices.mlps[e];
        if (part == "w1") take(mlp.gate_up, {.rows = ff, .inputs = hidden, .interleave_half = 0}, e);
        if (part == "w3") take(mlp.gate_up, {.rows = ff, .inputs = hidden, .interleave_half = 1}, e);
        if (part == "w2") take(mlp.w2, {.rows = hidden, .inputs = ff, .takes_inputs = true}, e);
      }
    }
  });
  return finite;
}

// Packs the thread's rows of the LM head, then those of the draft ids.
bool Model::pack_head(int t, const PackJob& whole) {
  bool finite = true;
  for (int i = 0; const Matrix& head : plans_[t].head) {
    const int lane = spec_.head == Head::replicate ? 0 : plans_[t].first_lane + i++;
    const LanePart part{spec_.head_rows(), spec_.head_inputs(), spec_.head == Head::lane};
    const PackJob job = lane_job(whole, lane, spec_.lanes, part);
    finite &= pack_rows(job, head, tapes_[t].bytes());
  }
  return finite && (spec_.draft_ids.empty() || pack_draft_rows(t, whole));
}

// Packs the rows of the draft ids, one by one: in the LM head (V, D) itself, lanes' rows follow each other.
bool Model::pack_draft_rows(int t, const PackJob& whole) {
  bool finite = true;
  for (int i = 0; const Matrix& head : plans_[t].draft_head) {
    const int lane = spec_.head == Head::replicate ? 0 : plans_[t].first_lane + i++, first = spec_.first_draft(lane);
    for (int row = 0; row < spec_.draft_rows(lane); ++row) {
      const size_t at = size_t(spec_.draft_ids[first + row]) * spec_.hidden * bytes_of(whole.from);
      const PackJob job{static_cast<const char*>(whole.source) + at, whole.from, 1, spec_.hidden, row};
      finite &= pack_rows(job, head, tapes_[t].bytes());
    }
  }
  return finite;
}

bool Model::set_embedding(const void* data, DType from, const BlockFormat* blocks) {
  expect_writable();
  const size_t row = blocks ? size_t(spec_.hidden) / blocks->inputs * blocks->bytes : spec_.hidden * bytes_of(from);
  std::atomic<bool> finite{true};
  team_.run([&](int t) {  // each touches a part first, so every memory node holds some of it
    const size_t first = size_t(spec_.vocab) * t / threads(), end = size_t(spec_.vocab) * (t + 1) / threads();
    const char* rows = static_cast<const char*>(data) + first * row;
    char* to = embedding_.bytes() + first * spec_.hidden * bytes_of(embedding_dtype_);
    const size_t values = (end - first) * spec_.hidden;
    if (!(blocks ? convert_blocks(rows, *blocks, values, to, embedding_dtype_)
                 : convert(rows, from, values, to, embedding_dtype_)))
      finite = false;
  });
  return finite;
}

void Model::copy_parts() {
  Pages embedding(embedding_bytes(), true);
  team_.run([&](int t) {
    Pages tape(plans_[t].tape_bytes, true);
    std::memcpy(tape.bytes(), tapes_[t].bytes(), plans_[t].tape_bytes);
    tapes_[t] = std::move(tape);
    const size_t first = embedding_bytes() * t / threads(), end = embedding_bytes() * (t + 1) / threads();
    std::memcpy(embedding.bytes() + first, embedding_.bytes() + first, end - first);
  });
  embedding_ = std::move(embedding);
}

bool Model::set_norm(int index, const void* data, DType from) {
  bool finite = true;
  for (int i = 0; i < scales(); ++i) {
    const char* row = static_cast<const char*>(data) + size_t(i) * spec_.hidden * bytes_of(from);
    float* to = norms_.floats() + (size_t(index) * scales() + i) * spec_.padded_hidden();
    finite &= convert(row, from, spec_.hidden, to, DType::fp32);
  }
  return finite;
}

void Model::set_rope(const float* cosine, const float* sine) {
  const size_t count = size_t(spec_.ropes) * spec_.context * (spec_.head_dim() / 2);
  cosine_.assign(cosine, cosine + count);
  sine_.assign(sine, sine + count);
}

void Model::set_query_scales(const float* scales) { query_scales_.assign(scales, scales + spec_.context); }

bool Model::set_head_norm(const std::string& part, int layer, const void* data, DType from) {
  const bool of_keys = part == "k_norm";
  return convert(data, from, spec_.head_norm_size(of_keys), head_norm(layer, of_keys), DType::fp32);
}

// --- reading ----------------------------------------------------------------------------------------------------

void Model::embed(int token, float* out) const {
  read_embedding(token, out);
  for (int i = 0; spec_.embedding_scale != 1.0f && i < spec_.hidden; ++i) out[i] *= spec_.embedding_scale;
}

// Reads a row of the embedding, or of the LM head, on whichever thread's tape it lies.
void Model::read_embedding(int token, float* out) const {
  if (!spec_.tied) {
    const size_t row = size_t(token) * spec_.hidden * bytes_of(embedding_dtype_);
    convert(embedding_.bytes() + row, embedding_dtype_, spec_.hidden, out, DType::fp32);
    return;
  }
  for (int t = 0; t < threads(); ++t)
    for (size_t i = 0; i < plans_[t].head.size(); ++i) {
      const Matrix& head = plans_[t].head[i];
      const int lane = spec_.head == Head::vocab_parallel ? plans_[t].first_lane + static_cast<int>(i) : 0;
      const int row = token - lane * spec_.head_rows() - head.first_row;
      if (row >= 0 && row < head.rows) return unpack_row(head, row, tapes_[t].bytes(), out);
    }
}

void Model::rotate(const float* from, float* to, int layer, int position) const {
  const int half = spec_.head_dim() / 2, table = spec_.rope[layer];
  if (table < 0) return static_cast<void>(std::copy_n(from, 2 * half, to));
  const size_t row = size_t(table) * spec_.context + position;
  const float *cosine = cosine_.data() + row * half, *sine = sine_.data() + row * half;
  for (int j = 0; j < half; ++j) {
    const float even = from[2 * j], odd = from[2 * j + 1];
    to[2 * j] = even * cosine[j] - odd * sine[j];
    to[2 * j + 1] = even * sine[j] + odd * cosine[j];
  }
}

}  // namespace laneformer
