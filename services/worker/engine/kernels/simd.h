// Vectors of 16 floats: AVX-512 where the compiler's target has it with VNNI, else two AVX2 halves. Nothing here knows what is computed.
//
// Sums are contracted by `fma` alone (the build turns the compiler's own contraction off), so a row's bits don't depend on how a loop around it was unrolled.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define FOREBAY_AVX512 1
#else
#define FOREBAY_AVX512 0
#endif

namespace forebay {

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504f;

inline uint16_t to_bf16(float value) {  // round to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t to_f16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_f16(uint16_t value) { return _cvtsh_ss(value); }

#if FOREBAY_AVX512

using f32x16 = __m512;
using i32x16 = __m512i;
using b512 = __m512i;  // 64 bytes of whatever

inline f32x16 zero() { return _mm512_setzero_ps(); }
inline i32x16 zero_i32() { return _mm512_setzero_si512(); }
inline f32x16 splat(float v) { return _mm512_set1_ps(v); }
inline f32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
inline f32x16 add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
inline f32x16 sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
inline f32x16 mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
inline f32x16 div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
inline float sum(f32x16 v) { return _mm512_reduce_add_ps(v); }
inline float largest(f32x16 v) { return _mm512_reduce_max_ps(v); }
inline f32x16 round(f32x16 v) { return _mm512_roundscale_ps(v, 0); }
inline f32x16 scale_by_power(f32x16 v, f32x16 exponent) { return _mm512_scalef_ps(v, exponent); }
inline f32x16 to_float(i32x16 v) { return _mm512_cvtepi32_ps(v); }
inline i32x16 to_int(f32x16 v) { return _mm512_cvtps_epi32(v); }
inline i32x16 add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
inline int sum(i32x16 v) {  // not by the library's reduction: its last steps are of signed integers, which a NaN's conversion overflows
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline i32x16 mul(i32x16 a, i32x16 b) { return _mm512_mullo_epi32(a, b); }
inline i32x16 exclusive_or(i32x16 a, i32x16 b) { return _mm512_xor_si512(a, b); }
template <int kBits>
inline i32x16 shift_right(i32x16 v) {  // zeros come in
  return _mm512_srli_epi32(v, kBits);
}
inline f32x16 as_float(i32x16 bits) { return _mm512_castsi512_ps(bits); }
inline i32x16 as_int(f32x16 v) { return _mm512_castps_si512(v); }
inline i32x16 counting_up() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// a where x < limit, else b
inline f32x16 where_less(f32x16 x, f32x16 limit, f32x16 a, f32x16 b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), a);
}
inline f32x16 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline float largest_magnitude(f32x16 a, f32x16 b) {  // by bit patterns, so that a NaN is the largest
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const int bits = _mm512_reduce_max_epi32(
      _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask), _mm512_and_si512(_mm512_castps_si512(b), mask)));
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void store_i8(int8_t* p, i32x16 v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
inline void store_i16(int16_t* p, i32x16 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v)); }

inline void store_bf16(uint16_t* p, f32x16 v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#endif
}

// Lanes first .. last of v, `other` elsewhere. The bounds may lie outside 0 .. 15.
inline f32x16 keep_lanes(f32x16 v, int first, int last, f32x16 other) {
  const uint32_t below_end = last < 0 ? 0 : last >= 15 ? 0xffff : (1u << (last + 1)) - 1;
  const uint32_t below_start = first <= 0 ? 0 : first > 15 ? 0xffff : (1u << first) - 1;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below_end & ~below_start), v);
}

