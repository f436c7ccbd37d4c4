// The greatest logit of a row, and which token its Gumbel noise chooses: what sampler.py's `peaks_of` and `loudest` do, to the same token.
//
// Noise over a whole vocabulary is made in fp32, which is off by less than kMargin; the few tokens that come so near to the loudest are
// judged by noise in fp64, rounded with their score to fp32.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include "errors.h"
#include "simd.h"

namespace forebay {

struct Peak {  // by the wire of ctypes: see library.py
  float logit;  // +infinity or not a number if one of the row's logits is
  int32_t token;  // the first of equals
};

struct SampledRow {  // by the wire of ctypes: see library.py
  const float* logits;  // processed, [vocab_size]
  float peak;           // the greatest, finite
  float temperature;
  float top_p;   // 1: off
  float min_p;   // 0: off
  int32_t top_k;  // 0: off
  uint32_t key0, key1;
  int32_t token;  // the answer
};

namespace {

constexpr float kMargin = 0.5f;
constexpr int kFew = 512;             // survivors judged by fp64 noise at once
constexpr float kCuts[] = {-10.0f, -40.0f, -FLT_MAX};  // scores above which the likeliest are looked for, the peak being 0
constexpr int kRowsPerThread = 4;     // fewer aren't worth a thread,
constexpr int kPeaksPerThread = 16;   // which costs as much as a few peaks
constexpr int kPiece = 1024;          // logits among which the peak's place is looked for once the piece is known

double noise(int token, const SampledRow& row) {
  uint32_t x = static_cast<uint32_t>(token) * static_cast<uint32_t>(-0x61C8864F) ^ row.key0;
  x ^= x >> 16;
  x *= static_cast<uint32_t>(-0x7A143595);
  x ^= x >> 13;
  x ^= row.key1;
  x *= static_cast<uint32_t>(-0x3D4D51CB);
  x ^= x >> 16;
  const double v = ((x & 0x7fffffff) + 0.5) * 0x1p-31;
  return -std::log(-std::log1p(-v));
}

f32x16 rough_noise(i32x16 tokens, const SampledRow& row) {
  i32x16 x = exclusive_or(mul(tokens, splat_i32(-0x61C8864F)), splat_i32(static_cast<int>(row.key0)));
  x = exclusive_or(x, shift_right<16>(x));
  x = mul(x, splat_i32(-0x7A143595));
  x = exclusive_or(x, shift_right<13>(x));
  x = exclusive_or(x, splat_i32(static_cast<int>(row.key1)));
  x = mul(x, splat_i32(-0x3D4D51CB));
  x = exclusive_or(x, shift_right<16>(x));
  f32x16 v = mul(add(to_float(bytes_and(x, splat_i32(0x7fffffff))), splat(0.5f)), splat(0x1p-31f));
  v = min(v, splat(1.0f - 0x1p-24f));  // it must not round to 1
  const f32x16 exact = sub(zero(), log(sub(splat(1.0f), v)));
  const f32x16 series = mul(v, fma(v, fma(v, splat(1.0f / 3), splat(0.5f)), splat(1.0f)));
  return sub(zero(), log(where_less(v, splat(1e-3f), series, exact)));
}

// 16 logits from the i-th on; behind the end of the row `filling`.
f32x16 load_part(const float* logits, int vocab_size, int i, float filling) {
  if (i + kLanes <= vocab_size) return load(logits + i);
  alignas(64) float rest[kLanes];
  std::fill(rest, rest + kLanes, filling);
  std::copy(logits + i, logits + vocab_size, rest);
  return load(rest);
}

Peak peak_of(const float* logits, int vocab_size) {
  f32x16 odd = zero();  // a logit that is +infinity or no number
  float top = -INFINITY;
  int piece = 0;
  for (int first = 0; first < vocab_size; first += kPiece) {
    f32x16 tops = splat(-INFINITY);
    for (int i = first; i < std::min(first + kPiece, vocab_size); i += kLanes) {
      const f32x16 v = load_part(logits, vocab_size, i, -INFINITY);
      odd = where_less(v, splat(INFINITY), odd, v);
      tops = max(v, tops);  // which a NaN leaves as it was
    }
    if (const float here = largest(tops); here > top) top = here, piece = first;
  }
  alignas(64) float lanes[kLanes];
  store(lanes, odd);
  for (const float lane : lanes)
    if (!std::isfinite(lane)) return {lane, 0};
  for (int i = piece;; ++i)
    if (i == vocab_size - 1 || logits[i] == top) return {top, i};
}

// work(i) for i from 0 to count - 1, each on a thread of its own.
template <class Work>
void spread(int count, Work&& work) {
  std::vector<std::jthread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(work, i);
  work(0);
}

class RowSampler {
 public:
  explicit RowSampler(int vocab_size) : vocab_size_(vocab_size), scores_(vocab_size + kLanes), noisy_(vocab_size + kLanes) {
    best_.reserve(vocab_size);  // here, so that no thread meets a lack of memory
    survivors_.reserve(vocab_size);
  }

