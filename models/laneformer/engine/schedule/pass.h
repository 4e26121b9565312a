// What passes between the schedule and whoever executes it: plain data without pointers, so that a Pass may lie in
// memory that processes share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace laneformer {

constexpr int kMaxSequences = 8;   // that decode together
constexpr int kPassColumns = 128;  // at most
constexpr int kMaxOps = 32;        // what is more waits for a pass of its own

struct Column {
  int token, position;
  int cache;     // where its keys and values belong
  int sequence;  // its place among those that run
};

// What happens to KV caches before the layers of a pass, in this order. All but copies is the work of one thread; after a
// copy there are only copies.
struct KvOp {
  enum Kind : uint8_t { open, close, release, copy };
  Kind kind;
  bool windows_only;     // release: of the layers with windows
  int16_t cache;         // copy: the target
  int16_t from;          // copy: the source
  int begin, end;        // positions; copy: the first `end`
};

struct Pass {
  uint64_t number = 0;  // of passes with columns, up to this one
  int columns = 0, head_columns = 0, ops = 0;  // without columns, it has KV operations alone
  bool scores = false;  // some head columns are of sequences that score: their rows go to `Schedule::score`
  bool keeps = false;   // modules' outputs of some columns are kept, in `Schedule::partials`
  int decoding = 0, prompt_columns = 0;  // sequences that wait for their next token; columns of others
  Column column[kPassColumns] = {};
  int16_t head[kPassColumns] = {};  // columns that need logits; row i of the logits belongs to column head[i]
  KvOp op[kMaxOps] = {};
};
static_assert(std::is_trivially_copyable_v<Pass> && sizeof(Pass) < 4096);

struct PassResult {
  const float* logits = nullptr;  // rows of `stride` floats; valid until the next pass
  size_t stride = 0;
  uint32_t overflowed = 0, kv_overflowed = 0;  // bit i: the sequence at place i; ... as a key or value is too large
  int refused = -1;  // the KV operation for which there was no memory: neither later ones nor the columns have run
};

// The model and the executor, as far as they decide what a pass may hold.
struct Limits {
  int vocab = 0, context = 0;
  size_t partials = 0;   // floats of one position's module outputs
  double (*log_sum_exp)(const float* x, int n) = nullptr;
};

}  // namespace laneformer
