// One pass over the weights for up to kMmaColumns columns: sequences that decode together, draft tokens behind a token
// of one sequence, ids of a prompt. The host says what they are, and learns the token that each would be followed by.
//
// The weights are multiplied for all columns at once (columns.cuh). All else is done for one column after another, as
// for one alone: each has words and inboxes of its own, so what holds for the words of one token holds for each of them.
// Columns of one sequence stand in the order of their positions: the block that owns a position has written its key
// and value before it looks at those of the next column.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "block.cuh"

struct Pass : Block {
  static constexpr int kStride = padded(kWide > kNarrow ? kWide : kNarrow);
  float *inputs, *fresh, *sums, *streams, *scales;  // [column]: kStride, (a key and value), [part] of all columns, kMostStreamRows, 1

  DEVICE explicit Pass(const Decode& decode) : Block(decode) {
    char* at = dynamic_shared() + kWarps * kChunks * kChunkBytes;
    inputs = reinterpret_cast<float*>(at), query = inputs + kMmaColumns * kStride;
    fresh = query + kGroup * kHeadDim, at = reinterpret_cast<char*>(fresh + kHeadDim);
    tape.full = reinterpret_cast<uint64_t*>(at) + warp * kChunks, at += kWarps * kChunks * 8;
    candidates = reinterpret_cast<Candidate*>(at), at += kWarps * sizeof(Candidate);
    per_warp = reinterpret_cast<float*>(at), sums = per_warp + kWarps;
    streams = sums + kMmaColumns * kMostSums, scales = streams + kMmaColumns * kMostStreamRows;
    head_scales = scales + kMmaColumns;
    token_epoch = p.epoch;
  }

  DEVICE void start_tape() {
    uint64_t bytes;
    tape.source = own_tape(bytes), tape.bytes = static_cast<uint32_t>(bytes), tape.endless = false;
    tape.start();
  }

  DEVICE void select(int c) {
    column = c, position = p.columns[c].position, sequence = p.columns[c].sequence;
    words = p.lane_words + (static_cast<int64_t>(local_lane) * kMmaColumns + c) * kLaneWords;
    wide = narrow = inputs + c * kStride, rows = streams + c * kMostStreamRows;
  }

  template <class Work>
  DEVICE void each(Work work) {
#pragma unroll 1
    for (int c = 0; c < p.column_count; ++c) select(c), work();
  }

  // of this column's inputs; the barrier is for the next one's sum of squares
  DEVICE void keep_scale(float scale) {
    if (thread_index() == 0) scales[column] = scale;
    sync_block();
  }

  template <int Op, class Publish>
  DEVICE void project(Publish publish) {
    multiply_columns<Op>(tape, group, inputs, kStride, sums);
    each([&] {
      out = sums + column * Matrix<Op>::row_count(group);
      publish(scales[column]);
    });
  }

  template <int Op>
  DEVICE void project_and_join(int layer) {
    project<Op>([&](float) {
      Word sent[kLanes] = {};
      join<Op>(layer, sent, false);
    });
  }

  DEVICE void run_layer(int layer) {
    watch.layer = layer;
    project<kQkv>([&](float scale) { publish_qkv(layer, scale); });
    each([&] {
      narrow = fresh;  // of the position's own key and value; the partial sums lie in wide
      attention(layer);
    });
    sync_block();  // the inputs are where attention had its partial sums
    each([&] { take_attention(layer); });
    project_and_join<kOutput>(layer);
    each([&] { keep_scale(take_stream(0, layer, 2 * layer + 1)); });
    project<kGateUp>([&](float scale) { publish_activation(layer, scale); });
    each([&] { take_activation(layer); });
    project_and_join<kDown>(layer);
    each([&] { keep_scale(take_stream(1, layer, 2 * layer + 2)); });
  }

  // each column by a block of its own, where there are so many
  DEVICE void choose() {
    if (p.device != 0 || block_index() != column % (kDeviceLanes * kBlocksPerLane)) return;
    bool cancelled;
    int token = take_best(cancelled);
    if (sampling().filters()) token = draw_one(token);
    if (thread_index() == 0) p.tokens[column] = token;
  }

  DEVICE void run() {
    start_tape();
    for (int i = thread_index(); i < kMmaColumns * kStride; i += kThreads) inputs[i] = 0.0f;  // also what is not used
    sync_block();
    each([&] { keep_scale(take_embedding(p.columns[column].token)); });
#pragma unroll 1
    for (int layer = 0; layer < kLayers; ++layer) run_layer(layer);
    project<kHead>([&](float scale) { publish_best(scored(column, p.columns[column].token, scale), 0); });
    each([&] { choose(); });
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) pass(const __grid_constant__ Decode p) { Pass(p).run(); }
