// A span of attention as products of AMX tiles: bf16 queries, keys and values, head_dim a multiple of STEP.
//
// Sixteen query rows go together, one in each lane:
//
//   S[key][q] = sum over d, ascending, of k[key][d] * q[d]     keys are rows of tiles, loaded from where they lie
//   m[q] = max S,  p[key][q] = exp(S - m),  l[q] = sum p       down the keys, in ascending order, no step across lanes
//   O[q][d] = sum over keys, ascending, of p[q][key] * v[d]    p rounded to bf16, values as pairs of keys
//
// with S scaled and capped as cpu_attention.cpp says. A key that a row doesn't see has p = 0, so what else the tile sees
// changes no bit, as long as all values are finite. Where one is not, each row gets a product of its own, over values that
// are zero where it doesn't look.

#pragma once

#include "cpu_amx.h"
#include "cpu_vectors.h"

namespace {

struct Visible { int begin, end; };  // half-open, as offsets into a span or a panel

#if PHLOEM_HAS_AMX

constexpr int TILE_FLOATS = LANES * LANES;
constexpr int MAX_DIM = 512;

// Rows of a span's keys and values: pointers to each of `span` rows. Only those of keys that some row sees are read, but
// for keys with is_strided: then tiles are read whole, TILE_ROWS rows from the first, key_bytes apart.
struct SpanRows {
  const bf16 *const *keys, *const *values, *const *next_keys;
  int64_t key_bytes;
  bool is_strided;
};

class AmxSpan {
 public:
  static int64_t scratch_floats(int max_rows, int span, int dim) {
    return int64_t(dim) * (max_rows / 2 + span / 2 + PANEL_ROWS / 2 + LANES) + span * (LANES + LANES / 2);
  }

  AmxSpan(float* scratch, int max_rows, int span, int dim, float scale, float soft_cap)
      : dim_(dim), scale_(scale), soft_cap_(soft_cap) {
    auto take = [&](int count) { float* p = scratch; scratch += count; return p; };
    queries_ = take(max_rows * dim / 2), values_ = take(span * dim / 2), copy_ = take(PANEL_ROWS * dim / 2);
    alone_ = take(LANES * dim), scores_ = take(span * LANES), weights_ = take(span * LANES / 2);
  }

  // row(m) points to the query of row m.
  template <class Row> void load_queries(int count, Row row) {
    for (int group = 0; group < count; group += LANES)
      for (int d = 0; d < dim_; d += STEP) {
        UVec words[LANES];
        for (int i = 0; i < LANES; i++) words[i] = group + i < count ? load_as<UVec>(row(group + i) + d) : UVec{};
        store_transposed(words, query_tile(group, d));
      }
  }

  // Maximum, sum and weighted values `out[m * dim]` of `count` rows, none of which sees a key outside of `any`.
  void run(const SpanRows& rows, const Visible* visible, int count, Visible any, float* maximum, float* sum, float* out) {
    const int begin = any.begin / STEP * STEP, end = (any.end + STEP - 1) / STEP * STEP;
    bool is_shared = true, is_finite = true;
    for (int m = 0; m < count; m++) is_shared &= visible[m].begin <= begin && visible[m].end >= end;
    for (int group = 0; group < count; group += LANES) {
      const int lanes = count - group < LANES ? count - group : LANES;
      score(group, rows, begin, any.end);
      if (soft_cap_ > 0) cap(begin, end);
      if (!is_shared) hide(visible + group, lanes, begin, end);
      weigh(begin, end, group == 0 ? rows.values : nullptr, maximum + group, sum + group);
      if (group == 0) is_finite = pack_values(rows, begin, end, any);
      if (is_shared || is_finite) {
        add_values(begin, end, out + group * dim_);
        continue;
      }
      for (int i = 0; i < lanes; i++) {
        pack_values(rows, begin, end, visible[group + i]);
        add_values(begin, end, alone_);
        std::memcpy(out + (group + i) * dim_, alone_ + i * dim_, sizeof(float) * dim_);
      }
    }
  }

