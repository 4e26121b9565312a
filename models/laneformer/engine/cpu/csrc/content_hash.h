// A 128-bit fingerprint of a long buffer, at the speed of memory and on several threads.
//
// It must notice a changed, damaged or cut file, not an adversary: no cryptography, no dependency. Four chains of
// xor, rotate, multiply take turns on 8-byte words. Each step is a bijection of its chain's state, so one changed word
// always changes the result, and the rotation carries high bits (signs, exponents) down into later products.
#pragma once
#include <cstddef>
#include <string>

namespace laneformer {

std::string content_hash(const void* data, size_t size, int threads);  // 32 hexadecimal digits

}  // namespace laneformer