inline b512 load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline b512 splat_word(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
inline b512 bytes_and(b512 a, b512 b) { return _mm512_and_si512(a, b); }
inline b512 splat_i32(int v) { return _mm512_set1_epi32(v); }
inline b512 low_nibbles(b512 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline b512 high_nibbles(b512 v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline b512 widen_i8(const void* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }

// acc[i] += sum over 4 of weight[4i + j] * x[4i + j]; weights of 4 bits, 0 .. 15.
inline i32x16 dot_nibbles(i32x16 acc, b512 weights, b512 x) { return _mm512_dpbusd_epi32(acc, weights, x); }

// The same for signed 8-bit weights, which count as kByteOffset more than they are: the caller takes that off again.
constexpr float kByteOffset = 128.0f;
inline b512 prepare_bytes(b512 weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(static_cast<char>(0x80))); }
inline i32x16 dot_bytes(i32x16 acc, b512 prepared, b512 x) { return _mm512_dpbusd_epi32(acc, prepared, x); }

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over int16.
inline i32x16 dot_i16(i32x16 acc, b512 a, b512 b) { return _mm512_dpwssd_epi32(acc, a, b); }

// The same over bf16.
inline f32x16 dot_bf16(f32x16 acc, b512 a, b512 b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  acc = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// 32 FP8 E4M3 codes (never subnormal, never NaN: see cache.h) as bf16: the exponent moves by 120.
inline b512 widen_e4m3(const void* p) {
  const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 4);
  const __mmask32 nonzero = _mm512_test_epi16_mask(magnitude, magnitude);
  const __m512i moved = _mm512_maskz_add_epi16(nonzero, magnitude, _mm512_set1_epi16(120 << 7));
  return _mm512_or_si512(moved, _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(static_cast<short>(0x8000))));
}

#else  // AVX2: two halves of everything

struct f32x16 {
  __m256 low, high;
};
struct b512 {
  __m256i low, high;
};
using i32x16 = b512;

inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline f32x16 splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline float sum(f32x16 v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(f32x16 v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline f32x16 round(f32x16 v) { return {_mm256_round_ps(v.low, 8), _mm256_round_ps(v.high, 8)}; }
inline f32x16 to_float(i32x16 v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
inline i32x16 to_int(f32x16 v) { return {_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline f32x16 scale_by_power(f32x16 v, f32x16 exponent) {  // exponents from -126 to 127, whole
  const i32x16 e = to_int(exponent);
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_mul_ps(v.low, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.low, bias), 23))),
          _mm256_mul_ps(v.high, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.high, bias), 23)))};
}
inline int sum(i32x16 v) {
  const __m256i eight = _mm256_add_epi32(v.low, v.high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline i32x16 mul(i32x16 a, i32x16 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline i32x16 exclusive_or(i32x16 a, i32x16 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int kBits>
inline i32x16 shift_right(i32x16 v) {  // zeros come in
  return {_mm256_srli_epi32(v.low, kBits), _mm256_srli_epi32(v.high, kBits)};
}
inline f32x16 as_float(i32x16 bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }
inline i32x16 as_int(f32x16 v) { return {_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
inline i32x16 counting_up() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
// a where x < limit, else b
inline f32x16 where_less(f32x16 x, f32x16 limit, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.low, a.low, _mm256_cmp_ps(x.low, limit.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.high, a.high, _mm256_cmp_ps(x.high, limit.high, _CMP_LT_OQ))};
}
inline f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

inline float largest_magnitude(f32x16 a, f32x16 b) {  // by bit patterns, so that a NaN is the largest
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  auto bits = [&](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), mask); };
  const __m256i eight =
      _mm256_max_epi32(_mm256_max_epi32(bits(a.low), bits(a.high)), _mm256_max_epi32(bits(b.low), bits(b.high)));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  const int top = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  float out;
  std::memcpy(&out, &top, 4);
  return out;
}

inline void store_i16(int16_t* p, i32x16 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xd8));
}
inline void store_i8(int8_t* p, i32x16 v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}

inline __m256i bf16_words(__m256 v) {  // rounded, in the low half of each 32 bits
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
}
inline void store_bf16(uint16_t* p, f32x16 v) {
  const __m256i packed = _mm256_packus_epi32(bf16_words(v.low), bf16_words(v.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Lanes first .. last of v, `other` elsewhere. The bounds may lie outside 0 .. 15.
inline f32x16 keep_lanes(f32x16 v, int first, int last, f32x16 other) {
  const __m256i from = _mm256_set1_epi32(first - 1), to = _mm256_set1_epi32(last + 1);
  auto kept = [&](__m256i lane) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane)));
  };
  return {_mm256_blendv_ps(other.low, v.low, kept(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
          _mm256_blendv_ps(other.high, v.high, kept(_mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)))};
}

inline b512 load_bytes(const void* p) {
  const auto* halves = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline b512 splat_i32(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline b512 splat_word(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return splat_i32(word);
}
inline b512 bytes_and(b512 a, b512 b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline b512 low_nibbles(b512 v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.low, mask), _mm256_and_si256(v.high, mask)};
}
inline b512 high_nibbles(b512 v) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(v.low, 4), mask), _mm256_and_si256(_mm256_srli_epi16(v.high, 4), mask)};
}
inline b512 widen_i8(const void* p) {
  const auto* halves = static_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}

