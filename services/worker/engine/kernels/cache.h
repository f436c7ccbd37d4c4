// The paged cache: where a slot's keys and values lie, and the four forms they may have. Knows no sequence.
//
// For each block, layer, side (keys, values) and head there is a tile of `slots` x `width` elements, slots and dimensions rounded up to
// 16. It is laid out for the dot products of attention, `kPack` elements at a time: keys [width / pack][slots][pack], so that a vector
// holds 16 slots; values [slots / pack][width][pack], so that a vector holds 16 dimensions. The 8-bit forms have one fp16 scale per slot
// and head beside the tiles, [layers][side][head][slots] in each block.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

namespace forebay {

constexpr int kMaxWidth = 256;  // of a head

enum CacheFormat : int32_t { kCacheF32 = 0, kCacheBF16 = 1, kCacheI8 = 2, kCacheE4M3 = 3 };

struct Cache {  // by the wire of ctypes: see library.py
  uint8_t* tiles;
  uint16_t* scales;  // or null
  int64_t block_bytes, layer_bytes;  // strides of tiles
  int64_t block_scales, layer_scales;  // strides of scales
  int32_t block_size;  // tokens
  int32_t slots;  // block_size rounded up to 16
  int32_t width;  // head_dim rounded up to 16
  int32_t num_kv_heads;
  int32_t format;
  int32_t unused;

  int element_bytes() const { return format == kCacheF32 ? 4 : format == kCacheBF16 ? 2 : 1; }
  uint8_t* tile(int layer, int block, int side, int head) const {
    const int64_t tile_bytes = int64_t{slots} * width * element_bytes();
    return tiles + block * block_bytes + layer * layer_bytes + (side * num_kv_heads + head) * tile_bytes;
  }
  uint16_t* scale(int layer, int block, int side, int head) const {
    return scales + block * block_scales + layer * layer_scales + (side * num_kv_heads + head) * slots;
  }
};

// --- the four forms. `Sum` accumulates; `Factor` is what a query or a probability becomes before it meets the cache.

struct CacheF32 {
  static constexpr int kPack = 1, kElement = 4;
  static constexpr bool kScaled = false;
  using Sum = f32x16;
  using Factor = float;
  static Sum none() { return zero(); }
  static b512 load(const uint8_t* p) { return load_bytes(p); }
  static Sum dot(Sum acc, const Factor* factor, b512 v) {
#if FOREBAY_AVX512
    return fma(splat(*factor), _mm512_castsi512_ps(v), acc);
#else
    return fma(splat(*factor), f32x16{_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}, acc);
#endif
  }
  static f32x16 value(Sum acc, float) { return acc; }
  static float prepare(const float* x, int count, Factor* out) {
    std::copy(x, x + count, out);
    return 1.0f;
  }
  static b512 first_of_pair(b512 v) { return v; }
};

struct CacheBF16 {
  static constexpr int kPack = 2, kElement = 2;
  static constexpr bool kScaled = false;
  using Sum = f32x16;
  using Factor = uint16_t;
  static Sum none() { return zero(); }
  static b512 load(const uint8_t* p) { return load_bytes(p); }
  static Sum dot(Sum acc, const Factor* factors, b512 v) { return dot_bf16(acc, splat_word(factors), v); }
  static f32x16 value(Sum acc, float) { return acc; }
  static float prepare(const float* x, int count, Factor* out) {
    for (int i = 0; i < count; i += kLanes) store_bf16(out + i, forebay::load(x + i));
    return 1.0f;
  }
  // The second slot of a block's last pair isn't part of it.
  static b512 first_of_pair(b512 v) { return bytes_and(v, splat_i32(0xffff)); }
};

// FP8 E4M3 without subnormals and NaN, read as bf16: codes 0, and 8 .. 126 with either sign.
struct CacheE4M3 : CacheBF16 {
  static constexpr int kElement = 1;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448.0f;
  static b512 load(const uint8_t* p) { return widen_e4m3(p); }
  static uint8_t encode(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint8_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    bits += 0x7ffff + (bits >> 20 & 1);  // round to three bits of mantissa, to nearest even
    const int exponent = static_cast<int>(bits >> 23) - 120;
    if (exponent < 1) return sign;
    return sign | static_cast<uint8_t>(std::min(exponent << 3 | static_cast<int>(bits >> 20 & 7), 126));
  }
};

// Signed bytes met by 16-bit queries and probabilities: the integer sums are exact.
struct CacheI8 {
  static constexpr int kPack = 2, kElement = 1;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127.0f;
  using Sum = i32x16;
  using Factor = int16_t;
  static Sum none() { return zero_i32(); }
  static b512 load(const uint8_t* p) { return widen_i8(p); }
  static Sum dot(Sum acc, const Factor* factors, b512 v) { return dot_i16(acc, splat_word(factors), v); }
  static f32x16 value(Sum acc, float scale) { return mul(to_float(acc), splat(scale)); }
  static float prepare(const float* x, int count, Factor* out) {
    float top = 0;
    for (int i = 0; i < count; i += kLanes) {
      const f32x16 v = forebay::load(x + i);
      const float here = largest_magnitude(v, v);
      top = here <= top ? top : here;  // a NaN gets through
    }
    const f32x16 inverse = splat(top > 0 ? 32767.0f / top : 0.0f);
    for (int i = 0; i < count; i += kLanes) store_i16(out + i, to_int(mul(forebay::load(x + i), inverse)));
    return top / 32767.0f;
  }
  static b512 first_of_pair(b512 v) { return bytes_and(v, splat_i32(0xffff)); }
  static uint8_t encode(float value) {
    return static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::nearbyintf(value), -127.0f, 127.0f)));
  }
};

