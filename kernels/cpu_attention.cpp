// Attention over paged KV on the CPU: one definition of the arithmetic, several code paths.
//
// The KV of a path is cut in spans of SPAN keys at absolute positions. For one query row and one span, from scratch:
//
//   score  s[n] = scale * (sum over d, ascending, of q[d] * k[n][d])        lanes are keys, one chain of FMA per key
//   cap    s[n] = cap * tanh(s[n] / cap)
//   m = max s[n],  p[n] = exp(s[n] - m),  l = sum p[n]                      l: by lane, then a fixed tree over lanes
//   O[d] = sum over n, ascending, of p[n] * v[n][d]                         lanes are dims, one chain of FMA per dim
//
// and (m, l, O) of the spans are merged in span order. Masked keys are left out of every sum, never multiplied by zero,
// so unwritten memory can't leak in. None of this mentions how many rows run together (register blocks of 1 to MAX_ROWS
// rows do the same chains side by side), which thread runs a span, or where blocks lie: a row's bits can't depend on it.
// The file is compiled with -ffp-contract=off: products and sums fuse where `fma` is written, nowhere else.
//
// On machines with AVX512-BF16 and bf16 queries and keys, the score's chain is over pairs of dims (VDPBF16PS).

#include "cpu_vectors.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

constexpr int SPAN = 256;    // keys per partial result
constexpr int PANEL = 64;    // keys whose transposed copy fits the first-level cache; a multiple of every block size
constexpr int TILE = 64;     // query rows (tokens * heads of one KV head) per work item, at most

// Transposed copy of PANEL key rows. panel[d][key] for float; with Dot, panel[d / 2][key] of bf16 pairs.
template <class T, bool Dot>
void pack_keys(const T* const* rows, const T* const* next, int head_dim, float* panel) {
  const int num_words = head_dim * int(sizeof(T)) / 4;
  for (int key = 0; key < PANEL; key += LANES) {
    for (int word = 0; word < num_words; word += LANES) {
      UVec v[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        // a line or less at a time: a burst of prefetches fills the miss buffers, and then waits like loads do
        __builtin_prefetch(next[key + i] + word * 4 / int(sizeof(T)));
        v[i] = load_words(rows[key + i], word, num_words);
      }
      transpose<1>(v);
      const int count = num_words - word < LANES ? num_words - word : LANES;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        if (i >= count) break;
        if constexpr (sizeof(T) == 4 || Dot) {
          store(panel + (word + i) * PANEL + key, v[i]);
        } else {  // a word holds dims 2i (low half) and 2i + 1
          store(panel + (word + i) * 2 * PANEL + key, v[i] << 16);
          store(panel + ((word + i) * 2 + 1) * PANEL + key, v[i] & 0xffff0000u);
        }
      }
    }
  }
}

inline Vec score_step(Vec sum, const float* q, Vec k, std::false_type) { return fma(splat(*q), k, sum); }
inline Vec score_step(Vec sum, const float* q, Vec k, std::true_type) {
#if defined(__AVX512BF16__)
  const __m512i pair = _mm512_set1_epi32(load_as<int32_t>(q));
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)(__m512)k);
#else
  (void)q, (void)k;
  return sum;
#endif
}

// Unscaled scores of M query rows against a panel: q[m * q_stride + step], out[m * SPAN + key].
template <int M, bool Dot>
void score_rows(const float* q, int q_stride, const float* panel, int num_steps, float* out) {
  for (int key = 0; key < PANEL; key += NUM_VECTORS * LANES) {
    Vec sum[M][NUM_VECTORS] = {};
    for (int step = 0; step < num_steps; step++) {
      Vec k[NUM_VECTORS];
      for (int j = 0; j < NUM_VECTORS; j++) k[j] = load(panel + step * PANEL + key + j * LANES);
      for (int m = 0; m < M; m++)
        for (int j = 0; j < NUM_VECTORS; j++)
          sum[m][j] = score_step(sum[m][j], q + m * q_stride + step, k[j], std::bool_constant<Dot>{});
    }
    for (int m = 0; m < M; m++)
      for (int j = 0; j < NUM_VECTORS; j++) store(out + m * SPAN + key + j * LANES, sum[m][j]);
  }
}

