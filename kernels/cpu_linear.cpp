// The linear layers of a decoder: y = x W^T + b, also with the SwiGLU that follows the first layer of an MLP. Weights are
// float32, bf16, or int8 with a scale per output; on a processor that multiplies tiles, rows in bf16 go to cpu_linear_amx.h.
//
// The arithmetic of an output is fixed, so a row has the same bits whatever rows stand beside it: from zero, one fused
// multiply-add per input, ascending (on AVX512-BF16 one VDPBF16PS per pair of inputs); then the scale, if there is one, then
// the bias; then the sum is rounded, once.
//
//              32 outputs              Lanes are outputs. A *stripe* of 32 of them is one stream in memory, of words: a word
//            +------------+            holds 1, 2 or 4 inputs of one output, and those of 32 outputs stand side by side
//   BLOCK    |    sums    |            (`pack` in cpu_linear.py). The sums of up to BLOCK rows stay in registers, and each
//   rows     |            |            value of x is spread over a vector.
//            +------------+
//
// A stripe is read from memory once for all rows of a panel (as many as stay in the second-level cache), and while it is
// worked on, the next one of this thread is prefetched. With few rows that is all there is to do: the pace is memory's.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu_kernels.h"
#include "cpu_linear_amx.h"
#include "cpu_vectors.h"

namespace {

constexpr int VECTORS = STRIPE / LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int BLOCK = 24 / VECTORS;  // of 32 registers
#else
constexpr int BLOCK = 12 / VECTORS > 0 ? 12 / VECTORS : 1;  // of 16
#endif
constexpr int WORD_BYTES = STRIPE * 4;      // of the words of a stripe that stand side by side
constexpr int CHUNK = 2048;                 // inputs that are gone through for all rows of a panel before the next ones
constexpr int LEAD = 32;                    // words between a prefetch and its use

// ---- how words are multiplied: the inputs in a word, the values of x that it meets in one go, and what is added

struct Floats {
  using X = float;
  static constexpr int INPUTS = 1, PARTS = 1;
  template <int> static Vec part(UVec words) { return (Vec)words; }
  static Vec add(Vec sum, const X* x, Vec weights) { return fma(splat(*x), weights, sum); }
};
struct Bf16s : Floats {
  static constexpr int INPUTS = 2, PARTS = 2;
  template <int I> static Vec part(UVec words) { return (Vec)(I ? words & 0xffff0000u : words << 16); }
};
struct Int8s : Floats {
  static constexpr int INPUTS = 4, PARTS = 4;
  template <int I> static Vec part(UVec words) { return __builtin_convertvector((IVec)(words << (24 - 8 * I)) >> 24, Vec); }
};
#if defined(__AVX512BF16__)
struct Bf16Pairs {
  using X = bf16;
  static constexpr int INPUTS = 2, PARTS = 1;
  template <int> static UVec part(UVec words) { return words; }
  static Vec add(Vec sum, const X* x, UVec weights) {
    const __m512i pair = _mm512_set1_epi32(load_as<int32_t>(x));
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)(__m512i)weights);
  }
};
#endif

// Adds the products of `num_words` words to the sums of M rows, [M][STRIPE]. `ahead` is prefetched, word by word.
template <class Words, int M>
inline void multiply(const typename Words::X* x, int64_t x_stride, const char* weight, int num_words, const char* ahead,
                     float* sums) {
  Vec sum[M][VECTORS];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) sum[m][j] = load(sums + m * STRIPE + j * LANES);
  for (int word = 0; word < num_words; word++, weight += WORD_BYTES, ahead += WORD_BYTES, x += Words::INPUTS) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + WORD_BYTES / 2, 0, 2);
    UVec words[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) words[j] = load_as<UVec>(weight + j * LANES * 4);
    for_parts<Words::PARTS>([&](auto part) {
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
          sum[m][j] = Words::add(sum[m][j], x + m * x_stride + part(), Words::template part<part()>(words[j]));
    });
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) store(sums + m * STRIPE + j * LANES, sum[m][j]);
}

