// Attention of a few query rows of one sequence and one key/value head over the paged cache.
//
// Keys are taken in splits of 256 positions. Within a split scores, softmax and weighted values stand for themselves; the splits are then
// joined in order (an online softmax). A split that a row can't see changes nothing of it, and within a split all is in order of
// position, so a row's bits depend on its own position alone: not on the rows beside it, nor on the size of a block (but for odd sizes
// of 16-bit blocks, whose values are multiplied in other pairs).
#pragma once
#include "cache.h"

namespace forebay {

constexpr int kSplit = 256;    // positions, as in attention/paged.py
constexpr float kHidden = -1e30f;  // a score that nobody sees

// One query row: what it sees, and its factors as `Form::prepare` made them.
template <class Form>
struct QueryRow {
  const typename Form::Factor* factors;  // [width]
  float scale;                           // of the factors times the softmax's own, in powers of two
  int first, last;                       // positions that it sees
};

// Up to 16 slots of a block.
struct LaneGroup {
  const uint8_t *keys, *values;  // of its first slot
  const uint16_t *key_scales, *value_scales;
  int offset;  // of its first slot's position in the split; negative where the block begins before
  int count;   // slots up to the last that any row may see
};

// The running state of one row's softmax.
struct Softmax {
  float top = kHidden, total = 0;
  alignas(64) float weighted[kMaxWidth];
};

template <class Form>
class Attention {
 public:
  Attention(const Cache& cache, int layer, int head, const int32_t* table) : cache_(cache), layer_(layer), head_(head), table_(table) {
    for (auto& row : probabilities_) std::fill(row, row + kLanes, typename Form::Factor{});
  }

  // R rows; out[r] is [width].
  template <int R>
  void attend(const QueryRow<Form> (&rows)[R], float* const (&out)[R]) {
    int first = rows[0].first, last = rows[0].last;
    for (const auto& row : rows) first = std::min(first, row.first), last = std::max(last, row.last);
    for (int r = 0; r < R; ++r) std::copy(rows[r].factors, rows[r].factors + cache_.width, factors_[r]);
    Softmax states[R];
    bool begun = false;
    for (int start = first / kSplit * kSplit; start <= last; start += kSplit, begun = true) {
      collect(start, std::min(last, start + kSplit - 1));
      score<R>(rows);
      for (int r = 0; r < R; ++r) soften(r, begun, states[r]);
      weigh<R>(states, begun);
    }
    for (int r = 0; r < R; ++r) {
      const f32x16 inverse = splat(1.0f / states[r].total);
      for (int d = 0; d < cache_.width; d += kLanes) store(out[r] + d, mul(load(states[r].weighted + d), inverse));
    }
  }

 private:
  static constexpr int kPack = Form::kPack, kElement = Form::kElement;
  static constexpr int kMaxRows = 12;
  static constexpr int kStreamed = 6;  // so few rows wait for the cache rather than for arithmetic

  // The lane groups of the positions start .. last of a split.
  void collect(int start, int last) {
    start_ = start;
    num_vectors_ = (last - start) / kLanes + 1;
    num_groups_ = 0;
    for (int block = start / cache_.block_size; block * cache_.block_size <= last; ++block) {
      const uint8_t *keys = cache_.tile(layer_, table_[block], 0, head_), *values = cache_.tile(layer_, table_[block], 1, head_);
      for (int slot = 0; slot < cache_.block_size; slot += kLanes) {
        const int position = block * cache_.block_size + slot;
        const int count = std::min({kLanes, cache_.block_size - slot, last - position + 1});
        if (position + count <= start) continue;
        if (count <= 0) return;
        LaneGroup& group = groups_[num_groups_++];
        group = {keys + slot * kPack * kElement, values + slot * cache_.width * kElement, nullptr, nullptr, position - start, count};
        if constexpr (Form::kScaled) {
          group.key_scales = cache_.scale(layer_, table_[block], 0, head_) + slot;
          group.value_scales = cache_.scale(layer_, table_[block], 1, head_) + slot;
          store(value_scales_ + kLanes + group.offset, load_f16(group.value_scales));
        }
      }
    }
  }

