// Holds every function of simd.h, and the forms of cache.h that are made of them, to plain scalar code. Compiled once for each path.
// Exit code 1 and a line on stderr for each of the first differences.
#include "simd.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>

#include "cache.h"

using namespace forebay;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
std::mt19937 random_bits(1);
int num_failures = 0;

void require(bool truth, const char* what) {
  if (truth) return;
  if (++num_failures <= 20) std::fprintf(stderr, "%s\n", what);
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(random_bits); }

struct Floats {  // 16 lanes
  alignas(64) float v[kLanes];
  Floats() = default;
  explicit Floats(f32x16 x) { store(v, x); }
  f32x16 vector() const { return load(v); }
};

Floats some(float low, float high) {
  Floats out;
  for (float& v : out.v) v = uniform(low, high);
  return out;
}

struct Bytes {  // 64
  alignas(64) int8_t v[64];
  Bytes(int low, int high) {
    for (auto& byte : v) byte = static_cast<int8_t>(std::uniform_int_distribution<int>(low, high)(random_bits));
  }
  b512 vector() const { return load_bytes(v); }
};

template <class F>
void check_lanes(const char* what, f32x16 ours, F&& theirs) {
  const Floats lanes(ours);
  for (int i = 0; i < kLanes; ++i)
    if (!same(lanes.v[i], theirs(i))) return require(false, what);
}