// One row's sums of a stripe become `count` results.
template <class T, bool IS_GATED>
void write_row(const float* sums, const float* scale, const float* bias, int count, void* out) {
  Vec v[VECTORS];
  for (int j = 0; j < VECTORS; j++) {
    v[j] = load(sums + j * LANES);
    if (scale) v[j] *= load(scale + j * LANES);
    if (bias) v[j] += load(bias + j * LANES);
  }
  constexpr int HALF = VECTORS / 2;
  for (int j = 0; j < (IS_GATED ? HALF : VECTORS); j++) {
    const int d = j * LANES;
    if (d >= count) return;
    if (IS_GATED) v[j] = rounded<T>(silu(rounded<T>(v[j]))) * rounded<T>(v[j + HALF]);
    if (d + LANES <= count) store_all(static_cast<T*>(out) + d, v[j]);
    else store_some(static_cast<T*>(out) + d, v[j], count - d);
  }
}

struct Call {
  const PhloemLinear& layer;
  const PhloemInput& x;
  const PhloemResult& out;
};

// One thread's part in a product.
template <class Words> class LaneProduct {
  using X = typename Words::X;

 public:
  explicit LaneProduct(const Call& call)
      : a_(call), columns_(a_.layer.is_gated ? STRIPE / 2 : STRIPE),
        num_stripes_((a_.layer.out_features + columns_ - 1) / columns_), num_words_(a_.layer.in_features / Words::INPUTS),
        panel_rows_(std::max<int64_t>(1, PANEL_BYTES / (int64_t(a_.layer.in_features) * int(sizeof(X)) * BLOCK)) * BLOCK),
        num_items_((a_.x.num_rows + panel_rows_ - 1) / panel_rows_ * num_stripes_) {}

  // Items (a panel of rows by a stripe), each claimed one ahead so that it can be prefetched.
  void run(Member& member) {
    static thread_local std::vector<float> sums;
    static thread_local std::vector<X> wide;
    sums.resize((num_words_ * Words::INPUTS > CHUNK ? panel_rows_ : BLOCK) * STRIPE);
    int64_t panel = -1;
    Rows rows{};
    for (int64_t item = member.claim(), next; item < num_items_; item = next) {
      next = member.claim();
      if (item / num_stripes_ != panel) {
        panel = item / num_stripes_;
        rows = panel_of(panel, wide);
      }
      run_item(item, rows, next < num_items_ ? stripe_of(next) : stripe_of(item), sums.data());
    }
  }

 private:
  const Call& a_;
  const int columns_;
  const int64_t num_stripes_;
  const int num_words_;
  const int64_t panel_rows_, num_items_;

  const char* stripe_of(int64_t item) const {
    return static_cast<const char*>(a_.layer.weight) + item % num_stripes_ * num_words_ * WORD_BYTES;
  }

  struct Rows {
    const X* x;
    int64_t stride;
    int count;
  };

  // The rows of x of a panel, where they lie or, if of another type, as a copy.
  Rows panel_of(int64_t panel, std::vector<X>& wide) const {
    const int64_t begin = panel * panel_rows_, width = a_.layer.in_features;
    const int count = int(std::min(panel_rows_, a_.x.num_rows - begin));
    if (a_.x.is_bf16 == (sizeof(X) == 2)) return {static_cast<const X*>(a_.x.data) + begin * a_.x.row_stride, a_.x.row_stride, count};
    const int64_t stride = (width + LANES - 1) / LANES * LANES;  // rows are filled up with zeros
    if (int64_t(wide.size()) < count * stride) wide.resize(count * stride);
    if constexpr (sizeof(X) == 4)
      for (int m = 0; m < count; m++)
        widen_row(static_cast<const bf16*>(a_.x.data) + (begin + m) * a_.x.row_stride, int(width), wide.data() + m * stride);
    return {wide.data(), stride, count};
  }

  void run_item(int64_t item, const Rows& rows, const char* next, float* sums) const {
    constexpr int CHUNK_WORDS = CHUNK / Words::INPUTS;
    const int64_t first_row = item / num_stripes_ * panel_rows_;
    const bool is_single = num_words_ <= CHUNK_WORDS;
    for (int word = 0; word < num_words_; word += CHUNK_WORDS) {
      const Part part{stripe_of(item) + int64_t(word) * WORD_BYTES, next + int64_t(word) * WORD_BYTES,
                      std::min(CHUNK_WORDS, num_words_ - word)};
      in_row_blocks<BLOCK>(0, rows.count, [&](auto m_constant, int m) {
        constexpr int M = m_constant();
        float* to = is_single ? sums : sums + int64_t(m) * STRIPE;
        if (word == 0) std::memset(to, 0, M * STRIPE * sizeof(float));
        const X* x = rows.x + m * rows.stride + word * Words::INPUTS;
        if (rows.count <= BLOCK) multiply_leading<M>(x, rows.stride, part, to);
        else multiply<Words, M>(x, rows.stride, part.weight, part.num_words, m + M < rows.count ? part.weight : part.next, to);
        if (word + part.num_words == num_words_)
          for (int r = 0; r < M; r++) write(item, first_row + m + r, to + r * STRIPE);
      });
    }
  }

  struct Part { const char *weight, *next; int num_words; };  // words of a stripe, and the same ones of the next stripe

  // With one block of rows, words are fetched a few ahead, running on into the next stripe; with more, by the last block.
  template <int M> static void multiply_leading(const X* x, int64_t x_stride, const Part& part, float* sums) {
    const int turn = std::max(0, part.num_words - LEAD);
    multiply<Words, M>(x, x_stride, part.weight, turn, part.weight + LEAD * WORD_BYTES, sums);
    multiply<Words, M>(x + turn * Words::INPUTS, x_stride, part.weight + int64_t(turn) * WORD_BYTES, part.num_words - turn,
                       part.next, sums);
  }

  void write(int64_t item, int64_t row, const float* sums) const {
    const int64_t stripe = item % num_stripes_, column = stripe * columns_;
    const int count = int(std::min<int64_t>(columns_, a_.layer.out_features - column));
    const float* scale = a_.layer.scale ? a_.layer.scale + stripe * STRIPE : nullptr;
    const float* bias = a_.layer.bias ? a_.layer.bias + stripe * STRIPE : nullptr;
    const int64_t place = row * a_.out.row_stride + column;
    if (a_.out.is_bf16) {
      bf16* to = static_cast<bf16*>(a_.out.data) + place;
      a_.layer.is_gated ? write_row<bf16, true>(sums, scale, bias, count, to) : write_row<bf16, false>(sums, scale, bias, count, to);
    } else {
      float* to = static_cast<float*>(a_.out.data) + place;
      a_.layer.is_gated ? write_row<float, true>(sums, scale, bias, count, to) : write_row<float, false>(sums, scale, bias, count, to);
    }
  }
};

}  // namespace

