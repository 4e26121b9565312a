// One pass over the weights for up to kMmaColumns columns: sequences that decode together, draft tokens
// behind a token of one sequence, ids of a prompt. The host says what they are, and learns the token that
// each would be followed by.
//
// A launch may go on alone where each column draws the next token of a sequence: `ahead` passes more, each
// column with the token chosen for it, until it ends. One block chooses for a column, tells all blocks the
// token and whether the column ends, and nobody begins the next pass before it knows this of all columns. The
// host's wish to be heard comes with the best tokens of the first block, so it ends all columns, of all
// devices, at the same pass.
//
// The weights are multiplied for all columns at once (columns.cuh). All else is done for one column after
// another, as for one alone: each has words and inboxes of its own, so what holds for the words of one token
// holds for each of them. Columns of one sequence stand in the order of their positions: the block that owns
// a position has written its key and value before it looks at those of the next column.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "block.cuh"

constexpr uint32_t kEnds = 1u << 30;  // set in a chosen token's word: its column ends with it

struct Pass : Block {
  static constexpr int kStride = padded(kWide > kNarrow ? kWide : kNarrow);
  float *inputs, *fresh, *sums, *streams, *scales;  // [column]: kStride, (a key and value), [part] of all columns, kMostStreamRows, 1
  int* tokens;           // shared: what each column reads in this pass; -1: it has ended
  uint32_t live;         // a bit for each column that has not

  DEVICE explicit Pass(const Decode& decode) : Block(decode) {
    locate();
    live = (1u << p.column_count) - 1;
  }

  // as Block's, with what passes have in shared memory
  DEVICE void locate() {
    stand();
    char* at = dynamic_shared() + kWarps * kChunks * kChunkBytes;
    inputs = reinterpret_cast<float*>(at), query = inputs + kMmaColumns * kStride;
    fresh = query + kGroup * kHeadDim, at = reinterpret_cast<char*>(fresh + kHeadDim);
    tape.full = reinterpret_cast<uint64_t*>(at) + warp * kChunks, at += kWarps * kChunks * 8;
    candidates = reinterpret_cast<Candidate*>(at), at += kWarps * sizeof(Candidate);
    per_warp = reinterpret_cast<float*>(at), sums = per_warp + kWarps;
    streams = sums + kMmaColumns * kMostSums, scales = streams + kMmaColumns * kMostStreamRows;
    tokens = reinterpret_cast<int*>(scales + kMmaColumns), head_scales = scales + 2 * kMmaColumns;
  }

  DEVICE void start_tape() {
    uint64_t bytes;
    tape.source = own_tape(bytes), tape.bytes = static_cast<uint32_t>(bytes), tape.rounds = p.ahead;
    tape.start();
  }

  DEVICE int step() const { return static_cast<int>(token_epoch - p.epoch); }  // passes before this one

  DEVICE void select(int c) {
    column = c, position = p.columns[c].position + step(), sequence = p.columns[c].sequence;
    words = p.lane_words + (static_cast<int64_t>(c) * kDeviceLanes + local_lane) * kLaneWords;
    wide = narrow = inputs + c * kStride, rows = streams + c * kMostStreamRows;
  }

  template <class Work>
  DEVICE void each(Work work) {
#pragma unroll 1
    for (int c = 0; c < p.column_count; ++c)
      if (live >> c & 1) select(c), work();
  }

  // of this column's inputs; the barrier is for the next one's sum of squares
  DEVICE void keep_scale(float scale) {
    if (thread_index() == 0) scales[column] = scale;
    sync_block();
  }

  template <int Op, class Publish>
  DEVICE void project(int layer, Publish publish) {
    multiply_columns<Op>(tape, group, scales_of<Op>(layer), inputs, kStride, sums);
    each([&] {
      out = sums + column * Matrix<Op>::row_count(group);
      publish(scales[column]);
    });
  }

