// The engine's core without Python, for sanitizers and other CPUs: random small models on every kind of
// thread plan, and every kind of request. All plans must agree to the last bit.
//
//   _core            runs everything; the last line holds a hash of each case's logits
//   _core only NAME  ... of these cases, and of all products
//   _core race       reads a cache's keys while a request writes them: ThreadSanitizer must end the program
//   _core overflow   writes one byte behind the packed weights: AddressSanitizer must end the program
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "content_hash.h"
#include "decoder.h"

using namespace laneformer;

namespace {

constexpr int kDelay = 2;

// For multi-token prediction, of every third id; the partials of the last layers join its input.
void add_draft_head(ModelSpec& s) {
  s.draft_layers = 1;
  for (int id = 1; id < s.vocab; id += 3) s.draft_ids.push_back(id);
  s.window.push_back(0), s.rope.push_back(0);
  for (int module = 0; module < 2; ++module) {
    for (int layer = 0; layer <= s.layers; ++layer)
      s.delivers[module].push_back(layer >= s.layers - s.delay && layer < s.layers);
    s.join[module].push_back(Join::present), s.adds_delayed[module].push_back(0);
  }
}

// first_late: layers before it sum at once, and what the last ones do not send joins before the final norm.
// biased: with sinks, biases and the clamped gate of gpt-oss.
ModelSpec small_spec(Head head, bool other_family = false, int experts = 0, int first_late = 0, bool biased = false) {
  ModelSpec s{};
  s.sinks = s.output_bias = s.expert_bias = biased, s.gate = biased ? Gate::swiglu_oai : Gate::silu;
  s.experts = experts, s.active = experts / 2, s.normed_weights = true;
  s.head_norms = s.tied = other_family, s.qkv_bias = other_family || biased;
  s.hidden = 96, s.intermediate = 136, s.layers = 6, s.query_heads = 8, s.kv_heads = 4, s.lanes = 4, s.vocab = 200;
  s.head_size = 12, s.rope.assign(s.layers, other_family ? -1 : 0), s.context = 192, s.delay = kDelay, s.norm_eps = 1e-5f, s.head = head, s.shared_scale = true;
  for (int layer = 0; layer < s.layers; ++layer) {
    s.window.push_back(layer < 4 ? 7 : 0);
    for (int module = 0; module < 2; ++module) {
      const bool early = layer < std::max(kDelay, first_late), sums = !module || first_late;
      s.join[module].push_back(early ? (sums ? Join::present : Join::no_reduce) : Join::past);
      s.adds_delayed[module].push_back(!early && (!sums || layer >= kDelay + std::max(kDelay, first_late)));
    }
  }
  s.flush = first_late > 0;
  if (!other_family && !experts && head != Head::lane) add_draft_head(s);
  return s;
}

void load_random(Model& model, const ModelSpec& s) {
  std::vector<uint16_t> values;
  uint64_t key = 0;
  const auto random = [&](size_t count) {
    values.resize(count);
    fill_random(values.data(), DType::bf16, count, ++key, 0.15f);
    return values.data();
  };
  const size_t hidden = s.hidden, kv = size_t(s.kv_rows()) * s.lanes, wide = s.intermediate;
  const std::vector<float> ones(hidden, 1.0f), angles(size_t(s.context) * s.head_dim() / 2, 0.7f);
  model.set_rope(angles.data(), angles.data());
  if (!s.tied) {
    const BlockFormat& format = *block_format("q8_0");
    const std::vector<char> blocks(s.vocab * hidden / format.inputs * format.bytes);
    model.set_embedding(blocks.data(), DType::fp32, &format);  // widened within its bounds, then written over
    model.set_embedding(random(s.vocab * hidden), DType::bf16);
  }
  for (int norm = 0; norm < s.norms(); ++norm) model.set_norm(norm, ones.data(), DType::fp32);
  for (int layer = 0; layer < s.all_layers(); ++layer) {
    for (const char* part : {"wq", "wo"}) model.set_matrix(part, layer, random(hidden * hidden), DType::bf16);
    for (const char* part : {"wk", "wv"}) model.set_matrix(part, layer, random(hidden * kv), DType::bf16);
    for (const char* part : {"wq", "wk", "wv", "wo", "sinks", "router", "w1", "w2", "w3"})
      if (const size_t count = model.biases().values(part))
        model.biases().set(part, layer, random(count), DType::bf16);
    for (const char* part : {"q_norm", "k_norm"})
      if (s.head_norms) model.set_head_norm(part, layer, random(s.head_dim()), DType::bf16);
    for (const char* part : {"w1", "w2", "w3"})
      model.set_matrix(part, layer, random(hidden * wide * s.mlps()), DType::bf16);
    if (s.experts) model.set_matrix("router", layer, random(hidden * s.experts), DType::bf16);
  }
  model.set_matrix("lm_head", 0, random(s.vocab * hidden), DType::bf16);
}

// The weights of another model of the same plan, as a cache of packed weights would lend them.
void map_parts(Model& model, Model& owner, const ModelSpec& s) {
  load_random(model, s);  // norms and rotary tables are not part of the cache
  for (int i = 0; i < owner.parts(); ++i) model.map_part(i, owner.part(i));
}

Request request_of(const ModelSpec& s) {
  Request request;
  for (int i = 0; i < 140; ++i) request.prompt.push_back(i * 37 % s.vocab);  // two blocks, twenty windows
  request.max_new_tokens = 20;
  return request;
}

// All that comes of requests that join together, each as one piece of news.
std::vector<News> finished(Decoder& decoder, std::vector<Request> requests, bool leaves = false) {
  const std::vector<int64_t> tickets = decoder.schedule().join(std::move(requests));
  if (leaves) std::thread(&Decoder::leave_all, &decoder).join();
  std::vector<News> whole(tickets.size());
  for (size_t over = 0; over < tickets.size();)
    for (News& news : decoder.schedule().collect(10.0)) {
      News& to = whole[news.ticket - tickets[0]];
      to.tokens.insert(to.tokens.end(), news.tokens.begin(), news.tokens.end());
      if (news.scores) to.scores = std::move(news.scores);
      if (news.ended) ++over, to.ended = std::move(news.ended);
    }
  return whole;
}

// Everything a request can ask for; returns what must not depend on the number of threads.
struct Results {
  std::vector<int> greedy, sampled;
  std::vector<float> logits, partials;
  bool operator==(const Results&) const = default;
};

Results run(Decoder& decoder, const ModelSpec& s) {
  Results results;
  decoder.schedule().fix_cost(0.01, 0.01);  // so that drafts are made
  Request scoring = request_of(s);
  scoring.score_from = 1, scoring.top_logprobs = 3, scoring.keep_logits = true, scoring.keep_partials = {0, 7, 44};
  Ended scored = std::move(*finished(decoder, {scoring})[0].ended);
  results.logits = std::move(scored.logits), results.partials = std::move(scored.partials);

  Request request = request_of(s);
  request.top_logprobs = 2;
  results.greedy = finished(decoder, {request})[0].tokens;
  request.speculate = 3, request.top_logprobs = -1;  // with guesses, and from the cached prefix
  request.prompt.insert(request.prompt.end(), results.greedy.begin(), results.greedy.begin() + 4);
  request.quiet = request.timed = true;
  const std::vector<int> guessed = finished(decoder, {request})[0].tokens;
  if (!std::equal(results.greedy.begin() + 4, results.greedy.end(), guessed.begin())) results.greedy.clear();

  request.sampling.draw.inverse_temperature = 1.0f, request.sampling.repetition_penalty = 1.2;
  Request other = request;
  other.prompt = {5, 6, 7};
  results.sampled = finished(decoder, {request, other})[0].tokens;
  request.max_new_tokens = 40;
  finished(decoder, {request}, true);
  if (!(decoder.executor.probe() > 0.0)) std::abort();
  return results;
}

// Three threads join and leave, the fourth collects. Every request must give what it gives alone; those of
// the third thread wait for masks, which allow all ids.
bool run_joined(Decoder& decoder, const ModelSpec& s) {
  constexpr int kClients = 3, kTurns = 3;
  std::vector<Request> requests(kClients, request_of(s));
  requests[0].speculate = 3, requests[0].top_logprobs = 2;
  requests[1].score_from = 70, requests[1].top_logprobs = 1;
  requests[2].prompt.resize(3), requests[2].sampling.draw.inverse_temperature = 1.0f;
  std::vector<News> expected(kClients), came(kClients * kTurns);
  for (int i = 0; i < kClients; ++i) expected[i] = finished(decoder, {requests[i]})[0];
  requests[2].masked = true;
  std::atomic<int64_t> tickets[kClients * kTurns] = {};
  std::atomic<int> over[kClients * kTurns] = {};
  const auto client = [&](int i) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int at = i * kTurns + turn;
      const int64_t ticket = tickets[at] = decoder.schedule().join({requests[i]})[0];
      for (int token = 0; i == 2 && token < 20; ++token)
        decoder.schedule().allow(ticket, token, Sequence::Mask((s.vocab + 31) / 32, ~0u));
      if (turn % 3 == 2) decoder.schedule().leave(ticket);
      while (!over[at]) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) clients.emplace_back(client, i);
  for (int ended = 0; ended < kClients * kTurns;)
    for (News& news : decoder.schedule().collect(10.0)) {
      int at = 0;
      while (tickets[at] != news.ticket) at = (at + 1) % (kClients * kTurns);  // its client may not have it yet
      came[at].tokens.insert(came[at].tokens.end(), news.tokens.begin(), news.tokens.end());
      if (news.scores) came[at].scores = news.scores;
      if (!news.ended) continue;
      ++ended, over[at] = 1;
      if (!news.ended->error.empty()) std::abort();
    }
  for (std::thread& thread : clients) thread.join();
  bool equal = true;
  for (int at = 0; at < kClients * kTurns; ++at) {
    const News& whole = expected[at / kTurns];
    const bool left = at % kTurns % 3 == 2;
    equal &= left ? std::equal(came[at].tokens.begin(), came[at].tokens.end(), whole.tokens.begin())
                  : came[at].tokens == whole.tokens;
    if (at / kTurns == 1 && !left) equal &= came[at].scores->logprobs == whole.scores->logprobs;
  }
  return equal;
}

