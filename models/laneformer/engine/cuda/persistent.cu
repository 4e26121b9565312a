// The persistent kernel: many tokens in one cooperative launch, sampling and the stop test included.
//
// A lane is a group of kBlocksPerLane blocks, one block a multiprocessor. Warps stream their tapes without looking at
// anything else (rows.cuh); what they wait for are words of the same lane, and of other lanes only what was written
// `kDelay` layers ago (exchange.cuh). A layer has five exchanges inside the lane:
//
//     stream -> q k v -> partial attention -> (join) stream -> activation -> (join) stream
//
// All blocks learn the best token from one exchange at the end; each decides for itself, from the same words, whether
// to go on. All blocks must be resident at once (a cooperative launch): a wait for one that never starts would not end.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "block.cuh"

struct Persistent : Block {
  DEVICE explicit Persistent(const Decode& decode) : Block(decode) {
    uint64_t bytes;
    tape.source = own_tape(bytes);
    tape.bytes = static_cast<uint32_t>(bytes);
    tape.rounds = ~0u;  // more than a request has
    tape.start();
  }

  DEVICE void run_layer(int layer, float scale) {
    watch.layer = layer, locate();
    prefetch_keys(layer);
    project_qkv(layer, scale);
    locate(), attention(layer);
    locate(), take_attention(layer);
    locate(), project_and_join<kOutput>(layer);
    locate(), scale = take_stream(0, layer, 2 * layer + 1);
    locate(), project_gate_up(layer, scale);
    locate(), take_activation(layer);
    locate(), project_and_join<kDown>(layer);
  }

  DEVICE int run_token(int token, int step, bool& cancelled) {
    token_epoch = p.epoch + step, position = p.position + step;
    float scale = take_embedding(token);
    publish(step + 1 - p.prompt_count);  // behind the barrier: the block's other warps need not wait
#pragma unroll 1
    for (int layer = 0; layer < kLayers; ++layer) {
      if (layer) locate(), scale = take_stream(1, layer - 1, 2 * layer);
      run_layer(layer, scale);
    }
    locate(), scale = take_stream(1, kLayers - 1, 2 * kLayers);
    // asked for here, over PCIe: the answer comes while the largest matrix is read
    const uint32_t cancel = decides() && thread_index() < DEVICES && load_flag(p.cancel) ? kCancelled : 0;
    token = choose(score(step, token, scale), cancel, cancelled);
    tape.skip_filling();
    return token;
  }

  DEVICE bool decides() const { return p.device == 0 && block_index() == 0; }

  // Tells the host of the tokens made so far: a release to the host's memory, which takes as long as a small exchange.
  DEVICE void publish(int made) {
    if (made > 0 && decides() && thread_index() == 0) publish_flag(p.published, made);
  }

  // Every block learns the best token; with filters, the one that the first block has drawn. The host's stop flag
  // comes with it, so that all blocks see it at the same token.
  DEVICE int choose(Candidate own, uint32_t cancel, bool& cancelled) {
    publish_best(own, cancel);
    if (!p.sampling.filters()) return take_best(cancelled);
    Word* choice = own_inbox() + kChoiceAt;
    if (decides()) {
      const int token = draw_one(take_best(cancelled));
      for (int d = thread_index(); d < DEVICES; d += kThreads)
        store_word(inbox(d) + kChoiceAt, float_of(static_cast<uint32_t>(token) | cancel), token_epoch + 1);
    }
    const uint32_t bits = bits_of(wait_word(load_word(choice), choice, token_epoch + 1, kChoice, watch));
    cancelled = bits & kCancelled;
    return static_cast<int>(bits & ~kCancelled);
  }

  // the same in all threads of the block, also where a wait was given up
  DEVICE bool ends(bool stops) {
    if (thread_index() == 0) per_warp[0] = stops || load_flag(p.aborted);
    sync_block();
    const bool end = per_warp[0] != 0.0f;
    sync_block();
    return end;
  }

  DEVICE void run() {
    int token = p.prompt[0];
#pragma unroll 1
    for (int step = 0;; ++step) {
      bool cancelled = false;
      token = run_token(token, step, cancelled);
      const int made = step + 2 - p.prompt_count;
      if (made <= 0) token = p.prompt[step + 1];
      if (made > 0 && decides() && thread_index() == 0) p.tokens[made - 1] = token;
      const bool stops = cancelled || made == p.max_tokens || (made > 0 && is_stop(token));
      if (ends(stops)) {
        publish(made);
        break;
      }
    }
    tape.finish(kChunks);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(const __grid_constant__ Decode p) {
  Persistent(p).run();
}