  // scores_[r] = the rows' scores of every position of the split, in powers of two; kHidden where a row doesn't see it. A group's
  // vector may reach into the next one's positions, which are written after it.
  template <int R>
  void score(const QueryRow<Form> (&rows)[R]) {
    for (int r = 0; r < R; ++r) store(scores_[r] + num_vectors_ * kLanes, splat(kHidden));  // the last vector
    constexpr int kSums = FOREBAY_AVX512 ? 24 : 12;  // that registers hold
    constexpr int kAtOnce = std::clamp(kSums / R, 1, 4);
    int g = 0;
    for (; g + kAtOnce <= num_groups_; g += kAtOnce) score_groups<R, kAtOnce>(rows, g);
    for (; g < num_groups_; ++g) score_groups<R, 1>(rows, g);
  }

  template <int R, int N>
  void score_groups(const QueryRow<Form> (&rows)[R], int g) {
    typename Form::Sum sums[N][R];
    for (auto& group : sums)
      for (auto& sum : group) sum = Form::none();
    if (R <= kStreamed) prefetch(g, N);
    const int stride = cache_.slots * kPack * kElement;
    for (int i = 0; i < cache_.width / kPack; ++i) {
      b512 keys[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) keys[n] = Form::load(groups_[g + n].keys + i * stride);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n][r] = Form::dot(sums[n][r], factors_[r] + i * kPack, keys[n]);
    }
    for (int n = 0; n < N; ++n) {
      const LaneGroup& group = groups_[g + n];
      for (int r = 0; r < R; ++r) {
        f32x16 v = Form::value(sums[n][r], 1.0f);
        v = mul(v, splat(rows[r].scale));
        if constexpr (Form::kScaled) v = mul(v, load_f16(group.key_scales));
        const int position = start_ + group.offset, first = rows[r].first - position, last = std::min(rows[r].last - position, group.count - 1);
        if (first > 0 || last < kLanes - 1) v = keep_lanes(v, first, last, splat(kHidden));
        store(scores_[r] + kLanes + group.offset, v);
      }
    }
  }

  void prefetch(int g, int count) const {
    for (int n = 0; n < count; ++n) {
      if (cache_.slots == kLanes && g + count + n < num_groups_) prefetch_group(groups_[g + count + n].keys);
      prefetch_group(groups_[g + n].values);
    }
  }

  void prefetch_group(const uint8_t* group) const {
    for (int i = 0; i < cache_.width * kLanes * kElement; i += 64) _mm_prefetch(reinterpret_cast<const char*>(group) + i, _MM_HINT_T0);
  }

  // Row r's scores become probabilities in the form that meets the values; `state` moves on, its weighted values scaled to the new top.
  void soften(int r, bool begun, Softmax& state) {
    float* scores = scores_[r] + kLanes;
    f32x16 tops = splat(kHidden);
    for (int i = 0; i < num_vectors_; ++i) tops = max(tops, load(scores + i * kLanes));
    const float top = std::max(state.top, largest(tops));
    f32x16 totals = zero();
    for (int i = 0; i < num_vectors_; ++i) {
      const f32x16 score = load(scores + i * kLanes);
      f32x16 e = hide(exp2(sub(score, splat(top))), score);
      totals = add(totals, e);
      if constexpr (Form::kScaled) e = hide(mul(e, load(value_scales_ + kLanes + i * kLanes)), score);
      store(scores + i * kLanes, e);
    }
    probability_scale_[r] = Form::prepare(scores, num_vectors_ * kLanes, probabilities_[r] + kLanes);
    const float kept = begun ? power(state.top - top) : 0.0f;
    state.total = state.total * kept + sum(totals);
    state.top = top;
    if (begun)
      for (int d = 0; d < cache_.width; d += kLanes) store(state.weighted + d, mul(load(state.weighted + d), splat(kept)));
  }

