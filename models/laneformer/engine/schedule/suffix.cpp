#include "suffix.h"

#include <algorithm>
#include <utility>

namespace laneformer {

namespace {

constexpr int kLongestMatch = 64;  // more agreement says nothing new
// Odds that an id is right after 2, 3, 4, 6, 9, ... ids that agree, as a request begins. A few drafts outweigh them.
constexpr int kBuckets[] = {2, 3, 4, 6, 9, 14, 22, 40};
constexpr double kFirstOdds[] = {0.30, 0.42, 0.52, 0.65, 0.75, 0.83, 0.90, 0.95};
constexpr double kFirstWeight = 3.0;

}  // namespace

// --- places -----------------------------------------------------------------------------------------------------

uint64_t SuffixIndex::hash(const int* end, int ids) {
  uint64_t h = 0;
  for (const int* id = end - ids; id < end; ++id) h = (h ^ static_cast<uint32_t>(*id)) * 0x9e3779b97f4a7c15ull;
  return h ^ h >> 32;
}

void SuffixIndex::append(int id) {
  ids_.push_back(id);
  const int end = static_cast<int>(ids_.size());
  for (Chain& chain : chains_) {
    chain.before.push_back(0);
    if (chain.latest.size() < ids_.size()) rehash(chain);
    link(chain, end);
  }
}

void SuffixIndex::link(Chain& chain, int end) {
  if (end < chain.ids) return;
  int& latest = chain.latest[hash(ids_.data() + end, chain.ids) & (chain.latest.size() - 1)];
  chain.before[end - 1] = std::exchange(latest, end);
}

void SuffixIndex::rehash(Chain& chain) {
  chain.latest.assign(std::max<size_t>(256, 2 * chain.latest.size()), 0);
  for (int end = 1; end < static_cast<int>(ids_.size()); ++end) link(chain, end);
}

SuffixIndex::Match SuffixIndex::longest(std::span<const int> text, bool own) const {
  Match best;
  for (const Chain& chain : chains_)
    if (best.length < chain.ids && text.size() >= size_t(chain.ids) && !ids_.empty()) walk(chain, text, own, best);
  return best;
}

void SuffixIndex::walk(const Chain& chain, std::span<const int> text, bool own, Match& best) const {
  const int* text_end = text.data() + text.size();
  int place = chain.latest[hash(text_end, chain.ids) & (chain.latest.size() - 1)];
  if (own && place == static_cast<int>(ids_.size())) place = chain.before[place - 1];
  for (int step = 0; place && step < chain.longest_walk; ++step, place = chain.before[place - 1]) {
    const int most = std::min({place, static_cast<int>(text.size()), kLongestMatch});
    int length = 0;
    while (length < most && ids_[place - 1 - length] == text_end[-1 - length] && text_end[-1 - length] != kBarrier)
      ++length;
    if (length > best.length && length >= chain.ids && place < static_cast<int>(ids_.size())) best = {length, place};
    if (best.length == kLongestMatch) return;
  }
}

void PastOutputs::add(std::span<const int> output) {
  if (output.size() < 8 || output.size() > kHalf) return;
  if (halves_[0].ids().size() + output.size() > kHalf) halves_[1] = std::exchange(halves_[0], {});
  for (const int id : output) halves_[0].append(id);
  halves_[0].append(SuffixIndex::kBarrier);
}

SuffixIndex::Match PastOutputs::longest(std::span<const int> text, const std::vector<int>** in) const {
  SuffixIndex::Match best;
  for (const SuffixIndex& half : halves_) {
    const SuffixIndex::Match match = half.longest(text, false);
    if (match.length > best.length) best = match, *in = &half.ids();
  }
  return best;
}

// --- drafts -----------------------------------------------------------------------------------------------------

SuffixDrafter::SuffixDrafter(const std::vector<int>& prediction, const std::vector<int>& prompt,
                             const PastOutputs* past)
    : past_(past) {
  for (const double odds : kFirstOdds) rates_.push_back({odds * kFirstWeight, kFirstWeight});
  for (const int id : prediction) own_.append(id);
  if (!prediction.empty()) own_.append(SuffixIndex::kBarrier);
  for (const int id : prompt) own_.append(id);
}

int SuffixDrafter::bucket(int length) {
  return static_cast<int>(std::upper_bound(std::begin(kBuckets), std::end(kBuckets), length) - kBuckets) - 1;
}

void SuffixDrafter::propose(int most, std::vector<int>& drafts, std::vector<double>& odds) {
  const std::vector<int>*text = &own_.ids(), *past = nullptr;
  SuffixIndex::Match match = own_.longest(*text, true);
  if (const auto other = past_ ? past_->longest(*text, &past) : SuffixIndex::Match{}; other.length > match.length)
    match = other, text = past;
  length_ = match.length;
  double all = 1.0;
  const int size = static_cast<int>(text->size()), first = static_cast<int>(drafts.size());
  for (int i = 0; match.length && i < most; ++i) {
    const int place = match.next + i;  // a repetition may continue into its own drafts
    if (place >= size && text != &own_.ids()) break;
    const int id = place < size ? (*text)[place] : drafts[first + place - size];
    if (id == SuffixIndex::kBarrier) break;
    const Rate& rate = rates_[bucket(length_ + i)];
    all *= rate.right / rate.tried;
    drafts.push_back(id), odds.push_back(all);
  }
}

void SuffixDrafter::learn(int drafts, int right) {
  if (!length_) return;
  for (int i = 0; i < std::min(drafts, right + 1); ++i) rates_[bucket(length_ + i)].learn(i < right);
  const int i = bucket(length_);
  if (!drafts) rates_[i].forget({kFirstOdds[i] * kFirstWeight, kFirstWeight});
}

}  // namespace laneformer
