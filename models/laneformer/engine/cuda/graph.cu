// The same model as a chain of plain kernels, to be captured in a CUDA graph: one token a replay.
//
// The baseline of the persistent kernel, and its twin for correctness (the same sums in the same order, so the same bits), and
// the version for GPUs on which a cooperative launch of all lanes does not fit. Each kernel starts to fetch its weights
// before it waits for the kernel before it (programmatic dependent launch); two blocks fit on a multiprocessor, so that
// the next kernel's first weights are there when its inputs are.
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
    step.position = p.graph->position;
    step.token_epoch = 0;  // the order of kernels says what is there
    return step;
  }

  DEVICE explicit Step(const Decode& p) : Block(p) {}

  template <int Op>
  DEVICE void start_tape(int layer) {
    const int qkv = Matrix<kQkv>::segments(lane_warp), output = Matrix<kOutput>::segments(lane_warp);
    const int gate_up = Matrix<kGateUp>::segments(lane_warp), down = Matrix<kDown>::segments(lane_warp);
    const int before = (Op > kQkv ? qkv : 0) + (Op > kOutput ? output : 0) + (Op > kGateUp ? gate_up : 0);
    const int segment = Op == kHead ? kLayers * (qkv + output + gate_up + down)
                                    : layer * (qkv + output + gate_up + down) + before;
    uint64_t bytes;
    tape.source = own_tape(bytes) + static_cast<uint32_t>(segment) * kSegmentBytes;
    tape.bytes = Matrix<Op>::segments(lane_warp) * kSegmentBytes;
    tape.rounds = 0;
    tape.start();
  }
};

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(kThreads, 2) name

KERNEL(qkv)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kQkv>(p);
  const float scale = p.layer ? step.take_stream(1, p.layer - 1, 2 * p.layer) : step.take_embedding(p.graph->token);
  step.project_qkv(p.layer, scale);
}

KERNEL(attention)(const __grid_constant__ Decode p) { Step::begin<-1>(p).attention(p.layer); }

KERNEL(output)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kOutput>(p);
  step.take_attention(p.layer);
  step.project_and_join<kOutput>(p.layer);
}

KERNEL(gate_up)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kGateUp>(p);
  step.project_gate_up(p.layer, step.take_stream(0, p.layer, 2 * p.layer + 1));
}

KERNEL(down)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kDown>(p);
  step.take_activation(p.layer);
  step.project_and_join<kDown>(p.layer);
}

// after a module whose outputs join at once in all lanes
KERNEL(join_now)(const __grid_constant__ Decode p) {
  Step step = Step::begin<-1>(p);
  const int first = Matrix<kOutput>::first_row(step.lane_warp);
  Word sent[kLanes];
  for (int r = step.thread; r < Matrix<kOutput>::row_count(step.lane_warp); r += kWarpThreads) {
    const float own = load_word(step.own_inbox() + mail_at(p.module, p.layer, step.lane) + first + r).value;
    step.join_row(p.module, p.layer, first, r, own, sent);
  }
}

KERNEL(head)(const __grid_constant__ Decode p) {
  Step step = Step::begin<kHead>(p);
  const float scale = step.take_stream(1, kLayers - 1, 2 * kLayers);
  step.publish_best(step.score(p.graph->step, p.graph->token, scale), 0);
}

// one block
extern "C" __global__ void __launch_bounds__(kThreads, 1) choose(const __grid_constant__ Decode p) {
  Step step = Step::begin<-1>(p);
  bool cancelled;
  int token = step.take_best(cancelled);
  if (p.sampling.filters()) token = step.draw_one(token);
  const int now = p.graph->step, made = now + 2 - p.prompt_count;
  sync_block();  // all have read the state
  if (thread_index()) return;
  if (made <= 0) token = p.prompt[now + 1];
  if (made > 0 && made <= p.max_tokens) {
    p.tokens[made - 1] = token;
    publish_flag(p.published, made);
  }
  p.graph->token = token, p.graph->step = now + 1, p.graph->position = step.position + 1;
}
