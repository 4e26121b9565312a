// The rule by which a token is drawn, for the C++ core and, through NVRTC, for the CUDA kernels.
//
// A token's score is its logit, or the logit over the temperature plus Gumbel noise: the maximum of those is a draw from
// the softmax. The noise is a function of seed, position and token alone, so one seed gives the same tokens on every
// device, for any number of threads, and whatever else shares the pass, up to ties within rounding. Filters (top-k,
// top-p, min-p, in this order) decide which tokens take part: each is a threshold, so equal logits stay or go together.
//
// No header is included: NVRTC has none. Who includes this defines DEVICE and the integer types.
#pragma once

namespace laneformer {

struct Candidate {
  float score;
  int token;
};

// the lowest id of equal scores; NaN beats nothing
DEVICE Candidate better(Candidate a, Candidate b) {
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

// Philox4x32-10 (Salmon et al. 2011), a counter-based generator: the first word for the counter (position, token, 0, 0)
DEVICE uint32_t philox(uint64_t seed, uint32_t position, uint32_t token) {
  uint32_t x[4] = {position, token, 0, 0}, key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    x[0] = static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], x[1] = static_cast<uint32_t>(b);
    x[2] = static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1], x[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
  }
  return x[0];
}

// Gumbel noise of random bits
DEVICE float noise(uint32_t bits) {
  const float uniform = (bits >> 9) * 0x1p-23f + 0x1p-24f;  // exact: never 0, never 1
  return -logf(-logf(uniform));
}

// Bits that begin with n ones are below 1 - 2^-(n+1), and -log(-log(1 - p)) <= -log(p): their noise is at most (n + 1)
// times this, which is log(2), rounded up. No noise is more than 24 times this.
constexpr float kNoisePerOne = 0.6932f;

struct Sampling {
  uint64_t seed = 0;
  float inverse_temperature = 0.0f;  // 0: greedy
  float top_p = 1.0f;                // the fewest likely tokens whose probability reaches top_p
  float min_p = 0.0f;                // tokens at least min_p times as likely as the likeliest
  int top_k = 0;                     // 0: off

  DEVICE bool greedy() const { return inverse_temperature == 0.0f; }
  DEVICE bool filters() const { return !greedy() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }

  // of a token beside the likeliest one, whose logit is `top`
  DEVICE float weight(float logit, float top) const { return expf((logit - top) * inverse_temperature); }

  DEVICE bool keeps(float logit, float top) const { return weight(logit, top) >= min_p; }

  // `position`: of the token that was read last, counted from the start of the text
  DEVICE float score(float logit, int position, int token) const {
    return greedy() ? logit : logit * inverse_temperature + noise(philox(seed, position, token));
  }
};

}  // namespace laneformer