 private:
  static constexpr float LOG2_E = 1.44269504088896341f;
  // least relative error of a polynomial for 2^r on [-1/2, 1/2] that is 1 at 0
  static constexpr float POWER_1 = 0.693124189f, POWER_2 = 0.240240988f, POWER_3 = 0.055906468f, POWER_4 = 0.009582856f;
  static constexpr int PANEL_ROWS = 4 * TILE_ROWS;
  using One = std::make_integer_sequence<int, 1>;
  using Two = std::make_integer_sequence<int, 2>;
  using Four = std::make_integer_sequence<int, 4>;

  float* query_tile(int group, int d) const { return queries_ + (group / LANES * (dim_ / STEP) + d / STEP) * TILE_FLOATS; }
  float* weight_tile(int key) const { return weights_ + key / STEP * TILE_FLOATS; }
  float* value_tile(int key, int d) const { return values_ + (key / STEP * (dim_ / LANES) + d / LANES) * TILE_FLOATS; }

  static void store_transposed(UVec (&words)[LANES], float* tile) {
    transpose<1>(words);
    for (int i = 0; i < LANES; i++) store(tile + i * LANES, words[i]);
  }

  void score(int group, const SpanRows& rows, int begin, int end) {
    int key = begin;
    for (; key + 3 * TILE_ROWS < end; key += PANEL_ROWS) score_tiles(group, rows, key, Four{});
    for (; key < end; key += TILE_ROWS) score_tiles(group, rows, key, One{});
  }

  // Tiles of keys side by side: one product starts while those before it are on their way.
  template <int... J> void score_tiles(int group, const SpanRows& rows, int key, std::integer_sequence<int, J...>) {
    const bf16* const at[] = {key_tile(rows, key, J * TILE_ROWS)...};
    const int64_t stride = rows.is_strided ? rows.key_bytes : dim_ * int(sizeof(bf16));
    (tile_zero<J>(), ...);
    for (int d = 0; d < dim_; d += STEP) {
      tile_load<4>(query_tile(group, d), TILE_BYTES);
      ((tile_load<5 + J % 2>(at[J] + d, stride), tile_multiply<J, 5 + J % 2, 4>()), ...);
    }
    (tile_store<J>(scores_ + (key + J * TILE_ROWS) * LANES, TILE_BYTES), ...);
  }

  const bf16* key_tile(const SpanRows& rows, int key, int offset) const {
    if (rows.is_strided) return rows.keys[key + offset];
    bf16* to = reinterpret_cast<bf16*>(copy_) + offset * dim_;
    for (int i = 0; i < TILE_ROWS; i++) std::memcpy(to + i * dim_, rows.keys[key + offset + i], dim_ * sizeof(bf16));
    return to;
  }

  void cap(int begin, int end) {
    for (float* score = scores_ + begin * LANES; score < scores_ + end * LANES; score += LANES)
      store(score, capped(load(score) * scale_, soft_cap_));
  }

  // Scores of a group become weights; `next` is wanted soon.
  void weigh(int begin, int end, const bf16* const* next, float* maximum, float* sum) {
    const float scale = soft_cap_ > 0 ? 1.0f : scale_, factor = scale * LOG2_E;
    const Vec highest = highest_score(begin, end), top = highest * factor;
    Vec total = {};
    for (int key = begin; key < end; key += STEP) {
      UVec words[LANES];
      for (int i = 0; i < LANES; i++) {
        if (next) prefetch_rows(next + key + 2 * i, 2);
        const float* from = scores_ + (key + 2 * i) * LANES;
        const Vec even = power_of_2(fma(load(from), splat(factor), -top));
        const Vec odd = power_of_2(fma(load(from + LANES), splat(factor), -top));
        total += even, total += odd;
        words[i] = pairs(even, odd);
      }
      store_transposed(words, weight_tile(key));
    }
    store(maximum, highest * scale), store(sum, total);
  }

  void hide(const Visible* visible, int count, int begin, int end) {
    IVec first = {}, last = IVec{} + end;
    for (int i = 0; i < count; i++) first[i] = visible[i].begin, last[i] = visible[i].end;
    for (int key = begin; key < end; key++) {
      float* score = scores_ + key * LANES;
      store(score, select((first <= key) & (last > key), load(score), splat(-INFINITY)));
    }
  }

  Vec highest_score(int begin, int end) const {
    constexpr int CHAINS = 4;
    Vec highest[CHAINS];
    for (Vec& each : highest) each = splat(-INFINITY);
    for (int key = begin; key < end; key += CHAINS)
      for (int i = 0; i < CHAINS; i++) highest[i] = greater(load(scores_ + (key + i) * LANES), highest[i]);
    return greater(greater(highest[0], highest[1]), greater(highest[2], highest[3]));
  }