// O[m][d] += sum over keys [begin, end) of p[m * SPAN + key] * v[key][d], for N vectors of dims.
template <int M, int N, class T>
void add_values(const float* p, const T* const* v, const T* const* next, int begin, int end, int dim, float* out,
                int out_stride) {
  Vec sum[M][N];
  for (int m = 0; m < M; m++)
    for (int j = 0; j < N; j++) sum[m][j] = load(out + m * out_stride + dim + j * LANES);
  for (int key = begin; key < end; key++) {
    Vec x[N];
    for (int j = 0; j < N; j++) x[j] = load(v[key] + dim + j * LANES);
    for (int j = 0; j < N; j += 64 / LANES / int(sizeof(T))) __builtin_prefetch(next[key] + dim + j * LANES);
    for (int m = 0; m < M; m++)
      for (int j = 0; j < N; j++) sum[m][j] = fma(splat(p[m * SPAN + key]), x[j], sum[m][j]);
  }
  for (int m = 0; m < M; m++)
    for (int j = 0; j < N; j++) store(out + m * out_stride + dim + j * LANES, sum[m][j]);
}

template <int M, class T>
void add_all_dims(const float* p, const T* const* v, const T* const* next, int begin, int end, int padded_dim, float* out) {
  if (begin >= end) return;
  int dim = 0;
  for (; dim + NUM_VECTORS * LANES <= padded_dim; dim += NUM_VECTORS * LANES)
    add_values<M, NUM_VECTORS>(p, v, next, begin, end, dim, out, padded_dim);
  for (; dim < padded_dim; dim += LANES) add_values<M, 1>(p, v, next, begin, end, dim, out, padded_dim);
}

// Calls run(constant<M>, first row) over rows [row, end) in blocks of MAX_ROWS, then of what is left.
template <int M = MAX_ROWS, class Run> inline void in_row_blocks(int row, int end, Run run) {
  for (; row + M <= end; row += M) run(std::integral_constant<int, M>{}, row);
  if constexpr (M > 1) in_row_blocks<M - 1>(row, end, run);
}

}  // namespace

extern "C" {

// One call's arguments; the same fields in the same order are in cpu_native.py. Work items are tiles: up to TILE query
// rows of one plan row and one KV head, where query row r is token r / group, head r % group of the group.
struct PhloemAttention {
  const void* kv;               // [num_blocks, 2, block_size, num_kv_heads, head_dim]
  const void* q;                // [num_tokens, num_q_heads, head_dim]
  void* out;                    // like q
  const int32_t* qo_indptr;     // [num_rows + 1]
  const int32_t* kv_indptr;     // [num_rows + 1]
  const int32_t* kv_indices;    // [kv_indptr[num_rows]]
  const int32_t* kv_lens;       // [num_rows]
  const int32_t* tile_row;      // [num_tiles] plan row
  const int32_t* tile_begin;    // [num_tiles] first query row
  const int32_t* tile_count;    // [num_tiles] query rows
  const int64_t* tile_partial;  // [num_tiles + 1] partial results before the tile: sum of tile_count * spans
  const int32_t* item_tile;     // [num_items] where the spans of a tile are shared out to threads
  const int32_t* item_span;     // [num_items]
  float* partials;              // [num_kv_heads][tile_partial[num_tiles]][phloem_partial_floats(head_dim)]
  float* scratch;               // [num_threads][phloem_scratch_floats(head_dim)]
  int64_t num_tiles;
  int64_t num_items;            // 0: a thread runs all spans of a tile
  int64_t window;               // 0: none
  int32_t block_size, num_q_heads, num_kv_heads, head_dim;
  int32_t kv_is_bf16, q_is_bf16, num_threads;
  float scale, soft_cap;        // soft_cap 0: none
};
}

namespace {

inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

struct Scratch {
  float *q, *scores, *panel, *values, *span_out, *merged_out, *span_max, *span_sum, *merged_max, *merged_sum;