// The best first, but for the emulated matrix unit, which no CPU would choose.
std::vector<const char*> usable_isas() {
  std::vector<const char*> names;
  for (const Kernels* kernels : {avx512_bf16_kernels(), avx512_vnni_kernels(), avx512_kernels(), avx2_vnni_kernels(),
                                 avx2_kernels(), portable_kernels(), amx_kernels()})
    try {
      if (kernels) names.push_back(choose_kernels(kernels->isa)->isa);
    } catch (const std::exception&) {  // compiled in, but not of this CPU
    }
  return names;
}

DType embedding_of(DType dtype) { return dtype >= DType::int8 ? DType::bf16 : dtype; }

// Products of integers: of every instruction set the same bits, also where inputs and rows fill no vector.
std::string product_hash(const Kernels* kernels, const PackJob& job, DType dtype) {
  constexpr int kColumns = 7;
  const int stride_x = static_cast<int>(round_up(job.inputs, 32));
  std::vector<float> x(kColumns * stride_x), y(kColumns * job.rows);
  fill_random(x.data(), DType::fp32, x.size(), 2, 3.0f);
  const Matrix matrix{job.rows, job.inputs, dtype, 0, 0, groups_before(job.first_input)};
  const Product& how = kernels->products[int(Math::int8)][int(dtype)];
  const size_t stride = how.column_bytes(matrix.k_pairs());
  const Pages tape(matrix.bytes()), prepared(kColumns * stride);
  pack_rows(job, matrix, tape.bytes());
  how.prepare(x.data(), stride_x, matrix.k_pairs(), kColumns, prepared.bytes());
  const Inputs inputs{prepared.bytes(), stride, 0, matrix.groups_before};
  how.multiply(tape.bytes(), job.rows, matrix.k_pairs(), inputs, y.data(), job.rows, kColumns);
  return content_hash(y.data(), y.size() * sizeof(float), 1);
}

