// What all threads of an executor work with: the weights, the mailbox, and the pass under way.
#pragma once
#include <atomic>
#include <cstdint>

#include "../../schedule/pass.h"
#include "exchange.h"
#include "kernels.h"
#include "products.h"
#include "weights.h"

namespace laneformer {

// How many layers late outputs of modules arrive, at the latest; 0 where none ever does.
inline int broadcast_delay(const ModelSpec& spec) {
  for (const auto* late : {spec.adds_delayed, spec.delivers})
    for (int module = 0; module < 2; ++module)
      for (const uint8_t is : late[module])
        if (is) return spec.delay;
  return 0;
}

// What the first thread tells the others, and what they tell it until they have met.
struct Orders {
  Counter issued;     // the orders so far
  bool runs = false;  // the last one is this pass; else its threads end
  Pass pass{};
  int applied = 0;  // of the pass's KV operations, in order, those for which there was memory
  std::atomic<uint32_t> overflowed{0}, kv_overflowed{0};  // bit i: place i; ... as a key or value is beyond fp16
};

struct Shared {
  // spin_turns: of a wait, before the core is given up.
  Shared(const Model& of, const Kernels& with, Math math, int spin_turns)
      : model(of),
        kernels(with),
        products(model, kernels, math),
        delay(broadcast_delay(model.spec())),
        exchange(shape(), spin_turns) {}

  int ring_layers() const { return 2 * delay + 2; }  // slots of the mailbox
  Exchange::Shape shape() const {
    const ModelSpec& spec = model.spec();
    return {ring_layers(), spec.lanes, model.threads(), kMaxColumns * size_t(spec.padded_hidden())};
  }

  // A bias to a thread's rows of some columns' outputs. A matrix ends in a tile of its own: padding is nobody
  // else's.
  void add_bias(const float* bias, const Matrix& rows, float* y, size_t stride, size_t columns) const {
    for (size_t c = 0; c < columns; ++c)
      kernels.add(y + c * stride + rows.first_row, bias + rows.first_row,
                  static_cast<int>(round_up(rows.rows, 16)));
  }

  const Model& model;
  const Kernels& kernels;
  Products products;
  const int delay;
  Exchange exchange;
  Orders orders;
};

}  // namespace laneformer