  Scratch(float* base, int dim) {
    auto take = [&](int count) { float* p = base; base += count; return p; };
    q = take(TILE * dim), span_out = take(TILE * dim), merged_out = take(TILE * dim);
    panel = take(PANEL * dim), values = take(PANEL * dim), scores = take(TILE * SPAN);
    span_max = take(TILE), span_sum = take(TILE), merged_max = take(TILE), merged_sum = take(TILE);
  }
  static int64_t floats(int dim) { return int64_t(dim) * (3 * TILE + 2 * PANEL) + TILE * (SPAN + 4); }
};

struct Visible { int begin, end; };  // half-open, as offsets into a span or a panel

// One work item: query rows of one plan row and one KV head.
template <class T, class Q, bool Dot> struct Tile {
  const PhloemAttention& a;
  const int tile, head, row, first, count, group, dim;
  const int64_t kv_len, start;
  const int32_t* const blocks;
  const Scratch s;
  Visible visible[TILE];  // of the current span
  bool is_merged[TILE] = {};

  Tile(const PhloemAttention& args, float* scratch, int tile_index, int kv_head)
      : a(args), tile(tile_index), head(kv_head), row(a.tile_row[tile]), first(a.tile_begin[tile]),
        count(a.tile_count[tile]), group(a.num_q_heads / a.num_kv_heads), dim(padded(a.head_dim)),
        kv_len(a.kv_lens[row]), start(kv_len - (a.qo_indptr[row + 1] - a.qo_indptr[row])),
        blocks(a.kv_indices + a.kv_indptr[row]), s(scratch, dim) {}

  int64_t position(int m) const { return start + (first + m) / group; }
  int64_t first_span() const { return a.window && position(0) >= a.window ? (position(0) - a.window + 1) / SPAN : 0; }
  int64_t end_span() const { return position(count - 1) / SPAN + 1; }
  int64_t query_offset(int m) const {
    const int64_t token = a.qo_indptr[row] + (first + m) / group;
    return (token * a.num_q_heads + head * group + (first + m) % group) * a.head_dim;
  }
  float* partial(int64_t span, int m) const {
    const int64_t slot = head * a.tile_partial[a.num_tiles] + a.tile_partial[tile] + span * count + m;
    return a.partials + slot * (dim + 2);
  }

  void load_queries() {
    for (int m = 0; m < count; m++) {
      const Q* q = static_cast<const Q*>(a.q) + query_offset(m);
      if constexpr (Dot) std::memcpy(s.q + m * dim, q, a.head_dim * sizeof(Q));
      else for (int d = 0; d < a.head_dim; d++) s.q[m * dim + d] = widen(q[d]);
    }
  }

  void look(int64_t span) {
    for (int m = 0; m < count; m++) {
      const int64_t end = position(m) + 1 - span * SPAN, begin = a.window ? end - a.window : 0;
      visible[m] = {int(begin < 0 ? 0 : begin > SPAN ? SPAN : begin), int(end < 0 ? 0 : end > SPAN ? SPAN : end)};
    }
  }

  // Pointers to the rows of keys (which = 0) or values (1) of the panel at `key`; beyond the KV, its last row again.
  void locate(int64_t key, int which, const T** rows) const {
    const int64_t row_size = int64_t(a.num_kv_heads) * a.head_dim, block_rows = a.block_size * row_size;
    const T* base = static_cast<const T*>(a.kv) + which * block_rows + int64_t(head) * a.head_dim;
    for (int i = 0; i < PANEL; i += a.block_size) {
      const int64_t begin = key + i < kv_len ? key + i : (kv_len - 1) / a.block_size * a.block_size;
      const T* p = base + 2 * block_rows * blocks[begin / a.block_size];
      const int64_t last = kv_len - 1 - begin;
      for (int j = 0; j < a.block_size; j++) rows[i + j] = p + (j < last ? j : last) * row_size;
    }
  }

  void score_span(int64_t span, int begin, int end) {
    const T *rows[PANEL], *next[PANEL];
    locate(span * SPAN + begin, 0, rows);
    for (int key = begin; key < end; key += PANEL) {
      const bool is_last = key + PANEL >= end;
      locate(span * SPAN + (is_last ? begin : key + PANEL), is_last, next);
      pack_keys<T, Dot>(rows, next, a.head_dim, s.panel);
      in_row_blocks(0, count, [&](auto m_constant, int m) {
        score_rows<m_constant(), Dot>(s.q + m * dim, dim, s.panel, Dot ? a.head_dim / 2 : a.head_dim,
                                      s.scores + m * SPAN + key);
      });
      std::memcpy(rows, next, sizeof rows);
    }
  }

  // Scores of one row become weights, its maximum and its sum.
  void weigh(int m) {
    IVec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Vec hidden = splat(-INFINITY);
    const auto [begin, end] = visible[m];
    float* x = s.scores + m * SPAN;
    Vec highest = hidden, sum = {};
    for (int key = begin / LANES * LANES; key < end; key += LANES) {
      Vec score = load(x + key) * a.scale;
      if (a.soft_cap > 0) score = tanh(score / a.soft_cap) * a.soft_cap;
      score = select((lane + key >= begin) & (lane + key < end), score, hidden);
      highest = select(score > highest, score, highest);
      store(x + key, score);
    }
    const float maximum = reduce(highest, [](float p, float q) { return p > q ? p : q; });
    for (int key = begin / LANES * LANES; key < end; key += LANES) {
      const Vec weight = exp_negative(load(x + key) - maximum);
      sum += weight;
      store(x + key, weight);
    }
    s.span_max[m] = maximum;
    s.span_sum[m] = reduce(sum, [](float p, float q) { return p + q; });
  }

  // Adds one panel's weighted values. Rows of a block run together over the keys that all of them see, and alone over
  // those before and after: a key that a row doesn't see is never touched for it.
  template <class V> void add_panel(int key, const V* const* v, const V* const* next) {
    auto clip = [&](int x) { return x < key ? 0 : x > key + PANEL ? PANEL : x - key; };
    in_row_blocks(0, count, [&](auto m_constant, int m) {
      constexpr int M = m_constant();
      const int begin = clip(visible[m + M - 1].begin), first_end = clip(visible[m].end);
      const int end = first_end < begin ? begin : first_end;
      const float* p = s.scores + m * SPAN + key;
      float* out = s.span_out + m * dim;
      for (int r = 0; r < M; r++) {
        const int row_end = clip(visible[m + r].end);
        add_all_dims<1>(p + r * SPAN, v, next, clip(visible[m + r].begin), row_end < begin ? row_end : begin, dim, out + r * dim);
      }
      add_all_dims<M>(p, v, next, begin, end, dim, out);
      for (int r = 0; r < M; r++)
        add_all_dims<1>(p + r * SPAN, v, next, end, clip(visible[m + r].end), dim, out + r * dim);
    });
  }

  void add_span(int64_t span, int begin, int end) {
    const T *rows[PANEL], *next[PANEL];
    const float* wide[PANEL];
    for (int i = 0; i < PANEL; i++) wide[i] = s.values + i * dim;
    // a few rows read values where they are; many rows, or dims that fill no vector, a widened copy
    const bool copies = dim != a.head_dim || (sizeof(T) < 4 && count > MAX_ROWS);
    locate(span * SPAN + begin, 1, rows);
    for (int key = begin; key < end; key += PANEL) {
      const bool is_last = key + PANEL >= end;
      locate(is_last ? (span + 1) * SPAN : span * SPAN + key + PANEL, !is_last, next);
      if (copies) {
        for (int i = 0; i < PANEL; i++) {
          prefetch(next[i], a.head_dim * sizeof(T));
          for (int d = 0; d < dim; d++) s.values[i * dim + d] = d < a.head_dim ? widen(rows[i][d]) : 0.0f;
        }
        add_panel(key, wide, wide);
      } else {
        add_panel(key, rows, next);
      }
      std::memcpy(rows, next, sizeof rows);
    }
  }

  void run_span(int64_t span) {
    look(span);
    // positions rise with rows: the first row sees the first key, the last row the last
    const int begin = visible[0].begin / PANEL * PANEL, end = visible[count - 1].end;
    score_span(span, begin, end);
    for (int m = 0; m < count; m++) weigh(m);
    std::memset(s.span_out, 0, sizeof(float) * count * dim);
    add_span(span, begin, end);
  }

  void merge(int m, float maximum, float sum, const float* out) {
    float* merged = s.merged_out + m * dim;
    if (!is_merged[m]) {
      is_merged[m] = true;
      s.merged_max[m] = maximum, s.merged_sum[m] = sum;
      std::memcpy(merged, out, sizeof(float) * dim);
      return;
    }
    const float top = s.merged_max[m] > maximum ? s.merged_max[m] : maximum;
    const float keep = exp_negative(s.merged_max[m] - top), add = exp_negative(maximum - top);
    s.merged_max[m] = top;
    s.merged_sum[m] = std::fma(sum, add, s.merged_sum[m] * keep);
    for (int d = 0; d < dim; d += LANES)
      store(merged + d, fma(load(out + d), splat(add), load(merged + d) * keep));
  }

  void merge_span() {
    for (int m = 0; m < count; m++)
      if (visible[m].begin < visible[m].end) merge(m, s.span_max[m], s.span_sum[m], s.span_out + m * dim);
  }

  void write() const {
    for (int m = 0; m < count; m++) {
      Q* out = static_cast<Q*>(a.out) + query_offset(m);
      for (int d = 0; d < a.head_dim; d++) narrow(s.merged_out[m * dim + d] / s.merged_sum[m], out + d);
    }
  }

  void run_whole() {
    load_queries();
    for (int64_t span = first_span(); span < end_span(); span++) run_span(span), merge_span();
    write();
  }

  void run_part(int64_t span) {
    if (span < first_span()) return;
    load_queries();
    run_span(span);
    for (int m = 0; m < count; m++) {
      float* to = partial(span, m);
      to[0] = s.span_max[m], to[1] = s.span_sum[m];
      std::memcpy(to + 2, s.span_out + m * dim, sizeof(float) * dim);
    }
  }

  void run_merge() {
    for (int64_t span = first_span(); span < end_span(); span++) {
      look(span);
      for (int m = 0; m < count; m++) {
        const float* from = partial(span, m);
        if (visible[m].begin < visible[m].end) merge(m, from[0], from[1], from + 2);
      }
    }
    write();
  }
};

#if defined(_OPENMP)
inline int thread_number() { return omp_get_thread_num(); }
#else
inline int thread_number() { return 0; }
#endif

template <class T, class Q, bool Dot> void attend(const PhloemAttention& a) {
  using Item = Tile<T, Q, Dot>;
  const int64_t num_tiles = a.num_tiles * a.num_kv_heads, num_parts = a.num_items * a.num_kv_heads;
  const int64_t scratch_size = Scratch::floats(padded(a.head_dim));
#pragma omp parallel num_threads(a.num_threads) if (num_tiles + num_parts > 1)
  {
    float* scratch = a.scratch + scratch_size * thread_number();
    if (!num_parts) {
      // from the end: the last tiles of a prompt see the most keys, and a long item should not be the last to start
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = num_tiles - 1; i >= 0; i--)
        Item(a, scratch, int(i / a.num_kv_heads), int(i % a.num_kv_heads)).run_whole();
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_parts; i++) {
        const int64_t item = i / a.num_kv_heads;
        Item(a, scratch, a.item_tile[item], int(i % a.num_kv_heads)).run_part(a.item_span[item]);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_tiles; i++)
        Item(a, scratch, int(i / a.num_kv_heads), int(i % a.num_kv_heads)).run_merge();
    }
  }
}

}  // namespace

