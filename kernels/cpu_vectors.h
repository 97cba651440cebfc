// Vectors of LANES floats, and the few operations on them that the attention kernel is written in.
//
// GCC's and clang's vector extensions carry it to any machine; intrinsics stand only where they are needed: fused
// multiply-add, and widening bf16. Every operation gives the same bits for a lane whatever the other lanes hold.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 6, NUM_VECTORS = 4;  // 6 * 4 sums + 4 operands of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, MAX_ROWS = 4, NUM_VECTORS = 2;
#else
constexpr int LANES = 4, MAX_ROWS = 4, NUM_VECTORS = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HVec __attribute__((vector_size(LANES * 2)));
struct bf16 { uint16_t bits; };

template <class V> inline V load_as(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, also for -0: compilers make a plain broadcast of it
inline float widen(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float widen(float x) { return x; }
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16);
#else
  return (Vec)(__builtin_convertvector(load_as<HVec>(p), UVec) << 16);
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline UVec select_bits(IVec mask, UVec yes, UVec no) { return (yes & (UVec)mask) | (no & ~(UVec)mask); }
inline Vec select(IVec mask, Vec yes, Vec no) { return (Vec)select_bits(mask, (UVec)yes, (UVec)no); }

// exp for x <= 0, or NaN: Cephes' expf polynomial; below -87 the result is exactly 0.
inline Vec exp_negative(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = fma(x, splat(1.44269504088896341f), magic) - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  IVec too_small = x < splat(-87.0f);
  // NaN converts to some integer; p is NaN then, and stays so under any factor
  IVec exponent = __builtin_convertvector(select(too_small, Vec{}, n), IVec);
  Vec power = (Vec)((exponent + 127) << 23);
  return select(too_small, Vec{}, p * power);
}

inline float exp_negative(float x) { return exp_negative(splat(x))[0]; }

// tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2|x|)
inline Vec tanh(Vec x) {
  Vec magnitude = (Vec)((IVec)x & 0x7fffffff);
  Vec e = exp_negative(magnitude * -2.0f);
  return (Vec)((IVec)((1.0f - e) / (1.0f + e)) | ((IVec)x & INT32_MIN));
}

inline Vec capped(Vec score, float cap) { return tanh(score / cap) * cap; }

// x / (1 + exp(-x)), by exp of a number that is not positive
inline Vec silu(Vec x) {
  const Vec e = exp_negative((Vec)((IVec)x | INT32_MIN));  // exp(-|x|)
  return select(x < Vec{}, x * e, x) / (e + 1.0f);
}

template <class Op> inline float reduce(Vec v, Op op) {
  float x[LANES];
  store(x, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = op(x[i], x[i + width]);
  return x[0];
}

// ---- transposing a square of 32-bit values: log2(LANES) rounds of two-source shuffles

template <int S, int... L> inline void exchange(UVec& a, UVec& b, std::integer_sequence<int, L...>) {
#if defined(__clang__) || __GNUC__ >= 12
  UVec low = __builtin_shufflevector(a, b, ((L & S) ? LANES + L - S : L)...);
  UVec high = __builtin_shufflevector(a, b, ((L & S) ? LANES + L : L + S)...);
#else
  UVec low = __builtin_shuffle(a, b, UVec{((L & S) ? LANES + L - S : L)...});
  UVec high = __builtin_shuffle(a, b, UVec{((L & S) ? LANES + L : L + S)...});
#endif
  a = low;
  b = high;
}

template <int S> inline void transpose(UVec (&v)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & S)) exchange<S>(v[i], v[i + S], std::make_integer_sequence<int, LANES>{});
  if constexpr (S < LANES / 2) transpose<S * 2>(v);
}

inline UVec load_words(const void* row, int word, int num_words) {
  const char* p = static_cast<const char*>(row) + word * 4;
  if (word + LANES <= num_words) return load_as<UVec>(p);
  uint32_t rest[LANES] = {};
  std::memcpy(rest, p, (num_words - word) * 4);
  return load_as<UVec>(rest);
}

inline HVec round_to_bf16(Vec x) {  // to nearest, ties to even; what is too small for a normal number may become 0
#if defined(__AVX512BF16__)
  return (HVec)_mm512_cvtneps_pbh((__m512)x);
#else
  const UVec u = (UVec)x, odd = (u >> 16) & 1;
  const UVec bits = select_bits((IVec)(x != x), UVec{} + 0x7fc0u, (u + 0x7fff + odd) >> 16);
  return __builtin_convertvector(bits, HVec);
#endif
}

#if defined(__AVX512F__)
inline __m512i round_to_bf16(Vec low, Vec high) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)round_to_bf16(low)), (__m256i)round_to_bf16(high), 1);
#endif
}
#endif

// The values of v as type T holds them.
template <class T> inline Vec rounded(Vec v) {
  if constexpr (sizeof(T) == 4) return v;
  else return (Vec)(__builtin_convertvector(round_to_bf16(v), UVec) << 16);
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &x, 4);
  out->bits = x != x ? uint16_t(0x7fc0) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// A vector of values, or the `count` that are left of a row; the other lanes are 0.
template <class T> inline Vec load_some(const T* p, int count) {
  float wide[LANES] = {};
  for (int i = 0; i < count; i++) wide[i] = widen(p[i]);
  return load(wide);
}
inline void store_all(float* p, Vec v) { store(p, v); }
inline void store_all(bf16* p, Vec v) { store(p, round_to_bf16(v)); }
template <class T> inline void store_some(T* p, Vec v, int count) {
  T values[LANES];
  store_all(values, v);
  std::memcpy(p, values, count * sizeof(T));
}

// Copies a row as floats, with zeros up to a multiple of LANES.
template <class T> inline void widen_row(const T* row, int head_dim, float* out) {
  int d = 0;
  for (; d + LANES <= head_dim; d += LANES) store(out + d, load(row + d));
  if (d == head_dim) return;
  store(out + d, Vec{});
  for (; d < head_dim; d++) out[d] = widen(row[d]);
}

// Calls run(constant<M>, first row) over rows [row, end) in blocks of M, then, for what is left, of ever fewer: each number of
// rows is compiled by itself.
template <int M, class Run> inline void in_row_blocks(int row, int end, Run run) {
  for (; row + M <= end; row += M) run(std::integral_constant<int, M>{}, row);
  if constexpr (M > 1) in_row_blocks<(M > 3 ? M / 2 : M - 1)>(row, end, run);
}

// Calls run(constant<0>), ... run(constant<N - 1>).
template <int N, int I = 0, class Run> inline void for_parts(Run run) {
  run(std::integral_constant<int, I>{});
  if constexpr (I + 1 < N) for_parts<N, I + 1>(run);
}

inline void prefetch(const void* row, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

}  // namespace