// Encoded elements of one head's key or value, [width], to their slot.
template <class Form, class Element>
void scatter(const Cache& cache, uint8_t* tile, int side, int slot, const Element* elements) {
  constexpr int kPack = Form::kPack;
  auto* out = reinterpret_cast<Element*>(tile);
  if (side == 0) {
    for (int i = 0; i < cache.width / kPack; ++i) std::memcpy(out + (i * cache.slots + slot) * kPack, elements + i * kPack, sizeof(Element) * kPack);
    return;
  }
  out += slot / kPack * cache.width * kPack + slot % kPack;
  for (int d = 0; d < cache.width; ++d) out[d * kPack] = elements[d];  // one by one: other threads may write the slots between
}

// Writes one head's key or value, x [width] with zeros behind head_dim, to its slot.
template <class Form>
void store_slot(const Cache& cache, int layer, int block, int slot, int side, int head, const float* x) {
  uint8_t* tile = cache.tile(layer, block, side, head);
  if constexpr (Form::kScaled) {
    float top = 0;
    for (int d = 0; d < cache.width; d += kLanes) {
      const f32x16 v = load(x + d);
      const float here = largest_magnitude(v, v);
      top = here <= top ? top : here;
    }
    // At least fp16's smallest normal number; `encode` cuts off what its rounding moves out of the range. What is beyond fp16 is a NaN.
    const uint16_t scale = to_f16(std::max(top / Form::kLargest, 6.2e-5f));
    const float inverse = 1.0f / from_f16(scale);
    const bool finite = inverse > 0;
    cache.scale(layer, block, side, head)[slot] = finite ? scale : 0x7e00;
    uint8_t codes[kMaxWidth];
    for (int d = 0; d < cache.width; ++d) codes[d] = finite ? Form::encode(x[d] * inverse) : 0;
    scatter<Form>(cache, tile, side, slot, codes);
  } else if constexpr (Form::kElement == 4) {
    scatter<Form>(cache, tile, side, slot, x);
  } else {
    alignas(64) uint16_t rounded[kMaxWidth];
    for (int d = 0; d < cache.width; d += kLanes) store_bf16(rounded + d, load(x + d));
    scatter<Form>(cache, tile, side, slot, rounded);
  }
}

}  // namespace forebay
