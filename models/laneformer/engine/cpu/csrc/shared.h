// What all threads of an executor work with: the weights, and the memory in which they tell each other
// something.
#pragma once
#include <utility>

#include "exchange.h"
#include "kernels.h"
#include "processes.h"
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

struct Shared {
  // spin_turns: of a wait, before the core is given up.
  Shared(const Model& of, const Kernels& with, Math math, int spin_turns, int file)
      : model(of),
        kernels(with),
        products(model, kernels, math),
        delay(broadcast_delay(model.spec())),
        memory(file),
        exchange(shape(), spin_turns, memory.take(shape().bytes())),
        orders_memory(memory.take(sizeof(Orders))),
        orders(*reinterpret_cast<Orders*>(orders_memory.bytes())) {}

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
  SharedMemory memory;
  Exchange exchange;  // the first piece of the memory
  const Pages orders_memory;
  Orders& orders;
};

}  // namespace laneformer
