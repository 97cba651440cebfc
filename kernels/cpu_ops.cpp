// What stands between the matrix products of a decoder, each in one pass over its rows: residual sum and RMSNorm, SwiGLU,
// rotary embedding. In a decode step of a small model, torch spends more time on calling these, a dozen small operations each,
// than on computing them.
//
// Computed in float32, rounded to the tensor's type wherever transformers rounds. A row's bits depend on that row alone: a sum
// goes by lane, in a fixed number of chains, then by a fixed tree; everything else is elementwise. Compiled with
// -ffp-contract=off, as cpu_attention.cpp is.

#include "cpu_kernels.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // values under which a second thread costs more than it saves
constexpr int CHAINS = 4;

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

// Rotates the first 2 * half values of a head, by halves; what follows is copied. `out` may be x.
template <class T>
void rotate_head(const T* x, const float* cos, const float* signed_sin, T* out, int half, int head_dim) {
  for_vectors(half, [&](int d, auto at) {
    const Vec low = at.get(x + d), high = at.get(x + half + d);
    at.put(out + d, low * at.get(cos + d) + high * at.get(signed_sin + d));
    at.put(out + half + d, high * at.get(cos + half + d) + low * at.get(signed_sin + half + d));
  });
  if (out != x) std::memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

template <class Run> void for_rows(int64_t num_rows, int64_t width, int num_threads, Run run) {
  in_team(num_rows * width > GRAIN ? num_threads : 1, [&](Member& member) { member.split(num_rows, run); });
}

template <class T> T* head_of(const PhloemRows& rows, int64_t row, int head) {
  return static_cast<T*>(rows.data) + row * rows.row_stride + head * rows.width;
}

}  // namespace

void phloem::add_norm(const PhloemRows& hidden, const void* delta, const void* weight, const PhloemRows& out, float eps,
                      bool is_bf16, int64_t row) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    for (int head = 0; head < hidden.num_heads; head++) {
      const int64_t at = (row * hidden.num_heads + head) * hidden.width;
      add_norm_row(head_of<T>(hidden, row, head), delta ? static_cast<const T*>(delta) + at : nullptr,
                   static_cast<const T*>(weight), head_of<T>(out, row, head), hidden.width, eps);
    }
  };
  is_bf16 ? run(bf16{}) : run(0.0f);
}

void phloem::rotate(const PhloemRows& x, int64_t position, const PhloemRotary& rotary, const PhloemRows& out, bool is_bf16,
                    int64_t row) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const int64_t table = position * rotary.rotary_dim;
    for (int head = 0; head < x.num_heads; head++)
      rotate_head(head_of<T>(x, row, head), rotary.cos + table, rotary.signed_sin + table, head_of<T>(out, row, head),
                  rotary.rotary_dim / 2, x.width);
  };
  is_bf16 ? run(bf16{}) : run(0.0f);
}

extern "C" {

// The results of the next three are contiguous.
void phloem_add_norm(const PhloemRows* hidden, const void* delta, const void* weight, void* out, float eps, int32_t is_bf16,
                     int32_t num_threads) {
  const int64_t size = int64_t(hidden->num_heads) * hidden->width;
  const PhloemRows results{out, hidden->num_rows, size, hidden->num_heads, hidden->width};
  for_rows(hidden->num_rows, size, num_threads,
           [&](int64_t row) { add_norm(*hidden, delta, weight, results, eps, is_bf16, row); });
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

// Rotates every head of x by its token's position. All positions must have a place in the tables.
void phloem_rotate(const PhloemRows* x, const int64_t* positions, const PhloemRotary* rotary, void* out, int32_t is_bf16,
                   int32_t num_threads) {
  const int64_t size = int64_t(x->num_heads) * x->width;
  const PhloemRows results{out, x->num_rows, size, x->num_heads, x->width};
  for_rows(x->num_rows, size, num_threads,
           [&](int64_t row) { rotate(*x, positions[row], *rotary, results, is_bf16, row); });
}

// The first position that has no place in a table of `max_position` rows, or -1. A negative one is told as max_position.
int64_t phloem_position_beyond(const int64_t* positions, int64_t count, int64_t max_position) {
  for (int64_t i = 0; i < count; i++)
    if (positions[i] < 0 || positions[i] >= max_position) return positions[i] < 0 ? max_position : positions[i];
  return -1;
}
}