// The portable result, or nothing where another instruction set has other bits.
std::string same_product(const std::vector<const char*>& isas, const PackJob& job, DType dtype) {
  const std::string expected = product_hash(portable_kernels(), job, dtype);
  for (const char* isa : isas)
    if (product_hash(choose_kernels(isa), job, dtype) != expected) return std::printf("product: %s\n", isa), "";
  return expected;
}

// " product_NAME=HASH" of every type of weights that is multiplied as integers; nothing where they disagree.
std::string product_hashes(const std::vector<const char*>& isas) {
  constexpr int kRows = 40, kOdd = 140, kWhole = 512, kCut = 160;  // inputs; those before a lane's
  std::string hashes;
  const auto add = [&](const char* name, const PackJob& job, DType dtype) {
    const std::string hash = same_product(isas, job, dtype);
    hashes += std::string(" product_") + name + "=" + hash;
    return !hash.empty();
  };
  std::vector<float> weights(kRows * kOdd);
  fill_random(weights.data(), DType::fp32, weights.size(), 1, 0.2f);
  for (const DType dtype : {DType::int8, DType::int4})
    if (!add(traits_of(dtype).name, {weights.data(), DType::fp32, kRows, kOdd}, dtype)) return "";
  std::vector<uint8_t> bytes(kRows * kWhole * 2);
  for (size_t i = 0; i < bytes.size(); ++i)  // numbers in fp16, which begin at even places, are finite
    bytes[i] = static_cast<uint8_t>(mix_bits(i) & (i % 2 ? 0xbf : 0xff));
  for (const BlockFormat& blocks : block_formats()) {
    PackJob job{bytes.data(), DType::fp32, kRows, kWhole - kCut};
    job.first_input = kCut;
    job.blocks = &blocks, job.row_bytes = size_t(kWhole / blocks.inputs) * blocks.bytes;
    if (blocks.held == DType::mxfp4)  // exponents of weights of about one
      for (size_t at = 0; at < bytes.size(); at += blocks.bytes) bytes[at] = static_cast<uint8_t>(120 + at % 11);
    if (!add(blocks.name, job, blocks.held)) return "";
  }
  return hashes;
}