  static Vec greater(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }  // b where a is NaN

  // 2^x for x <= 0, or NaN, to 3e-6 of its value: weights are rounded to 8 bits. Exactly 0 from -127 on.
  static Vec power_of_2(Vec x) {
    x = greater(splat(-127.0f), x);
    const Vec magic = splat(12582912.0f + 127);  // adding it rounds to an integer, and leaves the power's exponent below
    const Vec biased = x + magic, r = x - (biased - magic);
    Vec p = fma(r, splat(POWER_4), splat(POWER_3));
    p = fma(p, r, splat(POWER_2)), p = fma(p, r, splat(POWER_1)), p = fma(p, r, splat(1.0f));
    return p * (Vec)((UVec)biased << 23);
  }

  static UVec interleave(__m512i low, __m512i high, int from) {  // 16-bit values [from, from + LANES) of both
    UVec index;
    for (int i = 0; i < LANES; i++) index[i] = (from + i) | (32 + from + i) << 16;
    return (UVec)_mm512_permutex2var_epi16(low, (__m512i)index, high);
  }
  static UVec pairs(Vec even, Vec odd) {
    UVec index;
    for (int i = 0; i < LANES; i++) index[i] = i | (LANES + i) << 16;
    return (UVec)_mm512_permutexvar_epi16((__m512i)index, round_to_bf16(even, odd));
  }

  // Values as pairs of keys, zero where a key is not in `seen`. Returns whether all of those in it are finite.
  bool pack_values(const SpanRows& rows, int begin, int end, Visible seen) {
    alignas(64) static const bf16 zeros[MAX_DIM] = {};
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __m512i largest = _mm512_setzero_si512();
    auto load_some = [&](const bf16* from) {
      const __m512i v = load_as<__m512i>(from);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(v, exponent));
      return v;
    };
    for (int step = begin; step < end; step += STEP)
      for (int i = 0; i < LANES; i++) {
        const int key = step + 2 * i;
        if (rows.next_keys) prefetch_rows(rows.next_keys + key, 2);
        const bf16* even = key >= seen.begin && key < seen.end ? rows.values[key] : zeros;
        const bf16* odd = key + 1 >= seen.begin && key + 1 < seen.end ? rows.values[key + 1] : zeros;
        float* to = value_tile(step, 0) + i * LANES;
        for (int d = 0; d < dim_; d += STEP, to += 2 * TILE_FLOATS) {
          const __m512i first = load_some(even + d), second = load_some(odd + d);
          store(to, interleave(first, second, 0));
          store(to + TILE_FLOATS, interleave(first, second, LANES));
        }
      }
    return _mm512_cmpeq_epi16_mask(largest, exponent) == 0;
  }

  // To the second-level cache: what comes in meanwhile fills the first.
  void prefetch_rows(const bf16* const* rows, int count) const {
    for (int i = 0; i < count; i++)
      for (int d = 0; d < dim_; d += 2 * STEP) __builtin_prefetch(rows[i] + d, 0, 2);
  }

  void add_values(int begin, int end, float* out) {
    int d = 0;
    for (; d + 4 * LANES <= dim_; d += 4 * LANES) add_tiles(begin, end, d, out, Four{});
    for (; d < dim_; d += 2 * LANES) add_tiles(begin, end, d, out, Two{});
  }

  // Tiles of dims side by side.
  template <int... J> void add_tiles(int begin, int end, int d, float* out, std::integer_sequence<int, J...>) {
    (tile_zero<J>(), ...);
    for (int key = begin; key < end; key += STEP) {
      tile_load<4>(weight_tile(key), TILE_BYTES);
      ((tile_load<5 + J % 2>(value_tile(key, d + J * LANES), TILE_BYTES), tile_multiply<J, 4, 5 + J % 2>()), ...);
    }
    (tile_store<J>(out + d + J * LANES, dim_ * int64_t(sizeof(float))), ...);
  }

  const int dim_;
  const float scale_, soft_cap_;
  float *queries_, *values_, *copy_, *alone_, *scores_, *weights_;
};

#endif

}  // namespace
