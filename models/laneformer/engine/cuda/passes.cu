// One pass over the weights for up to kMmaColumns columns: sequences that decode together, draft tokens
// behind a token of one sequence, ids of a prompt. The host says what they are, and learns the token that
// each would be followed by.
//
// A launch may go on alone where each column draws the next token of a sequence: `extra_passes` more, each
// column with the token chosen for it, until it ends. One block chooses for a column, tells all blocks the
// token and whether the column ends, and nobody begins the next pass before it knows this of all columns. The
// host's wish to be heard comes with the best tokens of the first block, so it ends all columns, of all
// devices, at the same pass.
//
// Columns of one sequence stand in the order of their positions: the block that owns a position has written its key and
// value before it looks at those of the next column. A lane has kBlocksPerLane blocks, one block a
// multiprocessor, and a layer has five exchanges inside the lane:
//
//     stream -> q k v -> partial attention -> (join) stream -> activation -> (join) stream
//
// All blocks must be resident at once (a cooperative launch): a wait for one that never starts would not end.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "block.cuh"

struct Pass : Block {
  DEVICE explicit Pass(const Decode& decode) : Block(decode) {
    live = (1u << p.order.column_count) - 1;
  }

  DEVICE void start_tape() {
    uint64_t bytes;
    tape.source = own_tape(bytes), tape.bytes = static_cast<uint32_t>(bytes), tape.rounds = p.order.extra_passes;
    tape.start();
  }

  DEVICE void run_layer(int layer) {
    watch.layer = layer, locate();
    if constexpr (kMmaColumns == 1 && kBulkCopies) each([&] { prefetch_keys(layer); });  // else registers are spilled
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

  // how this column goes on, for all blocks and for the host
  DEVICE void choose() {
    if (!chooses()) return;
    const float bits = choice();
    if (step() < p.order.extra_passes)
      for (int d = thread_index(); d < DEVICES; d += kThreads) store_word(inbox(d) + kChoiceAt, bits, token_epoch + 1);
    tell(bits);
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
    return count_live();
  }

  DEVICE void run_pass() {
    each([&] { keep_scale(take_embedding(tokens[column])); });
#pragma unroll 1
    for (int layer = 0; layer < kLayers; ++layer) run_layer(layer);
    project_best();
    tape.skip_filling();
    each([&] { choose(); });
  }

  DEVICE void run() {
    start_tape();
    clear_inputs();
    for (int c = thread_index(); c < p.order.column_count; c += kThreads) tokens[c] = p.order.columns[c].token;
    sync_block();
#pragma unroll 1
    for (token_epoch = p.order.epoch;; ++token_epoch) {
      run_pass();
      if (step() == p.order.extra_passes || !goes_on()) break;
    }
    tape.finish(p.order.extra_passes - step());
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) pass(const __grid_constant__ Decode p) {
  Pass(p).run();
}
