// A request as Python hands it over, and a sequence with all that it needs on its way through the passes.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pass.h"
#include "sampler.h"
#include "suffix.h"

namespace laneformer {

struct Request {
  std::vector<int> prompt;
  SamplingOptions sampling;
  int max_new_tokens = 0;
  bool reuse_prefix = true;  // start from what a KV cache still holds; draft from earlier outputs
  int speculate = 0;         // the most draft tokens to verify in one pass
  std::vector<int> prediction;  // what the output may look like, to take drafts from
  bool masked = false;       // each token is drawn among the ids that `Schedule::allow` names; no drafts
  bool quiet = false;        // its end alone is news, so no token wakes whoever collects, which would take a core
  bool timed = false;        // its end comes with Timings
  int top_logprobs = -1;     // best ids to record for each token; -1: no log-probabilities
  int score_from = 0;        // log-probabilities of the prompt's ids from this index on; 0: generate instead
  bool keep_logits = false;  // scoring: the logits of every position as well
  std::vector<int> keep_partials;  // with keep_logits: positions, ascending, whose modules' outputs are kept as well

  bool scores() const { return score_from > 0; }
  // Whether nothing but the drawn tokens is wanted, so that the executor may draw them itself.
  bool plain() const { return !masked && top_logprobs < 0 && !scores() && sampling.plain(); }
  // Returns the prompt positions to run: when scoring, the last id may only be something to predict.
  int positions() const { return static_cast<int>(prompt.size()) - (scores() && !keep_logits); }
};

// Log-probabilities of the raw logits, before penalties and temperature.
struct Scores {
  int top = 0;                     // number of likeliest ids kept for each scored token
  std::vector<float> logprobs;     // (tokens,): the token that came
  std::vector<int> top_ids;        // (tokens, top): the likeliest first
  std::vector<float> top_logprobs;  // (tokens, top)

  void resize(size_t tokens, int best);
  void record(size_t index, const float* logits, int vocab, int token, double log_sum_exp);
  Scores part(size_t from, size_t count) const;  // throws std::invalid_argument for tokens that are not here
};

struct Statistics {
  int reused = 0;                  // prompt positions found in a KV cache
  int proposed = 0, accepted = 0;  // draft tokens
  int passes = 0;

  Statistics& operator+=(const Statistics& o) {
    reused += o.reused, proposed += o.proposed, accepted += o.accepted, passes += o.passes;
    return *this;
  }
};

struct Timings {
  double first_token_s = 0;     // time from the join to the first token
  std::vector<double> token_s;  // decoding time of each token after the first
};

enum class Fault { request, overflow, executor };  // what was to blame for an error; overflow: the model's numbers

// What a request leaves at its end.
struct Ended {
  Statistics statistics;
  std::string error;  // why it ended before it was finished
  Fault fault = Fault::request;
  std::vector<float> logits;    // with keep_logits: [position][vocab]
  std::vector<float> partials;  // with keep_partials: [position][layer][module][lane][hidden]
  Timings timings;
};

// What came of a request since the last `Schedule::collect`: tokens from `first` on.
struct News {
  int64_t ticket;
  int first;
  std::vector<int> tokens;
  std::optional<Scores> scores;  // scores of these tokens; when scoring, all scores, at the end
  std::optional<Ended> ended;
};

// What the PassDrafter (pass_drafter.h) keeps of a sequence.
struct DraftState {
  int cache = -1;        // small model: its KV cache
  int agreed = 0;        // small model: ids that have run through it and are part of the text
  std::vector<int> ran;  // small model: all ids that have run through it, rejected drafts included
  int first = 0, columns = 0, from = 0;  // mtp: positions that can run, and the first one's column in the pass before
  int wanted = 0;          // drafts to make before the next pass; 0: the text's drafts are taken, or none
  double least_odds = 0;   // the odds below which no further draft is worth its cost
  int row = -1;            // the row of its pass's logits from which to draw
  std::vector<int> drawn;  // the kind of each draft, by how certain the drafter was of it
  Rate rate{2.0, 3.0};     // how many of all its drafts were right
  std::array<Rate, 5> kinds{{{0.6, 3.0}, {1.2, 3.0}, {1.8, 3.0}, {2.4, 3.0}, {2.85, 3.0}}};  // the same by kind
  bool off = false;        // it drafts no more: there was no memory, or its numbers overflowed
};

// Only the executor's thread touches a field, between two passes, unless a comment says otherwise.
struct Sequence {
  enum class Stage { waiting, running, ended };
  using Mask = std::vector<uint32_t>;  // bit id % 32 of word id / 32: the id is possible

  Sequence(Request of, const Limits& limits, const PastOutputs& past);

  const Request request;
  std::vector<int> ids;  // the prompt, then the new tokens; grown under the mutex, as others read it there
  const int prompt_length;
  const bool picks;   // the executor draws its tokens
  int end;            // ids.size() at which the sequence is over; when scoring, the positions to run
  int cache = -1;     // its KV cache
  int position = 0;   // positions that have run through the layers
  int chunks_end = 0;  // positions before it are read in chunks
  bool finished = false;
  Sampler sampler;
  std::unique_ptr<Drafter> drafter;
  Scores scores;
  Ended left_behind;
  double joined_s = 0;
  std::vector<float> undrawn;  // masked: logits of a token that could not be drawn yet, as its mask had not come
  bool awaits_mask = false;
  // its part of the running pass
  int columns = 0, logit_columns = 0, first_column = 0, first_row = 0;
  std::vector<int> drafts;  // draft tokens: the last columns, ids that may come next
  std::vector<double> odds;  // ... the probability that each comes, and all before it
  DraftState draft_state;
  // under the mutex
  Stage stage = Stage::waiting;
  bool left = false;  // its caller has left, so it ends before the next pass
  int64_t ticket = 0;
  int collected = 0;  // new tokens that `collect` has returned
  std::map<int, Mask> masks;  // by new token that is not drawn yet

  int new_tokens() const { return static_cast<int>(ids.size()) - prompt_length; }
  int known() const { return request.scores() ? end : static_cast<int>(ids.size()); }  // positions that could run
  // Whose drafts the next pass verifies: the PassDrafter's, or what the sequence's own Drafter proposed.
  bool takes_pass_drafts() const { return draft_state.wanted > 0; }
  void take(int token) {  // under the mutex
    ids.push_back(token);
    if (drafter) drafter->extend(token);
  }
  bool reads_chunks() const { return position < chunks_end; }
  bool decodes() const { return !request.scores() && position + 1 >= known(); }
  // Returns the positions that need not run if they are cached: generating needs the logits of the last prompt id,
  // scoring those of the id before the first scored one.
  int max_reusable() const {
    if (!request.reuse_prefix || request.keep_logits) return 0;
    return (request.scores() ? request.score_from : prompt_length) - 1;
  }
  void fail(std::string why, Fault fault) {
    left_behind.error = std::move(why), left_behind.fault = fault;
    finished = true;
  }
  bool has_news() const {
    return stage == Stage::ended || (!request.quiet && !request.scores() && new_tokens() > collected);
  }
  News take_news();
};

}  // namespace laneformer
