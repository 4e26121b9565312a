// The same model as a chain of plain kernels, to be captured in a CUDA graph: one pass a replay.
//
// The baseline that the kernel of passes has to beat, its twin for correctness (the same sums in the same order, so the
// same bits), and the version for GPUs on which a cooperative launch of all lanes does not fit. Each kernel starts to fetch
// its weights before it waits for the kernel before it (programmatic dependent launch); two blocks fit on a
// multiprocessor, so that the next kernel's first weights are there when its inputs are.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "block.cuh"

struct Step : Block {
  // `Op` < 0: a kernel without weights
  template <int Op>
  DEVICE static Step begin(const Decode& p) {
    Step step(p);
    step.watch.layer = p.layer;
    if constexpr (Op >= 0) step.start_tape<Op>(p.layer);
    let_next_start();
    wait_for_previous();
    const int c = thread_index();
    if (c < kMmaColumns) step.tokens[c] = c < step.order().column_count ? p.graph->tokens[c] : -1;
    if constexpr (Op >= 0) step.clear_inputs();
    sync_block();
    step.count_live();
    return step;
  }

  DEVICE explicit Step(const Decode& p) : Block(p) {}

  template <int Op>
  DEVICE void start_tape(int layer) {
    const int qkv = segments<kQkv>(block_in_lane, warp), output = segments<kOutput>(block_in_lane, warp);
    const int gate_up = segments<kGateUp>(block_in_lane, warp), down = segments<kDown>(block_in_lane, warp);
    const int before = (Op > kQkv ? qkv : 0) + (Op > kOutput ? output : 0) + (Op > kGateUp ? gate_up : 0);
    const int segment = Op == kHead ? kLayers * (qkv + output + gate_up + down)
                                    : layer * (qkv + output + gate_up + down) + before;
    uint64_t bytes;
    tape.source = own_tape(bytes) + static_cast<uint32_t>(segment) * kSegmentBytes;
    tape.bytes = segments<Op>(block_in_lane, warp) * kSegmentBytes;
    tape.rounds = 0;
    tape.start();
  }
};

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(kThreads, 2) name

KERNEL(qkv)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kQkv>(p);
  step.each([&] {
    step.keep_scale(p.layer ? step.take_stream(1, p.layer - 1, 2 * p.layer) : step.take_embedding(step.tokens[step.column]));
  });
  step.project<kQkv>(p.layer, [&](float scale) { step.publish_qkv(p.layer, scale); });
}

KERNEL(attention)(const __grid_constant__ Decode p) {
  Step step = Step::begin<-1>(p);
  step.each([&] {
    step.narrow = step.fresh;
    step.attention(p.layer);
  });
}

KERNEL(output)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kOutput>(p);
  step.each([&] { step.take_attention(p.layer); });
  step.project_and_join<kOutput>(p.layer);
}

KERNEL(gate_up)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kGateUp>(p);
  step.each([&] { step.keep_scale(step.take_stream(0, p.layer, 2 * p.layer + 1)); });
  step.project<kGateUp>(p.layer, [&](float scale) { step.publish_activation(p.layer, scale); });
}

KERNEL(down)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kDown>(p);
  step.each([&] { step.take_activation(p.layer); });
  step.project_and_join<kDown>(p.layer);
}

// after a module whose outputs join at once in all lanes, and after the last one of a model with `flush`
KERNEL(join_now)(const __grid_constant__ Decode p) {
  Step step = Step::begin<-1>(p);
  const int first = Matrix<kOutput>::first_row(step.block_in_lane), count = Matrix<kOutput>::row_count(step.block_in_lane);
  step.each([&] {
    Word sent[kLanes];
    for (int r = thread_index(); r < count; r += kThreads) {
      const float own = load_word(step.own_inbox() + mail_at(p.module, p.layer, step.lane) + first + r).value;
      if (kAddsDelayed[p.module][p.layer]) step.look(sent, p.module, p.layer - kDelay, first + r, 0.0f);
      step.join_row(p.module, p.layer, first, r, own, sent);
    }
  });
}

KERNEL(head)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kHead>(p);
  step.each([&] { step.keep_scale(step.take_stream(1, kLayers - 1, 2 * kLayers)); });
  step.project_best();
}

// a block a column, as far as there are so many
extern "C" __global__ void __launch_bounds__(kThreads, 1) choose(const __grid_constant__ Decode p) {
  Step step = Step::begin<-1>(p);
  step.each([&] {
    if (!step.chooses()) return;
    const float chosen = step.choice();
    step.tell(chosen);
    sync_block();  // all have read the state
    if (thread_index()) return;
    p.graph->tokens[step.column] = bits_of(chosen) & kEnds ? -1 : static_cast<int>(bits_of(chosen));
    ++p.graph->steps[step.column];
  });
}