// One model under one instruction set on several thread plans; an empty result where plans disagree.
Results check_plans(const ModelSpec& spec, const char* isa, DType dtype, Math math, bool every_plan) {
  Results expected;
  for (const int threads : {1, 3, 4, 9}) {  // all lanes, uneven, a lane each, more threads than lanes
    if (threads > 3 && !every_plan) break;
    Decoder decoder(spec, dtype, embedding_of(dtype), threads, choose_kernels(isa), math);
    load_random(decoder.model, spec);
    const Results results = run(decoder, spec);
    if (expected.logits.empty()) expected = results;
    if (results.greedy.size() != 20 || results != expected) {
      std::printf("%d threads (%s) gave other results than one\n", threads, isa);
      return {};
    }
    if (threads != 3) continue;
    // on the matrix unit, passes of four columns and more round otherwise (kernels/amx.h)
    if (!run_joined(decoder, spec) && std::strcmp(isa, "amx") != 0)
      return std::puts("joined requests gave other results"), Results{};
    Decoder borrower(spec, dtype, embedding_of(dtype), threads, choose_kernels(isa), math);
    map_parts(borrower.model, decoder.model, spec);
    if (run(borrower, spec) != expected) return std::puts("mapped weights gave other results"), Results{};
  }
  return expected;
}

// A wait that is long gives its core to others.
bool naps() {
  const std::clock_t before = std::clock();
  const double until = now_s() + 0.3;
  spin_until(1000, [&] { return now_s() > until; });
  return std::clock() - before < 0.15 * CLOCKS_PER_SEC;
}

int plant(const std::string& fault) {
  const ModelSpec spec = small_spec(Head::vocab_parallel);
  Decoder decoder(spec, DType::bf16, DType::bf16, 2, choose_kernels("portable"), Math::exact);
  load_random(decoder.model, spec);
  if (fault == "overflow") decoder.model.part(0)[decoder.model.part_bytes(0)] = 1;
  if (fault == "race") {
    Schedule& schedule = decoder.schedule();
    schedule.join({request_of(spec)});
    while (schedule.collect(10.0).empty()) continue;
    const KvMemory::Segment keys = decoder.executor.kv().segment(0, 0);
    volatile char early = 0;
    for (; schedule.running(); schedule.collect(0.0))
      for (size_t i = 0; i < keys.size; ++i) early = static_cast<char>(early + keys.bytes[i]);
  }
  std::puts("not noticed");
  return EXIT_SUCCESS;
}

