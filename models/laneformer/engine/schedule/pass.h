// What passes between the schedule and whoever executes it: plain data.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace laneformer {

constexpr int kMaxSequences = 8;   // the most sequences that decode together
constexpr int kPassColumns = 128;  // the most columns of a pass
constexpr int kMaxOps = 32;        // KV operations of a pass; further ones wait for a pass of their own

struct Column {
  int token, position;
  int cache;     // where its keys and values belong
  int sequence;  // its place among those that run
};

// An operation on KV caches before the layers of a pass; they run in order. One thread does all but copies, which all
// threads share; after a copy there are only copies.
struct KvOp {
  enum Kind : uint8_t { open, close, release, copy };
  Kind kind;
  bool windows_only;     // release: only in layers with windows
  int16_t cache;         // the cache; copy: the target
  int16_t from;          // copy: the source
  int begin, end;        // release: these positions; copy: the first `end`
};

// How the executor draws the tokens of a plain request, and which of them end it.
struct Draw {
  Sampling rule;
  int stop_count, stops[kMaxStops];
};

// The network whose layers a pass runs: the model; a small model that drafts, with caches of its own; the model's head
// for multi-token prediction (MTP), which drafts from the streams that the pass before has left.
enum class Network : uint8_t { model, small_model, mtp };

struct Pass {
  uint64_t number = 0;  // counts passes with columns, this one included: the small model's; or the model's and mtp's
  int columns = 0, logit_columns = 0, ops = 0;  // without columns, it has KV operations alone
  bool scores = false;  // some logit columns belong to sequences that score: their rows go to `Schedule::score_row`
  bool keeps = false;   // modules' outputs of some columns are kept, in `Schedule::partials`
  int decoding = 0, prompt_columns = 0;  // sequences that wait for their next token; columns of others
  int chunk_tokens = 0;  // instead of columns: so many ids of a prompt, `Schedule::prompt_chunk`; column[0] is the first
  Network network = Network::model;
  bool chained = false;  // mtp: the pass before was mtp's too, so this one goes on from that one's outputs
  int extra_passes = 0;  // passes that may follow unasked, each column with its token just drawn, until that ends it
  Column column[kPassColumns] = {};
  int16_t logit_column[kPassColumns] = {};  // row i of the logits belongs to column logit_column[i]
  int16_t from[kPassColumns] = {};  // mtp: columns of the pass before whose streams these take; ascending
  KvOp op[kMaxOps] = {};
  Draw draw[kMaxSequences] = {};  // by the sequence's place, where the executor draws
};

struct PassResult {
  const float* logits = nullptr;  // rows of `stride` floats; valid until the next pass
  size_t stride = 0;
  // Bit i: an activation or logit of the sequence at place i overflowed; kv_overflowed: because of a key or value.
  uint32_t overflowed = 0, kv_overflowed = 0;
  const int* picked = nullptr;  // where the executor draws: [pass][column], tokens; -1 after a column's end
  int passes = 1;               // this one, and the extra passes that followed
  const char* error = nullptr;  // why a chunk could not be read: its request ends
  int refused = -1;  // the KV operation for which there was no memory: neither later ones nor the columns have run
};

// The model and the executor, as far as they decide what a pass may hold.
struct Limits {
  int vocab = 0, context = 0;
  size_t partials = 0;   // floats that hold one position's module outputs
  double (*log_sum_exp)(const float* x, int n) = nullptr;
  int columns = kPassColumns;     // the most columns of a pass
  int sequences = kMaxSequences;  // the most sequences that run at a time; others wait
  bool paced = true;              // a pass takes the longer the more columns it has
  bool picks = false;             // the executor draws the tokens of plain requests
  // A prompt with more than `unread` ids to read, and whatever is to be scored, is read in chunks of at most so many
  // ids, in passes without columns; 0: never.
  int max_chunk_tokens = 0, unread = 0;
  int extra_passes = 0;  // the most passes that may follow one without being asked for
};

}  // namespace laneformer
