// The vectors of numbers that CUDA C++ has built in, for compilers that have not: clang for AMD without HIP's headers,
// and the tests' emulator.
#pragma once

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
