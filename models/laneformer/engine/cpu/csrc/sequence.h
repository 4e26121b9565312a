// A request as Python hands it over, and a sequence with all that it needs on its way through the passes.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model.h"
#include "sampler.h"

namespace laneformer {

struct Request {
  std::vector<std::vector<int>> prompts;  // 1 to kMaxSequences; one when scoring
  SamplingOptions sampling;
  std::vector<uint64_t> seeds;  // of each prompt; none: that of `sampling`
  int max_new_tokens = 0;
  bool reuse_prefix = true;  // start from what a KV cache still holds
  int speculate = 0;         // most draft tokens, from earlier text, to verify in one pass
  bool masked = false;       // joined: each token is drawn among the ids that `Decoder::allow` names; no drafts
  int top_logprobs = -1;     // best ids to record for each token; -1: no log-probabilities
  int score_from = 0;        // log-probabilities of the prompt's ids from this index on; 0: generate instead
  bool keep_logits = false;  // scoring: the logits of every position as well
  std::vector<int> keep_partials;  // with keep_logits: positions, ascending, whose modules' outputs are kept as well
  int probe_every = 0;       // read-bandwidth probe before every this many decoded tokens; 0: none
  bool compare_barriers = false;  // every second segment of `probe_every` tokens: a barrier after every module

  bool scores() const { return score_from > 0; }
  // Scoring: all of the prompt, but for its last id where that is only something to predict.
  int positions() const { return static_cast<int>(prompts[0].size()) - (scores() && !keep_logits); }
};

// Log-probabilities by the model itself: of the raw logits, before penalties and temperature.
struct Scores {
  int top = 0;                     // number of likeliest ids kept for each scored token
  std::vector<float> logprobs;     // (tokens,): of the token that came
  std::vector<int> top_ids;        // (tokens, top): the likeliest first
  std::vector<float> top_logprobs;  // (tokens, top)

  void resize(size_t tokens, int best);
  void record(size_t index, const float* logits, int vocab, int token, double log_sum_exp);
  Scores part(size_t from, size_t count) const;  // of some tokens; throws std::invalid_argument where they are not here
};

struct Statistics {
  int reused = 0;                  // prompt positions found in a KV cache
  int proposed = 0, accepted = 0;  // draft tokens
  int passes = 0;
};

struct Timings {
  double first_token_s = 0;               // from the start of the request
  std::vector<double> token_s;            // decoding time of each token after the first
  std::vector<double> probe_bytes_per_s;  // before tokens 0, probe_every, 2 probe_every, ... and after the last
};

// What came of a joined request since the last `Decoder::collect`: tokens from `first` on.
struct News {
  int64_t ticket;
  int first;
  std::vector<int> tokens;
  std::optional<Scores> scores;          // of these tokens; when scoring, of all, at the end
  std::optional<Statistics> statistics;  // it has ended
  std::string error;                     // ... because of this
};

// Fields are the first thread's alone, between two meetings, unless something else stands there.
struct Sequence {
  enum class Stage { waiting, running, ended };
  using Mask = std::vector<uint32_t>;  // bit id % 32 of word id / 32: the id is possible

  Sequence(std::shared_ptr<const Request> of, size_t index, const ModelSpec& spec);

  const std::shared_ptr<const Request> request;
  std::vector<int> ids;  // the prompt, then the new tokens; grown under the mutex, as others read it there
  const int prompt_length;
  int end;            // ids.size() at which the sequence is over; when scoring, positions to run
  int cache = -1;     // its KV cache
  int position = 0;   // positions that have run through the layers
  bool finished = false;
  std::string error;  // why it finished before its end
  Sampler sampler;
  Scores scores;
  Statistics statistics;
  std::vector<float> kept_logits;  // masked: of a token whose mask had not come when it could have been drawn
  bool awaits_mask = false;
  // its part of the running pass
  int columns = 0, head_columns = 0, first_row = 0;
  std::vector<int> drafts;  // draft tokens: the last columns, ids that may come next
  // under the mutex
  Stage stage = Stage::waiting;
  bool left = false;  // it ends before the next pass
  int64_t ticket = 0;
  int collected = 0;  // new tokens that `collect` has returned
  std::map<int, Mask> masks;  // of new tokens that are not drawn yet

  int new_tokens() const { return static_cast<int>(ids.size()) - prompt_length; }
  int known() const { return request->scores() ? end : static_cast<int>(ids.size()); }  // positions that could run
  bool decodes() const { return !request->scores() && position + 1 >= known(); }
  // Positions that need not run if they are cached: generating needs the logits of the last prompt id; scoring those of
  // the id before the first scored one.
  int max_reusable() const {
    if (!request->reuse_prefix || request->keep_logits) return 0;
    return (request->scores() ? request->score_from : prompt_length) - 1;
  }
  // Prompt lookup: what followed the latest earlier place of the last few ids, `most` ids, into `drafts`.
  void draft(int most);
  bool has_news() const { return stage == Stage::ended || (!request->scores() && new_tokens() > collected); }
  News take_news();
};

}  // namespace laneformer
