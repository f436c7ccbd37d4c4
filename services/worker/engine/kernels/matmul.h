// Rows of activations times a packed matrix. Every row is summed over its inputs in the same order, however many rows there are.
//
// A matrix is cut into panels of 32 outputs, a panel into groups of 32 inputs, and each group is stored as the dot products read it:
//   fp32  [32 inputs][32 outputs] floats
//   bf16  [16 pairs of inputs][32 outputs][2]
//   int8  [8 fours of inputs][32 outputs][4] signed bytes, then 32 fp16 scales
//   int4  [4 fours][32 outputs][4] bytes (inputs 0 .. 15 in the low nibbles, 16 .. 31 in the high ones), then 32 fp16 scales and 32 fp16 offsets
// A weight of a group is scale * value + offset.
#pragma once
#include <algorithm>

#include "simd.h"

namespace forebay {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kPanel = 32;  // outputs computed together

enum Format : int32_t { kF32 = 0, kBF16 = 1, kI8 = 2, kI4 = 3 };

struct Matrix {  // by the wire of ctypes: see library.py
  const uint8_t* data;
  const float* bias;  // or null
  int32_t num_inputs, num_outputs;  // whole groups and panels
  int32_t format;
  int32_t unused;
  int num_groups() const { return num_inputs / kGroup; }
  int num_panels() const { return num_outputs / kPanel; }
  inline const uint8_t* panel(int index) const;
};

constexpr size_t kGroupBytes[] = {kGroup * kPanel * 4, kGroup * kPanel * 2, kGroup* kPanel + kPanel * 2, kGroup* kPanel / 2 + kPanel * 4};

inline const uint8_t* Matrix::panel(int index) const { return data + kGroupBytes[format] * num_groups() * index; }

// A step's rows in the form that a matrix wants them: floats, bf16, or for both integer formats signed bytes with a scale per group.
struct Rows {
  uint8_t* values = nullptr;
  float* scales = nullptr;  // [rows][groups]
  float* totals = nullptr;  // the sum of a group's values times its scale
  int num_inputs = 0;
  Format format = kF32;

  static size_t value_bytes(Format format) { return format == kF32 ? 4 : format == kBF16 ? 2 : 1; }
  size_t row_bytes() const { return num_inputs * value_bytes(format); }
  int num_groups() const { return num_inputs / kGroup; }

  // Writes a group of a row. A NaN or an infinity among the 32 makes the scale one, so it isn't lost.
  void put(int row, int group, f32x16 a, f32x16 b) const {
    uint8_t* place = values + row * row_bytes() + group * kGroup * value_bytes(format);
    if (format == kF32) {
      store(reinterpret_cast<float*>(place), a);
      store(reinterpret_cast<float*>(place) + kLanes, b);
    } else if (format == kBF16) {
      store_bf16(reinterpret_cast<uint16_t*>(place), a);
      store_bf16(reinterpret_cast<uint16_t*>(place) + kLanes, b);
    } else {
      const float top = largest_magnitude(a, b);
      const f32x16 inverse = splat(top > 0 ? 127.0f / top : 0.0f);
      const i32x16 low = to_int(mul(a, inverse)), high = to_int(mul(b, inverse));
      store_i8(reinterpret_cast<int8_t*>(place), low);
      store_i8(reinterpret_cast<int8_t*>(place) + kLanes, high);
      const float scale = top / 127.0f;
      scales[size_t(row) * num_groups() + group] = scale;
      totals[size_t(row) * num_groups() + group] = scale * static_cast<float>(sum(add(low, high)));
    }
  }
};

// Sums stay in registers as long as every loop over them is unrolled.
template <int R>
inline void clear(f32x16 (&acc)[R][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
}

template <int R>
inline void keep(const f32x16 (&acc)[R][2], float (&sums)[R][kPanel]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) store(sums[r], acc[r][0]), store(sums[r] + kLanes, acc[r][1]);
}

// `dot`: R rows from `row` on times a panel. A function by itself, so that its loop isn't compiled anew, and differently, for each use.
struct F32Kernel {
  static constexpr int kMaxRows = 12;
  template <int R>
  [[gnu::noinline]] static void dot(const uint8_t* weights, int num_groups, const Rows& rows, int row, float (&sums)[R][kPanel]) {
    f32x16 acc[R][2];
    clear(acc);
    const float* x[R];
    for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const float*>(rows.values + (row + r) * rows.row_bytes());
    const float* w = reinterpret_cast<const float*>(weights);
    for (int k = 0; k < num_groups * kGroup; ++k, w += kPanel) {
      const f32x16 w0 = load(w), w1 = load(w + kLanes);
      _mm_prefetch(reinterpret_cast<const char*>(w) + 2048, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w) + 2112, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const f32x16 v = splat(x[r][k]);
        acc[r][0] = fma(v, w0, acc[r][0]);
        acc[r][1] = fma(v, w1, acc[r][1]);
      }
    }
    keep(acc, sums);
  }
};