void check_arithmetic() {
  const Floats a = some(-9, 9), b = some(-9, 9), c = some(-9, 9);
  check_lanes("add", add(a.vector(), b.vector()), [&](int i) { return a.v[i] + b.v[i]; });
  check_lanes("sub", sub(a.vector(), b.vector()), [&](int i) { return a.v[i] - b.v[i]; });
  check_lanes("mul", mul(a.vector(), b.vector()), [&](int i) { return a.v[i] * b.v[i]; });
  check_lanes("div", div(a.vector(), b.vector()), [&](int i) { return a.v[i] / b.v[i]; });
  check_lanes("fma", fma(a.vector(), b.vector(), c.vector()), [&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  check_lanes("max", max(a.vector(), b.vector()), [&](int i) { return std::max(a.v[i], b.v[i]); });
  check_lanes("min", min(a.vector(), b.vector()), [&](int i) { return std::min(a.v[i], b.v[i]); });
  check_lanes("round", round(a.vector()), [&](int i) { return std::nearbyint(a.v[i]); });
  check_lanes("to_int", to_float(to_int(a.vector())), [&](int i) { return std::nearbyint(a.v[i]); });
  check_lanes("scale_by_power", scale_by_power(a.vector(), round(b.vector())), [&](int i) { return std::ldexp(a.v[i], std::nearbyint(b.v[i])); });
  check_lanes("max takes the second operand's NaN", max(a.vector(), splat(kNaN)), [&](int) { return kNaN; });
  check_lanes("max drops the first operand's NaN", max(splat(kNaN), a.vector()), [&](int i) { return a.v[i]; });
}

void check_reductions() {
  Floats a = some(-9, 9), b = some(-9, 9);
  double total = 0;
  float top = a.v[0], magnitude = 0;
  for (int i = 0; i < kLanes; ++i) {
    total += a.v[i];
    top = std::max(top, a.v[i]);
    magnitude = std::max({magnitude, std::fabs(a.v[i]), std::fabs(b.v[i])});
  }
  require(std::fabs(sum(a.vector()) - total) < 1e-4, "sum");
  require(largest(a.vector()) == top, "largest");
  require(largest_magnitude(a.vector(), b.vector()) == magnitude, "largest_magnitude");
  require(sum(add(to_int(splat(3)), to_int(splat(-5)))) == -2 * kLanes, "sum of integers");
  const int lane = static_cast<int>(random_bits() % kLanes);
  for (const float v : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    Floats odd = a;
    odd.v[lane] = v;
    require(same(largest_magnitude(b.vector(), odd.vector()), std::fabs(v)), "largest_magnitude of what is no number");
  }
}

void check_lane_masks() {
  const Floats a = some(-9, 9);
  for (int first = -40; first <= 40; ++first)
    for (int last = first - 2; last <= 40; ++last)
      check_lanes("keep_lanes", keep_lanes(a.vector(), first, last, splat(7)), [&](int i) { return i >= first && i <= last ? a.v[i] : 7.0f; });
}

void check_conversions() {
  Floats a = some(-300, 300);
  a.v[3] = kNaN, a.v[4] = kInfinity, a.v[5] = -0.0f, a.v[6] = 3.3e38f, a.v[7] = 1.00390625f;  // the last: half way between two bf16
  alignas(64) uint16_t words[kLanes];
  store_bf16(words, a.vector());
  for (int i = 0; i < kLanes; ++i) require(same(from_bf16(words[i]), from_bf16(to_bf16(a.v[i]))), "store_bf16");
  for (int i = 0; i < kLanes; ++i) words[i] = static_cast<uint16_t>(random_bits());
  check_lanes("load_f16", load_f16(words), [&](int i) { return from_f16(words[i]); });
  const Floats small = some(-127, 127), large = some(-32767, 32767);
  int8_t bytes[kLanes];
  int16_t shorts[kLanes];
  store_i8(bytes, to_int(small.vector()));
  store_i16(shorts, to_int(large.vector()));
  for (int i = 0; i < kLanes; ++i) {
    require(bytes[i] == std::nearbyint(small.v[i]), "store_i8");
    require(shorts[i] == std::nearbyint(large.v[i]), "store_i16");
  }
}

void check_integer_products() {
  const Bytes weights(-128, 127), x(-127, 127), nibbles(0, 15), shorts(-127, 127);
  const Floats start = some(-1000, 1000);
  auto expected = [&](const Bytes& w, int i, int factor) {
    int total = static_cast<int>(std::nearbyint(start.v[i]));
    for (int j = 0; j < 4; ++j) total += (w.v[4 * i + j] + factor) * x.v[4 * i + j];
    return static_cast<float>(total);
  };
  const i32x16 acc = to_int(start.vector());
  check_lanes("dot_nibbles", to_float(dot_nibbles(acc, nibbles.vector(), x.vector())), [&](int i) { return expected(nibbles, i, 0); });
  check_lanes("dot_bytes", to_float(dot_bytes(acc, prepare_bytes(weights.vector()), x.vector())),
              [&](int i) { return expected(weights, i, static_cast<int>(kByteOffset)); });
  const b512 wide = widen_i8(shorts.v);
  int16_t factors[2] = {32767, -32767};
  check_lanes("dot_i16, widen_i8", to_float(dot_i16(acc, splat_word(factors), wide)), [&](int i) {
    return static_cast<float>(static_cast<int>(std::nearbyint(start.v[i])) + 32767 * shorts.v[2 * i] - 32767 * shorts.v[2 * i + 1]);
  });
}

void check_nibbles() {
  const Bytes any(-128, 127);
  uint8_t low[64], high[64], masked[64];
  auto take = [](uint8_t* out, b512 v) { std::memcpy(out, &v, 64); };
  take(low, low_nibbles(any.vector()));
  take(high, high_nibbles(any.vector()));
  take(masked, bytes_and(any.vector(), splat_i32(0xffff)));
  for (int i = 0; i < 64; ++i) {
    const auto byte = static_cast<uint8_t>(any.v[i]);
    require(low[i] == (byte & 15), "low_nibbles");
    require(high[i] == byte >> 4, "high_nibbles");
    require(masked[i] == (i % 4 < 2 ? byte : 0), "bytes_and");
  }
}

void check_bf16_products() {
  const Floats start = some(-3, 3);
  alignas(64) uint16_t a[32], b[32];
  for (int i = 0; i < 32; ++i) a[i] = to_bf16(uniform(-2, 2)), b[i] = to_bf16(uniform(-2, 2));
  const Floats lanes(dot_bf16(start.vector(), load_bytes(a), load_bytes(b)));
  for (int i = 0; i < kLanes; ++i) {
    const double exact = start.v[i] + double(from_bf16(a[2 * i])) * from_bf16(b[2 * i]) + double(from_bf16(a[2 * i + 1])) * from_bf16(b[2 * i + 1]);
    require(std::fabs(lanes.v[i] - exact) < 4e-6, "dot_bf16");
  }
}

void check_exponentials() {
  const Floats x = some(-120, 127), y = some(-30, 30);
  check_lanes("exp2 of a NaN", exp2(splat(kNaN)), [](int) { return kNaN; });
  check_lanes("exp2 far below", exp2(splat(-1e30f)), [](int) { return 0x1p-126f; });
  check_lanes("silu of a NaN", silu(splat(kNaN)), [](int) { return kNaN; });
  check_lanes("silu far above", silu(splat(1e30f)), [](int) { return 1e30f; });
  const Floats powers(exp2(x.vector())), gates(silu(y.vector()));
  for (int i = 0; i < kLanes; ++i) {
    require(std::fabs(powers.v[i] / std::exp2(double(x.v[i])) - 1) < 3e-7, "exp2");
    require(std::fabs(gates.v[i] - y.v[i] / (1 + std::exp(-double(y.v[i])))) < 1e-6 * (1 + std::fabs(y.v[i])), "silu");
  }
}

void check_noise_arithmetic() {
  alignas(64) uint32_t a[kLanes], b[kLanes], out[4][kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = static_cast<uint32_t>(random_bits()), b[i] = static_cast<uint32_t>(random_bits());
  const i32x16 x = load_bytes(a), y = load_bytes(b), results[] = {mul(x, y), exclusive_or(x, y), shift_right<13>(x), counting_up()};
  std::memcpy(out, results, sizeof out);
  for (uint32_t i = 0; i < kLanes; ++i) {
    require(out[0][i] == a[i] * b[i], "mul of integers");
    require(out[1][i] == (a[i] ^ b[i]), "exclusive_or");
    require(out[2][i] == a[i] >> 13, "shift_right");
    require(out[3][i] == i, "counting_up");
  }
  Floats p = some(-9, 9), q = some(-9, 9);
  p.v[2] = q.v[2], p.v[3] = kNaN;
  check_lanes("where_less", where_less(p.vector(), q.vector(), splat(1), splat(2)), [&](int i) { return p.v[i] < q.v[i] ? 1.0f : 2.0f; });
  Floats positive = some(-20, 88);
  for (float& v : positive.v) v = std::exp(v);
  positive.v[0] = 1, positive.v[1] = 0x1p-126f, positive.v[2] = 3.4e38f;
  const Floats logarithms(log(positive.vector()));
  for (int i = 0; i < kLanes; ++i) {
    const double exact = std::log(double(positive.v[i]));
    require(std::fabs(logarithms.v[i] - exact) < 1e-6 * (1 + std::fabs(exact)), "log");
  }
}

float decode_e4m3(uint8_t code) {
  const float magnitude = (code & 0x7f) == 0 ? 0 : std::ldexp(1 + (code & 7) / 8.0f, (code >> 3 & 15) - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

void check_e4m3() {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f || ((code & 0x78) == 0 && (code & 7) != 0)) continue;  // NaN and subnormals aren't used
    require(CacheE4M3::encode(decode_e4m3(static_cast<uint8_t>(code))) == code, "E4M3: a code's own value");
    uint8_t codes[32];
    std::fill(codes, codes + 32, static_cast<uint8_t>(code));
    uint16_t wide[32];
    const b512 v = widen_e4m3(codes);
    std::memcpy(wide, &v, 64);
    for (const uint16_t word : wide) require(from_bf16(word) == decode_e4m3(static_cast<uint8_t>(code)), "widen_e4m3");
  }
  for (int i = 0; i < 1000; ++i) {
    const float x = uniform(-448, 448), rounded = decode_e4m3(CacheE4M3::encode(x));
    require(std::fabs(rounded - x) <= std::max(std::fabs(x) / 16, 0x1p-6f), "E4M3: the nearest code");
  }
  require(CacheE4M3::encode(1e9f) == 126 && CacheE4M3::encode(-1e9f) == (128 | 126), "E4M3: the largest");
}

}  // namespace

int main() {
  for (int round = 0; round < 1000; ++round) {
    check_arithmetic();
    check_reductions();
    check_conversions();
    check_integer_products();
    check_nibbles();
    check_bf16_products();
    check_exponentials();
    check_noise_arithmetic();
  }
  check_lane_masks();
  check_e4m3();
  return num_failures > 0;
}
