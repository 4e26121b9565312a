// What passes between the schedule and whoever executes it: plain data.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace laneformer {

constexpr int kMaxSequences = 8;   // that decode together
constexpr int kPassColumns = 128;  // at most
constexpr int kMaxOps = 32;        // what is more waits for a pass of its own

struct Column {
  int token, position;
  int cache;     // where its keys and values belong
  int sequence;  // its place among those that run
};

// What happens to KV caches before the layers of a pass, in this order. All but copies is the work of one
// thread; after a copy there are only copies.
struct KvOp {
  enum Kind : uint8_t { open, close, release, copy };
  Kind kind;
  bool windows_only;     // release: of the layers with windows
  int16_t cache;         // copy: the target
  int16_t from;          // copy: the source
  int begin, end;        // positions; copy: the first `end`
};

// How the executor draws the tokens of a plain request, and which of them end it.
struct Draw {
  Sampling rule;
  int stop_count, stops[kMaxStops];
};

// Whose layers a pass is of: the model's; a small one's that drafts, with caches of its own; the model's head
// for multi-token prediction, which drafts from streams that the pass before has left.
enum class Of : uint8_t { model, small_model, head };

struct Pass {
  uint64_t number = 0;  // of this model's passes with columns, up to this one
  int columns = 0, head_columns = 0, ops = 0;  // without columns, it has KV operations alone
  bool scores = false;  // some head columns are of sequences that score: their rows go to `Schedule::score`
  bool keeps = false;   // modules' outputs of some columns are kept, in `Schedule::partials`
  int decoding = 0, prompt_columns = 0;  // sequences that wait for their next token; columns of others
  int piece = 0;  // instead of columns: ids of a prompt, `Schedule::piece`; column[0] is the first
  Of of = Of::model;
  bool chained = false;  // of the head: the pass before was its own, so its outputs are what it goes on from
  int ahead = 0;  // passes that may follow unasked, each of the tokens that came: until one ends its sequence
  Column column[kPassColumns] = {};
  int16_t head[kPassColumns] = {};  // columns that need logits; row i of the logits belongs to column head[i]
  int16_t from[kPassColumns] = {};  // of the head: columns of the pass before whose streams these take; ascending
  KvOp op[kMaxOps] = {};
  Draw draw[kMaxSequences] = {};  // of sequences by their place, where the executor draws
};

struct PassResult {
  const float* logits = nullptr;  // rows of `stride` floats; valid until the next pass
  size_t stride = 0;
  uint32_t overflowed = 0, kv_overflowed = 0;  // bit i: the sequence at place i; ... as a key or value is too large
  const int* picked = nullptr;  // where the executor draws: [pass][column], tokens; -1 after a column's end
  int passes = 1;               // this one, and those of `ahead` that followed
  const char* error = nullptr;  // why a piece could not be read: its request ends
  int refused = -1;  // the KV operation for which there was no memory: neither later ones nor the columns have run
};

// The model and the executor, as far as they decide what a pass may hold.
struct Limits {
  int vocab = 0, context = 0;
  size_t partials = 0;   // floats of one position's module outputs
  double (*log_sum_exp)(const float* x, int n) = nullptr;
  int columns = kPassColumns;     // of a pass, at most
  int sequences = kMaxSequences;  // that run at a time; those beyond wait
  bool paced = true;              // a pass takes the longer the more columns it has
  bool picks = false;             // the executor draws the tokens of plain requests
  // A prompt with more than `unread` ids to read, and whatever is to be scored, is read in pieces of so many
  // ids, beside no columns; 0: never.
  int piece = 0, unread = 0;
  int ahead = 0;  // passes that may follow one unasked, at most
};

}  // namespace laneformer