struct BF16Kernel {
  static constexpr int kMaxRows = 12;
  template <int R>
  [[gnu::noinline]] static void dot(const uint8_t* weights, int num_groups, const Rows& rows, int row, float (&sums)[R][kPanel]) {
    f32x16 acc[R][2];
    clear(acc);
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows.values + (row + r) * rows.row_bytes();
    for (int pair = 0; pair < num_groups * kGroup / 2; ++pair, weights += 2 * 64) {
      const b512 w0 = load_bytes(weights), w1 = load_bytes(weights + 64);
      _mm_prefetch(reinterpret_cast<const char*>(weights) + 2048, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(weights) + 2112, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const b512 v = splat_word(x[r] + 4 * pair);
        acc[r][0] = dot_bf16(acc[r][0], v, w0);
        acc[r][1] = dot_bf16(acc[r][1], v, w1);
      }
    }
    keep(acc, sums);
  }
};

struct I8Kernel {
  static constexpr int kMaxRows = 6;
  template <int R>
  [[gnu::noinline]] static void dot(const uint8_t* weights, int num_groups, const Rows& rows, int row, float (&sums)[R][kPanel]) {
    f32x16 acc[R][2];
    clear(acc);
    const uint8_t* x = rows.values + row * rows.row_bytes();
    const float *scales = rows.scales + size_t(row) * num_groups, *totals = rows.totals + size_t(row) * num_groups;
    for (int g = 0; g < num_groups; ++g, weights += kGroupBytes[kI8]) {
      i32x16 part[R][2];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = zero_i32();
#pragma GCC unroll 8
      for (int four = 0; four < kGroup / 4; ++four) {
        const b512 w0 = prepare_bytes(load_bytes(weights + four * 128)), w1 = prepare_bytes(load_bytes(weights + four * 128 + 64));
        _mm_prefetch(reinterpret_cast<const char*>(weights) + 2 * kGroupBytes[kI8] + four * 128, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(weights) + 2 * kGroupBytes[kI8] + four * 128 + 64, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const b512 v = splat_word(x + r * rows.row_bytes() + g * kGroup + four * 4);
          part[r][0] = dot_bytes(part[r][0], w0, v);
          part[r][1] = dot_bytes(part[r][1], w1, v);
        }
      }
      const auto* scale = reinterpret_cast<const uint16_t*>(weights + kGroup * kPanel);
      const f32x16 d0 = load_f16(scale), d1 = load_f16(scale + kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const f32x16 s = splat(scales[r * num_groups + g]), excess = splat(-kByteOffset * totals[r * num_groups + g]);
        acc[r][0] = fma(fma(to_float(part[r][0]), s, excess), d0, acc[r][0]);
        acc[r][1] = fma(fma(to_float(part[r][1]), s, excess), d1, acc[r][1]);
      }
    }
    keep(acc, sums);
  }
};

struct I4Kernel {
  static constexpr int kMaxRows = 6;
  template <int R>
  [[gnu::noinline]] static void dot(const uint8_t* weights, int num_groups, const Rows& rows, int row, float (&sums)[R][kPanel]) {
    f32x16 acc[R][2];
    clear(acc);
    const uint8_t* x = rows.values + row * rows.row_bytes();
    const float *scales = rows.scales + size_t(row) * num_groups, *totals = rows.totals + size_t(row) * num_groups;
    for (int g = 0; g < num_groups; ++g, weights += kGroupBytes[kI4]) {
      i32x16 part[R][2];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = zero_i32();
#pragma GCC unroll 4
      for (int four = 0; four < kGroup / 8; ++four) {
        const b512 b0 = load_bytes(weights + four * 128), b1 = load_bytes(weights + four * 128 + 64);
        _mm_prefetch(reinterpret_cast<const char*>(weights) + 4 * kGroupBytes[kI4] + four * 128, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(weights) + 4 * kGroupBytes[kI4] + four * 128 + 64, _MM_HINT_T0);
        const b512 low0 = low_nibbles(b0), high0 = high_nibbles(b0), low1 = low_nibbles(b1), high1 = high_nibbles(b1);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const uint8_t* place = x + r * rows.row_bytes() + g * kGroup + four * 4;
          const b512 v = splat_word(place), u = splat_word(place + kGroup / 2);
          part[r][0] = dot_nibbles(dot_nibbles(part[r][0], low0, v), high0, u);
          part[r][1] = dot_nibbles(dot_nibbles(part[r][1], low1, v), high1, u);
        }
      }
      const auto* scale = reinterpret_cast<const uint16_t*>(weights + kGroup * kPanel / 2);
      const f32x16 d0 = load_f16(scale), d1 = load_f16(scale + 16), m0 = load_f16(scale + 32), m1 = load_f16(scale + 48);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const f32x16 s = splat(scales[r * num_groups + g]), total = splat(totals[r * num_groups + g]);
        acc[r][0] = fma(mul(to_float(part[r][0]), s), d0, fma(total, m0, acc[r][0]));
        acc[r][1] = fma(mul(to_float(part[r][1]), s), d1, fma(total, m1, acc[r][1]));
      }
    }
    keep(acc, sums);
  }
};

