// Every matrix of a token once, for `kMmaColumns` columns: columns.cuh alone, without a model.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "columns.cuh"

struct Products {
  const char* tapes;
  const uint64_t* tape_at;  // [warp of the lane + 1] bytes
  const float* scales;      // with 8 bits: [row] of each matrix, one after another
  const float* x;           // [column][count of columns] of each matrix, one after another
  float* out;               // [column][rows] of each matrix, one after another
};

DEVICE constexpr int max_columns() {
  int most = 0;
  for (int columns : kColumns) most = columns > most ? columns : most;
  return most;
}
constexpr int kStride = padded(max_columns());

template <int Op>
DEVICE void product(Tape& tape, const float*& scales, const float*& x, float*& out, float* in, float* sums) {
  constexpr int kAll = kUnits[Op] * kTile;
  for (int i = thread_index(); i < kMmaColumns * kColumns[Op]; i += kThreads)
    in[i / kColumns[Op] * kStride + i % kColumns[Op]] = x[i];
  sync_block();
  const int first = Matrix<Op>::first_row(block_index());
  multiply_columns<Op>(tape, block_index(), scales + first, in, kStride, sums);
  const int rows = Matrix<Op>::row_count(block_index());
  for (int i = thread_index(); i < kMmaColumns * rows; i += kThreads) out[i / rows * kAll + first + i % rows] = sums[i];
  scales += kAll, x += kMmaColumns * kColumns[Op], out += kMmaColumns * kAll;
  sync_block();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) products(const __grid_constant__ Products p) {
  const int warp = thread_index() / 32;
  const uint64_t* at = p.tape_at + block_index() * kWarps + warp;
  Tape tape;
  tape.source = p.tapes + at[0], tape.bytes = static_cast<uint32_t>(at[1] - at[0]), tape.rounds = 0;
  tape.ring = dynamic_shared() + warp * kChunks * kChunkBytes;
  char* behind = dynamic_shared() + kWarps * kChunks * kChunkBytes;
  float* in = reinterpret_cast<float*>(behind);
  float* sums = in + kMmaColumns * kStride;
  tape.full = reinterpret_cast<uint64_t*>(sums + kMmaColumns * kMostSums) + warp * kChunks;
  tape.start();
  const float *scales = p.scales, *x = p.x;
  float* out = p.out;
  product<kQkv>(tape, scales, x, out, in, sums);
  product<kOutput>(tape, scales, x, out, in, sums);
  product<kGateUp>(tape, scales, x, out, in, sums);
  product<kDown>(tape, scales, x, out, in, sums);
  product<kHead>(tape, scales, x, out, in, sums);
}