  template <int Op>
  DEVICE void project_and_join(int layer) {
    project<Op>(layer, [&](float) {
      Word sent[kLanes] = {};
      join<Op>(layer, sent, false);
    });
  }

  DEVICE void run_layer(int layer) {
    watch.layer = layer, locate();
    project<kQkv>(layer, [&](float scale) { publish_qkv(layer, scale); });
    locate(), each([&] {
      narrow = fresh;  // of the position's own key and value; the partial sums lie in wide
      attention(layer);
    });
    sync_block();  // the inputs are where attention had its partial sums
    locate(), each([&] { take_attention(layer); });
    locate(), project_and_join<kOutput>(layer);
    locate(), each([&] { keep_scale(take_stream(0, layer, 2 * layer + 1)); });
    locate(), project<kGateUp>(layer, [&](float scale) { publish_activation(layer, scale); });
    locate(), each([&] { take_activation(layer); });
    locate(), project_and_join<kDown>(layer);
    locate(), each([&] { keep_scale(take_stream(1, layer, 2 * layer + 2)); });
  }

  // Each column by a block of its own, where there are so many: how it goes on, for all blocks and for the
  // host.
  DEVICE void choose() {
    if (p.device != 0 || block_index() != column % (kDeviceLanes * kBlocksPerLane)) return;
    bool cancelled;
    int token = take_best(cancelled);
    if (sampling().filters()) token = draw_one(token);
    const Column& c = p.columns[column];
    const bool ends = cancelled || step() + 1 == c.left || is_among(token, c.stops, c.stop_count);
    const float bits = float_of(static_cast<uint32_t>(token) | (ends ? kEnds : 0));
    if (step() < p.ahead)
      for (int d = thread_index(); d < DEVICES; d += kThreads) store_word(inbox(d) + kChoiceAt, bits, token_epoch + 1);
    if (thread_index() == 0) tell_host(p.picks + step() * kMostColumns + column, bits, token_epoch + 1);
  }

  // of the next pass, what column c reads; -1 after its end, and when the launch is given up
  DEVICE int next_token(int c) {
    const Word* choice = inbox_of(p.device, c) + kChoiceAt;
    const bool aborted = load_flag(p.aborted);
    const uint32_t bits = bits_of(wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch));
    return aborted || bits & kEnds ? -1 : static_cast<int>(bits);
  }

  // whether any column does; the same in all threads of all blocks
  DEVICE bool goes_on() {
    const int c = thread_index();
    if (c < kMmaColumns) tokens[c] = live >> c & 1 ? next_token(c) : -1;
    sync_block();
    live = 0;
    for (int i = 0; i < kMmaColumns; ++i) live |= (tokens[i] >= 0 ? 1u : 0u) << i;
    return live != 0;
  }

  DEVICE void run_pass() {
    each([&] { keep_scale(take_embedding(tokens[column])); });
#pragma unroll 1
    for (int layer = 0; layer < kLayers; ++layer) run_layer(layer);
    // asked for here, over PCIe: the answer comes while the largest matrix is read; by one thread, for all
    // columns alike
    const bool first = p.device == 0 && block_index() == 0 && thread_index() == 0;
    const uint32_t cancel = first && step() < p.ahead && load_flag(p.cancel) ? kCancelled : 0;
    project<kHead>(0, [&](float scale) { publish_best(scored(column, tokens[column], scale), cancel); });
    tape.skip_filling();
    each([&] { choose(); });
  }

  DEVICE void run() {
    start_tape();
    for (int i = thread_index(); i < kMmaColumns * kStride; i += kThreads) inputs[i] = 0.0f;  // also what is not used
    for (int c = thread_index(); c < p.column_count; c += kThreads) tokens[c] = p.columns[c].token;
    sync_block();
#pragma unroll 1
    for (token_epoch = p.epoch;; ++token_epoch) {
      run_pass();
      if (step() == p.ahead || !goes_on()) break;
    }
    tape.finish(p.ahead - step());
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) pass(const __grid_constant__ Decode p) { Pass(p).run(); }