// `done(row, low, high)` takes the 32 sums of one row, bias added.
template <class Kernel, int R, class Done>
inline void tile(const Matrix& matrix, int panel, const Rows& rows, int row, Done&& done) {
  alignas(64) float sums[R][kPanel];
  Kernel::template dot<R>(matrix.panel(panel), matrix.num_groups(), rows, row, sums);
  f32x16 bias[2] = {zero(), zero()};
  if (matrix.bias != nullptr) bias[0] = load(matrix.bias + panel * kPanel), bias[1] = load(matrix.bias + panel * kPanel + kLanes);
  for (int r = 0; r < R; ++r) done(row + r, add(load(sums[r]), bias[0]), add(load(sums[r] + kLanes), bias[1]));
}

template <class Kernel, int R, class Done>
inline void remaining_rows(const Matrix& matrix, int panel, const Rows& rows, int row, int count, Done&& done) {
  if (count == R) return tile<Kernel, R>(matrix, panel, rows, row, done);
  if constexpr (R > 1) remaining_rows<Kernel, R - 1>(matrix, panel, rows, row, count, done);
}

template <class Kernel, class Done>
inline void panel_rows(const Matrix& matrix, int panel, const Rows& rows, int first, int last, Done&& done) {
  constexpr int R = Kernel::kMaxRows;
  int row = first;
  for (; row + R <= last; row += R) tile<Kernel, R>(matrix, panel, rows, row, done);
  if (row < last) remaining_rows<Kernel, R - 1>(matrix, panel, rows, row, last - row, done);
}

// Rows first .. last - 1 times one panel.
template <class Done>
inline void multiply(const Matrix& matrix, int panel, const Rows& rows, int first, int last, Done&& done) {
  switch (matrix.format) {
    case kF32: return panel_rows<F32Kernel>(matrix, panel, rows, first, last, done);
    case kBF16: return panel_rows<BF16Kernel>(matrix, panel, rows, first, last, done);
    case kI8: return panel_rows<I8Kernel>(matrix, panel, rows, first, last, done);
    default: return panel_rows<I4Kernel>(matrix, panel, rows, first, last, done);
  }
}

// The weights of one output, [num_inputs]: an embedding is a column of the matrix that makes the logits.
inline void read_column(const Matrix& matrix, int output, float* out) {
  const int lane = output % kPanel;
  const uint8_t* group = matrix.panel(output / kPanel);
  for (int g = 0; g < matrix.num_groups(); ++g, group += kGroupBytes[matrix.format], out += kGroup)
    for (int k = 0; k < kGroup; ++k) {
      if (matrix.format == kF32) {
        out[k] = reinterpret_cast<const float*>(group)[k * kPanel + lane];
      } else if (matrix.format == kBF16) {
        out[k] = from_bf16(reinterpret_cast<const uint16_t*>(group)[(k / 2 * kPanel + lane) * 2 + k % 2]);
      } else if (matrix.format == kI8) {
        const float scale = from_f16(reinterpret_cast<const uint16_t*>(group + kGroup * kPanel)[lane]);
        out[k] = scale * static_cast<float>(static_cast<int8_t>(group[(k / 4 * kPanel + lane) * 4 + k % 4]));
      } else {
        const auto* scales = reinterpret_cast<const uint16_t*>(group + kGroup * kPanel / 2);
        const uint8_t byte = group[(k % 16 / 4 * kPanel + lane) * 4 + k % 4];
        out[k] = from_f16(scales[lane]) * static_cast<float>(k < 16 ? byte & 15 : byte >> 4) + from_f16(scales[kPanel + lane]);
      }
    }
}

}  // namespace forebay
