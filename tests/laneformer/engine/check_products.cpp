// Every product of every instruction set alone, on odd shapes, against sums in float64.
//
// Behind each matrix lie NaNs, around the results values that must stay. Prints, for each instruction set and math, the
// largest error relative to the sum of magnitudes.
#include "check_products.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "model.h"
#include "system.h"

using namespace laneformer;

namespace {

constexpr float kUntouched = 12345.0f;
constexpr int kUnitColumns = 4;  // fewer have the product of another instruction set

struct Weights {
  Matrix matrix;
  std::vector<float> values;  // [rows][inputs]
  Pages tape;
};

Weights packed(int rows, int inputs, const std::vector<float>& values) {
  Weights w{{rows, inputs, DType::bf16}, values, Pages{}};
  const size_t bytes = w.matrix.bytes(), garbage = 1 << 14;
  w.tape = Pages(bytes + garbage);
  std::memset(w.tape.bytes() + bytes, 0xff, garbage);
  pack_rows({values.data(), DType::fp32, rows, inputs}, w.matrix, w.tape.bytes());
  return w;
}

std::vector<float> random_values(size_t count, uint64_t key, DType dtype) {
  std::vector<float> values(count + 3);
  std::vector<uint16_t> halves(count + 3);
  if (dtype == DType::fp32) return fill_random(values.data(), dtype, count, key, 1.0f), values;
  fill_random(halves.data(), dtype, count, key, 1.0f);
  convert(halves.data(), dtype, count, values.data(), DType::fp32);
  return values;
}

// [columns][rows], or nothing where something was written around it.
std::vector<float> multiplied(const Product& how, const Weights& w, const std::vector<float>& x, int columns) {
  const int pairs = w.matrix.k_pairs(), x_stride = static_cast<int>(round_up(w.matrix.inputs, 32)) + 16;
  const int rows = w.matrix.rows, y_stride = rows + 5;
  std::vector<float> inputs(size_t(columns) * x_stride, NAN), y(size_t(columns + 1) * y_stride, kUntouched);
  for (int c = 0; c < columns; ++c) {
    float* to = inputs.data() + size_t(c) * x_stride;
    std::copy_n(x.data() + size_t(c) * w.matrix.inputs, w.matrix.inputs, to);
    if (w.matrix.inputs % 2) to[w.matrix.inputs] = 0.0f;
  }
  const bool prepared_first = prepares(how, columns);
  const size_t stride = prepared_first ? how.column_bytes(pairs) : x_stride * sizeof(float);
  Pages prepared(prepared_first ? stride * round_up(columns, 32) : 64);
  if (prepared_first) how.prepare(inputs.data(), x_stride, pairs, columns, prepared.bytes());
  const char* data = prepared_first ? prepared.bytes() : reinterpret_cast<const char*>(inputs.data());
  how.multiply(w.tape.bytes(), rows, pairs, {data, stride, 4096}, y.data(), y_stride, columns);
  std::vector<float> out;
  for (size_t i = 0; i < y.size(); ++i)
    if (int(i % y_stride) < rows && int(i / y_stride) < columns)
      out.push_back(y[i]);
    else if (y[i] != kUntouched)
      return {};
  return out;
}

float rounded(float x) {  // to bf16
  uint16_t half;
  convert(&x, DType::fp32, 1, &half, DType::bf16);
  convert(&half, DType::bf16, 1, &x, DType::fp32);
  return x;
}

// The largest error relative to a sum's magnitudes; infinite where a result is none, or written elsewhere.
double error_of(const Product& how, Math math, int rows, int inputs, int columns) {
  const Weights w = packed(rows, inputs, random_values(size_t(rows) * inputs, rows * 1000 + inputs, DType::bf16));
  std::vector<float> x = random_values(size_t(columns) * inputs, columns, DType::fp32);
  const std::vector<float> y = multiplied(how, w, x, columns);
  if (y.empty()) return INFINITY;
  double worst = 0.0;
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) {
      double sum = 0.0, magnitude = 0.0;
      for (int k = 0; k < inputs; ++k) {
        const float input = x[size_t(c) * inputs + k];
        const double term = double{w.values[size_t(r) * inputs + k]} * (math == Math::bf16 ? rounded(input) : input);
        sum += term, magnitude += std::fabs(term);
      }
      const double error = std::fabs(y[size_t(c) * rows + r] - sum) / (magnitude > 0.0 ? magnitude : 1.0);
      worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
    }
  return worst;
}

// A permutation gives the inputs themselves, ones the exact sum of small integers.
bool is_exact(const Product& how, Math math, int size, int columns) {
  std::vector<float> permutation(size_t(size) * size), ones(permutation.size(), 1.0f);
  for (int r = 0; r < size; ++r) permutation[size_t(r) * size + r * 7 % size] = 1.0f;
  std::vector<float> x = random_values(size_t(columns) * size, 3, DType::fp32), whole = x;
  for (float& value : x) value = math == Math::bf16 ? rounded(value) : value;
  for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 251) - 125.0f;
  const std::vector<float> moved = multiplied(how, packed(size, size, permutation), x, columns);
  const std::vector<float> sums = multiplied(how, packed(size, size, ones), whole, columns);
  for (int c = 0; c < columns; ++c) {
    float sum = 0.0f;
    for (int k = 0; k < size; ++k) sum += whole[size_t(c) * size + k];
    for (int r = 0; r < size; ++r)
      if (moved[size_t(c) * size + r] != x[size_t(c) * size + r * 7 % size] || sums[size_t(c) * size + r] != sum)
        return false;
  }
  return true;
}

// A column has the same bits wherever it lies in a block, and whatever lies beside it.
bool is_independent(const Product& how, int rows, int inputs) {
  const Weights w = packed(rows, inputs, random_values(size_t(rows) * inputs, 1, DType::bf16));
  const std::vector<float> x = random_values(size_t{128} * inputs, 2, DType::fp32);
  const std::vector<float> all = multiplied(how, w, x, 128);
  for (const int columns : {kUnitColumns, 7, 16, 17, 33, 100})
    for (const int first : {0, 1, 19}) {
      const std::vector<float> part(x.begin() + first * inputs, x.begin() + (first + columns) * inputs);
      const std::vector<float> some = multiplied(how, w, part, columns);
      if (!std::equal(some.begin(), some.end(), all.begin() + size_t(first) * rows)) return false;
    }
  return true;
}

}  // namespace

int check_products(const std::vector<const char*>& isas) {
  for (const char* isa : isas)
    for (const Math math : {Math::exact, Math::bf16}) {
      const Product& how = choose_kernels(isa)->products[int(math)][int(DType::bf16)];
      double worst = 0.0;
      for (const int rows : {1, 16, 31, 33, 64, 136})
        for (const int inputs : {1, 31, 32, 33, 65, 200})
          for (const int columns : {1, 3, 4, 15, 16, 17, 32, 33, 63, 128})
            worst = std::max(worst, error_of(how, math, rows, inputs, columns));
      for (const int inputs : {1024, 1056, 2100}) worst = std::max(worst, error_of(how, math, 40, inputs, 35));
      std::printf("%s %s %.3g\n", isa, kMathNames[int(math)], worst);
      for (const int columns : {1, 4, 40})
        if (!is_exact(how, math, 45, columns)) return std::printf("%s: not exact\n", isa), 1;
      if (!is_independent(how, 72, 1090)) return std::printf("%s: a column depends on others\n", isa), 1;
    }
  return 0;
}
