// Matrix products of a pass: which one the math and the type of weights take, and inputs as it reads them.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <string>

#include "weights.h"

namespace laneformer {

class Products {
 public:
  Products(const Model& model, const Kernels& kernels, Math math)
      : model_(model), by_dtype_(kernels.products[static_cast<int>(math)]) {}

  // Returns the bytes of a full pass's prepared inputs for any of the model's matrices; 0 where they are read as they are.
  size_t prepared_bytes(size_t inputs) const {
    size_t most = 0;
    for (const DType dtype : model_.dtypes()) {
      const Product& how = of(dtype);
      if (!how.multiply)
        throw std::invalid_argument(std::string("this math does not take ") + traits_of(dtype).name + " weights");
      if (how.prepare) most = std::max(most, kMaxColumns * how.column_bytes(static_cast<int>(inputs / 2)));
    }
    return most;
  }

  // Prepares the columns' inputs of a matrix as its product reads them, in `buffer` unless they are read as they are.
  Inputs prepare(const Matrix& matrix, const float* x, int x_stride, int columns, Pages& buffer) const {
    const Product& how = of(matrix.dtype);
    if (!prepares(how, columns)) return {reinterpret_cast<const char*>(x), x_stride * sizeof(float), prefetch_bytes};
    how.prepare(x, x_stride, matrix.k_pairs(), columns, buffer.bytes());
    return {buffer.bytes(), how.column_bytes(matrix.k_pairs()), prefetch_bytes};
  }

  // Computes y[c][matrix.first_row ...] of all columns, from the tape of `owner`.
  void multiply(int owner, const Matrix& matrix, Inputs x, float* y, int y_stride, int columns) const {
    x.groups_before = matrix.groups_before;
    of(matrix.dtype).multiply(model_.tiles(owner, matrix), matrix.rows, matrix.k_pairs(), x, y + matrix.first_row,
                              y_stride, columns);
  }

  size_t prefetch_bytes = 3072;  // how far ahead to prefetch a tape, the same for all threads

 private:
  const Product& of(DType dtype) const { return by_dtype_[static_cast<int>(dtype)]; }

  const Model& model_;
  const Product* const by_dtype_;
};

}  // namespace laneformer
