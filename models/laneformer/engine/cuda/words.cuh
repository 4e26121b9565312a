// A word: a number, and the epoch that says which of them it is. Both halves are stored and loaded at once, so no flag
// and no fence. Here is what does not depend on the maker of the GPU; primitives*.cuh include it in the middle.
#pragma once

#if GRAPH  // kernels follow each other: a plain number, which is there

struct Word {
  float value;
};
struct alignas(8) WordPair {
  Word a, b;
};
DEVICE void store_word(Word* at, float value, uint32_t) { at->value = value; }
DEVICE Word load_word(const Word* at) { return *at; }
DEVICE WordPair load_words(const Word* at) { return *reinterpret_cast<const WordPair*>(at); }
DEVICE bool is_of(Word, uint32_t) { return true; }

#else

struct alignas(8) Word {
  float value;
  uint32_t epoch;
};
struct WordPair {
  Word a, b;
};
DEVICE uint64_t bits_of_word(float value, uint32_t epoch) { return static_cast<uint64_t>(epoch) << 32 | bits_of(value); }
DEVICE Word word_of(uint64_t bits) { return {float_of(static_cast<uint32_t>(bits)), static_cast<uint32_t>(bits >> 32)}; }
DEVICE bool is_of(Word word, uint32_t epoch) { return word.epoch == epoch; }

#endif

// the polled word was the awaited one; the tests' emulator checks here that no other order of events could have lost it
DEVICE void accept(const Word*, uint32_t) {}