extern "C" {

int64_t phloem_scratch_floats(int32_t head_dim) { return Scratch::floats(padded(head_dim)); }
int64_t phloem_partial_floats(int32_t head_dim) { return padded(head_dim) + 2; }
int32_t phloem_tile_rows() { return TILE; }
int32_t phloem_span_keys() { return SPAN; }

void phloem_attend(const PhloemAttention* a) {
#if defined(__AVX512BF16__)
  constexpr bool DOT = true;
#else
  constexpr bool DOT = false;
#endif
  if (a->kv_is_bf16) a->q_is_bf16 ? attend<bf16, bf16, DOT>(*a) : attend<bf16, float, false>(*a);
  else a->q_is_bf16 ? attend<float, bf16, false>(*a) : attend<float, float, false>(*a);
}

// Copies each token's keys and values, row_bytes each, to its slot. Slots are not checked here: the plan was.
void phloem_append(char* kv, const char* k, const char* v, const int64_t* slots, int64_t num_tokens,
                   int32_t block_size, int64_t row_bytes) {
  for (int64_t i = 0; i < num_tokens; i++) {
    char* to = kv + (slots[i] / block_size * 2 * block_size + slots[i] % block_size) * row_bytes;
    std::memcpy(to, k + i * row_bytes, row_bytes);
    std::memcpy(to + block_size * row_bytes, v + i * row_bytes, row_bytes);
  }
}
}