  int choose(const SampledRow& row) {
    if (!std::isfinite(row.peak)) return 0;  // no score would survive a filter
    for (int i = 0; i < vocab_size_; i += kLanes) {
      const f32x16 above = sub(load_part(row.logits, vocab_size_, i, 0), splat(row.peak));
      store(&scores_[i], div(above, splat(row.temperature)));
    }
    float threshold = row.min_p > 0 ? std::log(row.min_p) : -FLT_MAX;
    if (row.top_k > 0 || row.top_p < 1) threshold = std::max(threshold, rank(row));
    survivors_.clear();
    for (int i = 0; i < vocab_size_ && survivors_.size() <= kFew; ++i)
      if (scores_[i] >= threshold) survivors_.push_back(i);
    if (survivors_.size() > kFew) keep_contenders(row, threshold);
    return loudest(row);
  }

 private:
  int loudest(const SampledRow& row) const {
    int best = 0;
    float top = -INFINITY;
    for (const int token : survivors_) {
      const auto sum = static_cast<float>(noise(token, row) + static_cast<double>(scores_[token]));
      if (sum > top) top = sum, best = token;
    }
    return best;
  }

  // The survivors that may win over the whole vocabulary.
  void keep_contenders(const SampledRow& row, float threshold) {
    f32x16 tops = splat(-INFINITY);
    for (int i = 0; i < vocab_size_; i += kLanes) {
      const f32x16 score = load(&scores_[i]), loud = add(rough_noise(add(counting_up(), splat_i32(i)), row), score);
      const f32x16 kept = keep_lanes(where_less(score, splat(threshold), splat(-INFINITY), loud), 0, vocab_size_ - 1 - i, splat(-INFINITY));
      store(&noisy_[i], kept);
      tops = max(tops, kept);
    }
    const float least = largest(tops) - kMargin;
    survivors_.clear();
    for (int i = 0; i < vocab_size_; ++i)
      if (noisy_[i] >= least) survivors_.push_back(i);
  }

  // The lowest score that survives top-k and top-p. Equal scores survive together, so order plays no part.
  float rank(const SampledRow& row) {
    const double limit = row.top_p < 1 ? row.top_p : INFINITY;
    const size_t count = row.top_k > 0 ? row.top_k : vocab_size_;
    for (const float cut : kCuts) {
      best_.clear();
      for (int i = 0; i < vocab_size_; ++i)
        if (scores_[i] >= cut) best_.push_back(scores_[i]);
      const bool all = cut == -FLT_MAX;
      if (best_.size() < count && row.top_k > 0 && !all) continue;
      if (best_.size() > count) {
        std::nth_element(best_.begin(), best_.begin() + count - 1, best_.end(), std::greater<>());
        best_.resize(count);
      }
      std::sort(best_.begin(), best_.end(), std::greater<>());
      if (row.top_p >= 1) return best_[std::min(count, best_.size()) - 1];
      const double mass = row.top_k > 0 ? mass_of(best_.data(), best_.size()) : mass_of(scores_.data(), vocab_size_);
      double reached = 0;
      for (const float score : best_) {
        reached += std::exp(static_cast<double>(score)) / mass;
        if (reached >= limit) return score;
      }
      if (row.top_k > 0 || all) return best_.back();  // rounding kept the sum below the limit
    }
    return -FLT_MAX;
  }

  static double mass_of(const float* scores, size_t count) {
    double mass = 0;
    for (size_t i = 0; i < count; i += kLanes) {
      const int last = static_cast<int>(std::min<size_t>(count - i, kLanes)) - 1;
      alignas(64) float rest[kLanes] = {};
      if (last + 1 < kLanes) std::copy(scores + i, scores + count, rest);
      const f32x16 v = last + 1 < kLanes ? load(rest) : load(scores + i);
      mass += sum(keep_lanes(exp2(mul(v, splat(kLog2E))), 0, last, zero()));
    }
    return mass;
  }

  const int vocab_size_;
  std::vector<float> scores_, noisy_, best_;
  std::vector<int> survivors_;
};

}  // namespace
}  // namespace forebay

extern "C" {

// The peak of each row of [num_rows, vocab_size].
int forebay_peaks(const float* logits, forebay::Peak* peaks, int num_rows, int vocab_size, int num_threads) {
  return forebay::guard([&] {
    const int count = std::max(1, std::min(num_threads, num_rows / forebay::kPeaksPerThread));
    forebay::spread(count, [&](int first) {
      for (int i = first; i < num_rows; i += count) peaks[i] = forebay::peak_of(logits + static_cast<size_t>(i) * vocab_size, vocab_size);
    });
  });
}

// Sets the token of each row.
int forebay_sample(forebay::SampledRow* rows, int num_rows, int vocab_size, int num_threads) {
  return forebay::guard([&] {
    const int count = std::max(1, std::min(num_threads, num_rows / forebay::kRowsPerThread));
    std::vector<forebay::RowSampler> samplers;
    samplers.reserve(count);
    for (int i = 0; i < count; ++i) samplers.emplace_back(vocab_size);
    forebay::spread(count, [&](int first) {
      for (int i = first; i < num_rows; i += count) rows[i].token = samplers[first].choose(rows[i]);
    });
  });
}
}
