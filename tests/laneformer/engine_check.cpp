// The engine's core without Python, for the sanitizers: random small models on every kind of thread plan, greedy and
// sampled requests, scoring, cancelling; the tokens of every plan must be equal. `make sanitize` builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "content_hash.h"
#include "decoder.h"

using namespace laneformer;

namespace {

constexpr int kDelay = 2;

ModelSpec small_spec(Head head) {
  ModelSpec s{};
  s.hidden = 96, s.intermediate = 136, s.layers = 6, s.query_heads = 8, s.kv_heads = 4, s.lanes = 4, s.vocab = 200;
  s.context = 96, s.delay = kDelay, s.norm_eps = 1e-5f, s.head = head, s.shared_scale = true;
  for (int layer = 0; layer < s.layers; ++layer) {
    s.window.push_back(layer < 4 ? 7 : 0);
    for (int module = 0; module < 2; ++module) {
      s.join[module].push_back(layer < kDelay ? (module ? Join::no_reduce : Join::present) : Join::past);
      s.adds_delayed[module].push_back(layer >= kDelay && (module || layer >= 2 * kDelay));
    }
  }
  return s;
}

void load_random(Decoder& decoder, const ModelSpec& s) {
  std::vector<uint16_t> values;
  uint64_t key = 0;
  const auto random = [&](size_t count) {
    values.resize(count);
    fill_random(values.data(), DType::bf16, count, ++key, 0.15f);
    return values.data();
  };
  const size_t hidden = s.hidden, kv = size_t(s.kv_rows()) * s.lanes, wide = s.intermediate;
  const std::vector<float> ones(hidden, 1.0f), angles(size_t(s.context) * s.head_dim() / 2, 0.7f);
  decoder.set_rope(angles.data(), angles.data());
  decoder.set_embedding(random(s.vocab * hidden), DType::bf16);
  for (int norm = 0; norm <= 2 * s.layers; ++norm) decoder.set_norm(norm, ones.data(), DType::fp32);
  for (int layer = 0; layer < s.layers; ++layer) {
    for (const char* part : {"wq", "wo"}) decoder.set_matrix(part, layer, random(hidden * hidden), DType::bf16);
    for (const char* part : {"wk", "wv"}) decoder.set_matrix(part, layer, random(hidden * kv), DType::bf16);
    for (const char* part : {"w1", "w2", "w3"}) decoder.set_matrix(part, layer, random(hidden * wide), DType::bf16);
  }
  decoder.set_matrix("lm_head", 0, random(s.vocab * hidden), DType::bf16);
}

std::vector<int> finished(Decoder& decoder) {
  bool over = false;
  std::vector<int> tokens;
  while (!over) {
    const std::vector<int> more = decoder.poll(tokens.size(), 10.0, false, over);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  return tokens;
}

// The ablation reads the probe's large buffer, which is slow under a sanitizer: it runs once.
std::vector<int> run(Decoder& decoder, const ModelSpec& s, double temperature, bool compare_barriers) {
  Request request;
  request.prompts.resize(1);
  for (int i = 0; i < 45; ++i) request.prompts[0].push_back(i * 37 % s.vocab);  // two blocks, six windows
  request.max_new_tokens = 30;
  request.sampling.temperature = temperature;
  request.compare_barriers = compare_barriers, request.probe_every = compare_barriers ? 10 : 0;
  decoder.start(request);
  std::vector<int> tokens = finished(decoder);
  request.score_from = 1, request.top_logprobs = 3, request.keep_logits = true;
  request.compare_barriers = false, request.probe_every = 0;
  decoder.start(request);
  finished(decoder);
  request.score_from = 0, request.top_logprobs = -1, request.keep_logits = false;
  request.prompts.push_back({5, 6, 7});  // a batch of two, with guesses
  request.speculate = 3;
  decoder.start(request);
  finished(decoder);
  request.prompts.resize(1);
  decoder.start(request);
  decoder.cancel();
  finished(decoder);
  return tokens;
}

}  // namespace

int main() {
  for (const Head head : {Head::vocab_parallel, Head::replicate, Head::lane})
    for (const char* isa : {"auto", "portable"})
      for (const auto& [dtype, rounded] : {std::pair{DType::bf16, false}, {DType::bf16, true}, {DType::int8, false}}) {
        // the head changes nothing about the arithmetic
        if ((rounded || dtype == DType::int8) && head != Head::vocab_parallel) continue;
        const ModelSpec spec = small_spec(head);
        std::vector<int> expected;
        for (const int threads : {1, 2, 3, 9}) {
          Decoder decoder(spec, dtype, DType::bf16, threads, choose_kernels(isa), rounded);
          load_random(decoder, spec);
          const std::vector<int> tokens = run(decoder, spec, 1.0, threads == 2 && rounded && isa[0] == 'a');
          if (expected.empty()) expected = tokens;
          if (tokens.size() != 30 || tokens != expected) {
            std::printf("%d threads (%s) gave other tokens than one\n", threads, isa);
            return EXIT_FAILURE;
          }
        }
      }
  const std::vector<char> data((9 << 20) + 5, 'x');
  if (content_hash(data.data(), data.size(), 1) != content_hash(data.data(), data.size(), 3)) return EXIT_FAILURE;
  std::puts("ok");
}