void phloem::linear(Member& member, const PhloemLinear& layer, const PhloemInput& x, const PhloemResult& out) {
  const Call call{layer, x, out};
  if (layer.format == FLOAT_LANES) LaneProduct<Floats>(call).run(member);
  else if (layer.format == INT8_LANES) LaneProduct<Int8s>(call).run(member);
#if defined(__AVX512BF16__)
  else if (layer.format == BF16_LANES && x.is_bf16) LaneProduct<Bf16Pairs>(call).run(member);
#endif
  else if (layer.format == BF16_LANES) LaneProduct<Bf16s>(call).run(member);
#if PHLOEM_HAS_AMX
  else run_tiles(member, layer, x, out);
#endif
  member.meet();
}

extern "C" {

// Whether bf16 weights are to be packed for tiles (AMX): this build has code for them, and the system lets this process use it.
int32_t phloem_linear_has_tiles() {
#if PHLOEM_HAS_AMX
  return amx_is_allowed();
#else
  return 0;
#endif
}

// out [num_rows, out_features] = x [num_rows, in_features] W^T * scale + bias, or silu of half of that times the other half.
// in_features must be a multiple of 32 for tiles, elsewhere of the inputs in a word.
void phloem_linear(const PhloemLinear* layer, const PhloemInput* x, const PhloemResult* out, int32_t num_threads) {
  const int64_t products = (int64_t(layer->in_features) * layer->out_features) * (8 + x->num_rows);
  in_team(products > GRAIN ? num_threads : 1, [&](Member& member) { linear(member, *layer, *x, *out); });
}
}