// acc[i] += sum over 4 of weight[4i + j] * x[4i + j]; weights of 4 bits, 0 .. 15. The 16-bit sums of two can't overflow.
inline __m256i dot_nibbles(__m256i acc, __m256i weights, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
}
inline i32x16 dot_nibbles(i32x16 acc, b512 weights, b512 x) {
  return {dot_nibbles(acc.low, weights.low, x.low), dot_nibbles(acc.high, weights.high, x.high)};
}

// The same for signed 8-bit weights from -127 to 127: the sign goes to x, so the 16-bit sums of two stay below 32,767.
constexpr float kByteOffset = 0.0f;
inline b512 prepare_bytes(b512 weights) { return weights; }
inline i32x16 dot_bytes(i32x16 acc, b512 weights, b512 x) {
  return {dot_nibbles(acc.low, _mm256_abs_epi8(weights.low), _mm256_sign_epi8(x.low, weights.low)),
          dot_nibbles(acc.high, _mm256_abs_epi8(weights.high), _mm256_sign_epi8(x.high, weights.high))};
}

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over int16.
inline i32x16 dot_i16(i32x16 acc, b512 a, b512 b) {
  return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(a.low, b.low)), _mm256_add_epi32(acc.high, _mm256_madd_epi16(a.high, b.high))};
}

// The same over bf16.
inline __m256 dot_bf16(__m256 acc, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)), acc);
}
inline f32x16 dot_bf16(f32x16 acc, b512 a, b512 b) { return {dot_bf16(acc.low, a.low, b.low), dot_bf16(acc.high, a.high, b.high)}; }

// 32 FP8 E4M3 codes (never subnormal, never NaN: see cache.h) as bf16: the exponent moves by 120.
inline __m256i widen_e4m3_half(const __m128i* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(p));
  const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 4);
  const __m256i is_zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
  const __m256i moved = _mm256_andnot_si256(is_zero, _mm256_add_epi16(magnitude, _mm256_set1_epi16(120 << 7)));
  return _mm256_or_si256(moved, _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<short>(0x8000))));
}
inline b512 widen_e4m3(const void* p) {
  const auto* halves = static_cast<const __m128i*>(p);
  return {widen_e4m3_half(halves), widen_e4m3_half(halves + 1)};
}

#endif

// 2^x for x <= 127, to about 2e-7 of its value; 2^-126 for all that is less; NaN stays NaN.
inline f32x16 exp2(f32x16 x) {
  x = max(splat(-126.0f), x);  // in this order: the second operand wins where it is NaN
  const f32x16 whole = round(x);
  const f32x16 part = sub(x, whole);
  f32x16 p = splat(1.5403530e-4f);
  p = fma(p, part, splat(1.3333558e-3f));
  p = fma(p, part, splat(9.6181291e-3f));
  p = fma(p, part, splat(5.5504109e-2f));
  p = fma(p, part, splat(2.4022651e-1f));
  p = fma(p, part, splat(6.9314718e-1f));
  p = fma(p, part, splat(1.0f));
  return scale_by_power(p, whole);
}

// The natural logarithm of a positive, normal, finite x, to about 1e-6.
inline f32x16 log(f32x16 x) {
  // x = 2^e * m with m from sqrt(1/2) to sqrt(2); log m = 2 artanh((m - 1) / (m + 1))
  const i32x16 bits = as_int(x);
  const i32x16 exponent = add(shift_right<23>(bits), splat_i32(-127));
  f32x16 m = as_float(exclusive_or(bytes_and(bits, splat_i32(0x7fffff)), splat_i32(127 << 23)));
  const f32x16 root = splat(1.41421356f);
  f32x16 e = to_float(exponent);
  e = where_less(m, root, e, add(e, splat(1.0f)));
  m = where_less(m, root, m, mul(m, splat(0.5f)));
  const f32x16 t = div(sub(m, splat(1.0f)), add(m, splat(1.0f))), t2 = mul(t, t);
  f32x16 p = splat(2.0f / 7);
  p = fma(p, t2, splat(2.0f / 5));
  p = fma(p, t2, splat(2.0f / 3));
  p = fma(p, t2, splat(2.0f));
  return fma(e, splat(0.693147181f), mul(p, t));
}

// x / (1 + e^-x)
inline f32x16 silu(f32x16 x) {
  const f32x16 power = mul(x, splat(-kLog2E));
  return div(x, add(splat(1.0f), exp2(min(splat(127.0f), power))));
}

}  // namespace forebay
