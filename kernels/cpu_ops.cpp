// What stands between the matrix products of a decoder, each in one pass over its rows: residual sum and RMSNorm, SwiGLU,
// rotary embedding. In a decode step of a small model, torch spends more time on calling these, a dozen small operations each,
// than on computing them.
//
// Computed in float32, rounded to the tensor's type wherever transformers rounds. A row's bits depend on that row alone: a sum
// goes by lane, in a fixed number of chains, then by a fixed tree; everything else is elementwise. Compiled with
// -ffp-contract=off, as cpu_attention.cpp is.

#include "cpu_vectors.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // values under which a second thread costs more than it saves
constexpr int CHAINS = 4;

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

// Where a loop over a row stands: at a whole vector, or at what is left at the end. The compiler makes a loop of the first.
struct Whole {
  template <class T> static Vec get(const T* p) { return load(p); }
  template <class T> static void put(T* p, Vec v) { store_all(p, v); }
};
struct Rest {
  int count;
  template <class T> Vec get(const T* p) const { return load_some(p, count); }
  template <class T> void put(T* p, Vec v) const { store_some(p, v, count); }
};
template <class Run> inline void for_vectors(int width, Run run) {
  int d = 0;
  for (; d + LANES <= width; d += LANES) run(d, Whole{});
  if (d < width) run(d, Rest{width - d});
}

// hidden += delta, if there is one; out = hidden / rms(hidden) * weight.
template <class T> void add_norm_row(T* hidden, const T* delta, const T* weight, T* out, int width, float eps) {
  Vec squares[CHAINS] = {};
  auto add = [&](int d, auto at, Vec& sum) {
    Vec x = at.get(hidden + d);
    if (delta) {
      x = rounded<T>(x + at.get(delta + d));
      at.put(hidden + d, x);
    }
    sum = fma(x, x, sum);
  };
  int begin = 0;
  for (; begin + CHAINS * LANES <= width; begin += CHAINS * LANES)
    for (int chain = 0; chain < CHAINS; chain++) add(begin + chain * LANES, Whole{}, squares[chain]);
  for_vectors(width - begin, [&](int d, auto at) { add(begin + d, at, squares[0]); });
  const Vec sums = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const float mean = reduce(sums, [](float a, float b) { return a + b; }) / float(width);
  const Vec scale = splat(1.0f / std::sqrt(mean + eps));
  for_vectors(width, [&](int d, auto at) {
    const Vec unit = rounded<T>(at.get(hidden + d) * scale);
    at.put(out + d, unit * at.get(weight + d));
  });
}

template <class T> void silu_and_mul_row(const T* gate, const T* up, T* out, int width) {
  for_vectors(width, [&](int d, auto at) { at.put(out + d, rounded<T>(silu(at.get(gate + d))) * at.get(up + d)); });
}

// Rotates the first 2 * half values of a head, by halves; what follows is copied.
template <class T>
void rotate_head(const T* x, const float* cos, const float* signed_sin, T* out, int half, int head_dim) {
  for (int part = 0; part < 2; part++) {
    const int begin = part * half, other = half - begin;
    for_vectors(half, [&](int d, auto at) {
      const Vec turned = at.get(x + other + d) * at.get(signed_sin + begin + d);
      at.put(out + begin + d, at.get(x + begin + d) * at.get(cos + begin + d) + turned);
    });
  }
  std::memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

template <class Run> void for_rows(int64_t num_rows, int64_t width, int num_threads, Run run) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 1 && num_rows * width > GRAIN)
  for (int64_t row = 0; row < num_rows; row++) run(row);
}

}  // namespace

extern "C" {

// A tensor [num_rows, num_heads, width], its last two dimensions contiguous.
struct PhloemRows {
  void* data;
  int64_t num_rows, row_stride;  // in values
  int32_t num_heads, width;
};

void phloem_add_norm(const PhloemRows* hidden, const void* delta, const void* weight, void* out, float eps, int32_t is_bf16,
                     int32_t num_threads) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const int64_t size = int64_t(hidden->num_heads) * hidden->width;
    for_rows(hidden->num_rows, size, num_threads, [&](int64_t row) {
      for (int head = 0; head < hidden->num_heads; head++) {
        const int64_t at = row * size + head * hidden->width;
        add_norm_row(static_cast<T*>(hidden->data) + row * hidden->row_stride + head * hidden->width,
                     delta ? static_cast<const T*>(delta) + at : nullptr, static_cast<const T*>(weight),
                     static_cast<T*>(out) + at, hidden->width, eps);
      }
    });
  };
  is_bf16 ? run(bf16{}) : run(0.0f);
}

void phloem_silu_and_mul(const void* gate_up, void* out, int64_t num_rows, int32_t width, int32_t is_bf16,
                         int32_t num_threads) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    for_rows(num_rows, width, num_threads, [&](int64_t row) {
      const T* gate = static_cast<const T*>(gate_up) + row * 2 * width;
      silu_and_mul_row(gate, gate + width, static_cast<T*>(out) + row * width, width);
    });
  };
  is_bf16 ? run(bf16{}) : run(0.0f);
}

// Rotates every head of x by its token's position; tables are [max_position, rotary_dim]. Returns the first position that
// has no place in them, -1 if all have.
int64_t phloem_rotate(const PhloemRows* x, const int64_t* positions, const float* cos, const float* signed_sin, void* out,
                      int64_t max_position, int32_t rotary_dim, int32_t is_bf16, int32_t num_threads) {
  for (int64_t row = 0; row < x->num_rows; row++)
    if (positions[row] < 0 || positions[row] >= max_position) return positions[row] < 0 ? max_position : positions[row];
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const int64_t size = int64_t(x->num_heads) * x->width;
    for_rows(x->num_rows, size, num_threads, [&](int64_t row) {
      const int64_t table = positions[row] * rotary_dim;
      for (int head = 0; head < x->num_heads; head++)
        rotate_head(static_cast<const T*>(x->data) + row * x->row_stride + head * x->width, cos + table, signed_sin + table,
                    static_cast<T*>(out) + row * size + head * x->width, rotary_dim / 2, x->width);
    });
  };
  is_bf16 ? run(bf16{}) : run(0.0f);
  return -1;
}
}
