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

// Returns by how many layers outputs of modules are late at most; 0 where none is.
inline int broadcast_delay(const ModelSpec& spec) {
  for (const auto* late : {spec.adds_delayed, spec.delivers})
    for (int module = 0; module < 2; ++module)
      for (const uint8_t is : late[module])
        if (is) return spec.delay;
  return 0;
}

// What the first thread tells the others before a pass, and what they tell it until they meet at its end.
struct Orders {
  Counter issued;     // how many orders there were
  bool runs = false;  // the last order is to run this pass; else the threads end
  Pass pass{};
  int applied = 0;  // so many of the pass's first KV operations had memory
  std::atomic<uint32_t> overflowed{0}, kv_overflowed{0};  // see PassResult
};

struct Shared {
  // spin_turns: how often a wait looks again before it gives the core up.
  Shared(const Model& of, const Kernels& with, Math math, int spin_turns)
      : model(of),
        kernels(with),
        products(model, kernels, math),
        delay(broadcast_delay(model.spec())),
        exchange(shape(), spin_turns) {}

  int ring_layers() const { return 2 * delay + 2; }  // layers that the mailbox holds
  Exchange::Shape shape() const {
    const ModelSpec& spec = model.spec();
    return {ring_layers(), spec.lanes, model.threads(), kMaxColumns * size_t(spec.padded_hidden())};
  }

  // Adds a bias to a thread's rows of some columns' outputs, with its matrix's padding, which is nobody else's.
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