struct Case {
  const char *name, *isa;
  Head head;
  DType dtype = DType::bf16;
  Math math = Math::exact;
  bool other_family = false;
  int experts = 0, first_late = 0;
  bool biased = false;
  DType kv_dtype = DType::fp32;
};

}  // namespace

int main(int count, char** arguments) {
  const std::vector<const char*> isas = usable_isas();
  const std::string what = count > 1 ? arguments[1] : "", only = "only";
  if (count > 1 && what != only) return plant(what);
  const char* best = isas.front();
  std::vector<Case> cases = {{"fp16", best, Head::replicate, DType::fp16},
                             {"fp32", best, Head::lane, DType::fp32},
                             {"rounded", best, Head::lane, DType::bf16, Math::bf16},
                             {"int8", best, Head::vocab_parallel, DType::int8},
                             {"family", best, Head::replicate, DType::bf16, Math::exact, true},
                             {"family_int8", best, Head::vocab_parallel, DType::int8, Math::exact, true},
                             {"experts", best, Head::vocab_parallel, DType::bf16, Math::exact, false, 4},
                             {"experts_int8", best, Head::replicate, DType::int8, Math::int8, false, 5},
                             {"gpt_oss", best, Head::vocab_parallel, DType::bf16, Math::exact, false, 4, 0, true},
                             {"gpt_oss_int4", best, Head::replicate, DType::int4, Math::int8, false, 5, 0, true},
                             {"int8_rounded", best, Head::replicate, DType::int8, Math::int8},
                             {"int4", best, Head::vocab_parallel, DType::int4, Math::int8},
                             {"flush", best, Head::replicate, DType::bf16, Math::exact, false, 0, 3},
                             {"fp16_kv", best, Head::replicate, DType::fp32, Math::exact, false, 0, 0, false, DType::fp16},
                             {"int8_kv", best, Head::replicate, DType::fp32, Math::exact, false, 0, 0, false, DType::int8}};
  for (const char* isa : isas) cases.push_back({isa, isa, Head::vocab_parallel});
  if (std::string(isas.back()) == "amx") cases.push_back({"amx_rounded", "amx", Head::lane, DType::bf16, Math::bf16});
  if (std::string(best) != "portable") {  // else they were the automatic choice already
    cases.push_back({"portable_fp16", "portable", Head::vocab_parallel, DType::fp16});
    cases.push_back({"portable_rounded", "portable", Head::vocab_parallel, DType::bf16, Math::bf16});
  }
  std::string hashes;
  for (const Case& c : cases) {
    if (what == only && std::find(arguments + 2, arguments + count, std::string(c.name)) == arguments + count) continue;
    // what a type of weights or an instruction set changes does not depend on the number of threads
    const bool every_plan = c.isa == c.name && (c.isa == best || std::string(c.isa) == "portable");
    ModelSpec spec = small_spec(c.head, c.other_family, c.experts, c.first_late, c.biased);
    spec.kv_dtype = c.kv_dtype;
    const std::vector<float> logits = check_plans(spec, c.isa, c.dtype, c.math, every_plan).logits;
    if (logits.empty()) return EXIT_FAILURE;
    hashes += std::string(" ") + c.name + "=" + content_hash(logits.data(), logits.size() * sizeof(float), 1);
  }
  const std::string products = product_hashes(isas);
  if (products.empty()) return EXIT_FAILURE;
  hashes += products;
  if (!naps()) return std::puts("a long wait burns its core"), EXIT_FAILURE;
  const std::vector<char> data((4 << 20) + 5, 'x');
  if (content_hash(data.data(), data.size(), 1) != content_hash(data.data(), data.size(), 3)) return EXIT_FAILURE;
  std::printf("ok%s\n", hashes.c_str());
}