  static float power(float exponent) {  // as `exp2` does it for a vector
    alignas(64) float lanes[kLanes];
    store(lanes, exp2(splat(exponent)));
    return exponent <= -126.0f ? 0.0f : lanes[0];
  }

  // 0 where the score says that the row doesn't see the slot; a NaN of what it sees stays.
  static f32x16 hide(f32x16 v, f32x16 score) {
#if FOREBAY_AVX512
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(score, splat(kHidden), _CMP_EQ_OQ), zero());
#else
    return {_mm256_blendv_ps(v.low, _mm256_setzero_ps(), _mm256_cmp_ps(score.low, splat(kHidden).low, _CMP_EQ_OQ)),
            _mm256_blendv_ps(v.high, _mm256_setzero_ps(), _mm256_cmp_ps(score.high, splat(kHidden).high, _CMP_EQ_OQ))};
#endif
  }

  // Adds the split's weighted values to the rows' states.
  template <int R>
  void weigh(Softmax (&states)[R], bool begun) {
    constexpr int kHalf = R > 6 ? (R + 1) / 2 : R;
    for (int d = 0; d < cache_.width; d += 4 * kLanes) {
      const int vectors = std::min(4, (cache_.width - d) / kLanes);
      if (vectors == 4) {
        weigh_part<R, 0, kHalf, 4>(states, d, begun);
        if constexpr (kHalf < R) weigh_part<R, kHalf, R, 4>(states, d, begun);
      } else {
        for (int v = 0; v < vectors; ++v) {
          weigh_part<R, 0, kHalf, 1>(states, d + v * kLanes, begun);
          if constexpr (kHalf < R) weigh_part<R, kHalf, R, 1>(states, d + v * kLanes, begun);
        }
      }
    }
  }

  template <int R, int Begin, int End, int V>
  void weigh_part(Softmax (&states)[R], int d, bool begun) {
    constexpr int N = End - Begin;
    typename Form::Sum sums[N][V];
    for (auto& row : sums)
      for (auto& sum : row) sum = Form::none();
    for (int g = 0; g < num_groups_; ++g) {
      const LaneGroup& group = groups_[g];
      const int stride = cache_.width * kPack * kElement, first = std::max(0, -group.offset) / kPack;
      const uint8_t* values = group.values + d * kPack * kElement + first * stride;
      for (int slot = first * kPack; slot < group.count; slot += kPack, values += stride) {
        b512 v[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) v[i] = Form::load(values + i * kLanes * kPack * kElement);
        if (slot + kPack > group.count)
          for (int i = 0; i < V; ++i) v[i] = Form::first_of_pair(v[i]);
#pragma GCC unroll 12
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
          for (int i = 0; i < V; ++i) sums[r][i] = Form::dot(sums[r][i], probabilities_[Begin + r] + kLanes + group.offset + slot, v[i]);
      }
    }
    for (int r = 0; r < N; ++r)
      for (int i = 0; i < V; ++i) {
        float* place = states[Begin + r].weighted + d + i * kLanes;
        const f32x16 part = Form::value(sums[r][i], probability_scale_[Begin + r]);
        store(place, begun ? add(load(place), part) : part);
      }
  }

  const Cache& cache_;
  const int layer_, head_;
  const int32_t* table_;
  int start_ = 0, num_vectors_ = 0, num_groups_ = 0;
  LaneGroup groups_[kSplit + 1];
  // By position in the split, behind one vector for what a first block holds before it and before one for what a last one holds behind.
  alignas(64) float scores_[kMaxRows][kLanes + kSplit + kLanes];
  alignas(64) float value_scales_[kLanes + kSplit + kLanes];
  alignas(64) typename Form::Factor factors_[kMaxRows][kMaxWidth];  // the rows' own, at a fixed distance
  alignas(64) typename Form::Factor probabilities_[kMaxRows][kLanes + kSplit + kLanes];
  float probability_scale_[kMaxRows];
};

}  // namespace forebay
