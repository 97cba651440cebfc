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
//
// That freedom is what the work is cut by. A tile is a set of query rows that read the same blocks: those of one plan row, or,
// over a prefix that many plan rows share, those of all of them, so that a shared key is loaded and packed once. First come the
// items, single spans of a tile, whose partial results are kept; then each plan row's own tiles go over their spans in order
// and merge, taking what is kept and computing the rest.
// The file is compiled with -ffp-contract=off: products and sums fuse where `fma` is written, nowhere else.
//
// On machines with AVX512-BF16 and bf16 queries and keys, the score's chain is over pairs of dims (VDPBF16PS). On machines with
// AMX, such a span is computed in tiles of 16 rows, by an arithmetic of its own: see cpu_attention_amx.h.

#include <algorithm>

#include "cpu_attention_amx.h"
#include "cpu_kernels.h"
#include "cpu_vectors.h"


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
  // all loops over M and N are unrolled, or the sums live in memory
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) sum[m][j] = load(out + m * out_stride + dim + j * LANES);
  for (int key = begin; key < end; key++) {
    Vec x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) x[j] = load(v[key] + dim + j * LANES);
    for (int j = 0; j < N; j += 64 / LANES / int(sizeof(T))) __builtin_prefetch(next[key] + dim + j * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[m][j] = fma(splat(p[m * SPAN + key]), x[j], sum[m][j]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
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

}  // namespace

namespace {

inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// How a span is computed: by lanes of floats, by lanes of bf16 pairs, or by AMX tiles of them.
enum Arithmetic { FLOATS, PAIRS, TILES };

struct Scratch {
  float *span_out, *merged_out, *span_max, *span_sum, *merged_max, *merged_sum;
  float *tiles, *q, *scores, *panel, *values;  // what TILES uses lies where the others have the rest

  Scratch(float* base, int dim) {
    auto take = [&](int count) { float* p = base; base += count; return p; };
    span_out = take(TILE * dim), merged_out = take(TILE * dim);
    span_max = take(TILE), span_sum = take(TILE), merged_max = take(TILE), merged_sum = take(TILE);
    tiles = q = take(TILE * dim);
    panel = take(PANEL * dim), values = take(PANEL * dim), scores = take(TILE * SPAN);
  }
  static int64_t floats(int dim) {
    int64_t rest = int64_t(dim) * (TILE + 2 * PANEL) + TILE * SPAN;
#if PHLOEM_HAS_AMX
    rest = std::max(rest, AmxSpan::scratch_floats(TILE, SPAN, dim));
#endif
    return int64_t(dim) * 2 * TILE + TILE * 4 + rest;
  }
};

// Query rows of one KV head that read the same blocks.
template <class T, class Q, Arithmetic A> struct Tile {
  const PhloemAttention& a;
  const int tile, head, count, group, dim;
  const int64_t kv_len;
  const int32_t* const blocks;
  const Scratch s;
  int64_t position[TILE];
  int token[TILE], lane[TILE];  // of each query row: its token, and its head within the group
  Visible visible[TILE];  // of the current span
  bool is_merged[TILE] = {};

  Tile(const PhloemAttention& args, float* scratch, int tile_index, int kv_head)
      : a(args), tile(tile_index), head(kv_head), count(a.tile_count[tile]), group(a.num_q_heads / a.num_kv_heads),
        dim(padded(a.head_dim)), kv_len(a.kv_lens[a.tile_row[tile]]),
        blocks(a.kv_indices + a.kv_indptr[a.tile_row[tile]]), s(scratch, dim) {
    const int32_t* rows = a.query_rows + a.tile_begin[tile];
    for (int m = 0; m < count; m++) {
      token[m] = rows[m] / group, lane[m] = rows[m] % group;
      position[m] = a.positions[token[m]];
    }
  }

  // Spans in which some row sees a key. The rows of one plan row stand in order; those of several need not.
  int64_t first_span() const {
    const int64_t least = *std::min_element(position, position + count);
    return a.window && least >= a.window ? (least - a.window + 1) / SPAN : 0;
  }
  int64_t end_span() const { return *std::max_element(position, position + count) / SPAN + 1; }
  const Q* query(int m) const {
    return static_cast<const Q*>(a.q) + token[m] * a.q_stride + (head * group + lane[m]) * a.head_dim;
  }
  float* partial(int64_t span, int m) const {
    const int64_t place = head * a.token_partial[a.num_tokens] + a.token_partial[token[m]] + span;
    return a.partials + (place * group + lane[m]) * (dim + 2);
  }

  void load_queries() {
#if PHLOEM_HAS_AMX
    if constexpr (A == TILES)
      return in_tiles().load_queries(count, [&](int m) { return query(m); });
#endif
    for (int m = 0; m < count; m++) {
      const Q* q = query(m);
      if constexpr (A == PAIRS) std::memcpy(s.q + m * dim, q, a.head_dim * sizeof(Q));
      else for (int d = 0; d < a.head_dim; d++) s.q[m * dim + d] = widen(q[d]);
    }
  }

  // Returns the keys that some row sees, as offsets into the span.
  Visible look(int64_t span) {
    Visible any = {SPAN, 0};
    for (int m = 0; m < count; m++) {
      const int64_t end = position[m] + 1 - span * SPAN, begin = a.window ? end - a.window : 0;
      visible[m] = {int(begin < 0 ? 0 : begin > SPAN ? SPAN : begin), int(end < 0 ? 0 : end > SPAN ? SPAN : end)};
      if (visible[m].begin >= visible[m].end) continue;
      any = {std::min(any.begin, visible[m].begin), std::max(any.end, visible[m].end)};
    }
    return any;
  }

  // Pointers to the rows of keys (which = 0) or values (1) of the panel at `key`; beyond the KV, its last row again.
  void locate(int64_t key, int which, const T** at) const {
    const int64_t row_size = int64_t(a.num_kv_heads) * a.head_dim, block_rows = a.block_size * row_size;
    const T* base = static_cast<const T*>(a.kv) + which * block_rows + int64_t(head) * a.head_dim;
    for (int i = 0; i < PANEL; i += a.block_size) {
      const int64_t begin = key + i < kv_len ? key + i : (kv_len - 1) / a.block_size * a.block_size;
      const T* p = base + 2 * block_rows * blocks[begin / a.block_size];
      const int64_t last = kv_len - 1 - begin;
      for (int j = 0; j < a.block_size; j++) at[i + j] = p + (j < last ? j : last) * row_size;
    }
  }

  void score_span(int64_t span, int begin, int end) {
    const T *keys[PANEL], *next[PANEL];
    locate(span * SPAN + begin, 0, keys);
    for (int key = begin; key < end; key += PANEL) {
      const bool is_last = key + PANEL >= end;
      locate(span * SPAN + (is_last ? begin : key + PANEL), is_last, next);
      pack_keys<T, A == PAIRS>(keys, next, a.head_dim, s.panel);
      in_row_blocks<MAX_ROWS>(0, count, [&](auto m_constant, int m) {
        score_rows<m_constant(), A == PAIRS>(s.q + m * dim, dim, s.panel, A == PAIRS ? a.head_dim / 2 : a.head_dim,
                                             s.scores + m * SPAN + key);
      });
      std::memcpy(keys, next, sizeof keys);
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
      if (a.soft_cap > 0) score = capped(score, a.soft_cap);
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
    in_row_blocks<MAX_ROWS>(0, count, [&](auto m_constant, int m) {
      constexpr int M = m_constant();
      int begin = 0, end = PANEL;
      for (int r = 0; r < M; r++) begin = std::max(begin, clip(visible[m + r].begin)), end = std::min(end, clip(visible[m + r].end));
      if (end < begin) end = begin;
      const float* p = s.scores + m * SPAN + key;
      float* out = s.span_out + m * dim;
      for (int r = 0; r < M; r++) {
        const int row_end = clip(visible[m + r].end);
        add_all_dims<1>(p + r * SPAN, v, next, clip(visible[m + r].begin), std::min(row_end, begin), dim, out + r * dim);
      }
      add_all_dims<M>(p, v, next, begin, end, dim, out);
      for (int r = 0; r < M; r++)
        add_all_dims<1>(p + r * SPAN, v, next, end, clip(visible[m + r].end), dim, out + r * dim);
    });
  }

  void add_span(int64_t span, int begin, int end) {
    const T *values[PANEL], *next[PANEL];
    const float* wide[PANEL];
    for (int i = 0; i < PANEL; i++) wide[i] = s.values + i * dim;
    // a few rows read values where they are; many rows, or dims that fill no vector, a widened copy
    const bool copies = dim != a.head_dim || (sizeof(T) < 4 && count > MAX_ROWS);
    locate(span * SPAN + begin, 1, values);
    for (int key = begin; key < end; key += PANEL) {
      const bool is_last = key + PANEL >= end;
      locate(is_last ? (span + 1) * SPAN : span * SPAN + key + PANEL, !is_last, next);
      if (copies) {
        for (int i = 0; i < PANEL; i++) {
          prefetch(next[i], a.head_dim * sizeof(T));
          widen_row(values[i], a.head_dim, s.values + i * dim);
        }
        add_panel(key, wide, wide);
      } else {
        add_panel(key, values, next);
      }
      std::memcpy(values, next, sizeof values);
    }
  }

#if PHLOEM_HAS_AMX
  AmxSpan in_tiles() const { return AmxSpan(s.tiles, TILE, SPAN, dim, a.scale, a.soft_cap); }

  void run_span_in_tiles(int64_t span, Visible any) {
    const T *keys[SPAN], *next[SPAN], *values[SPAN];
    for (int key = any.begin / PANEL * PANEL; key < any.end; key += PANEL) {
      locate(span * SPAN + key, 0, keys + key);
      locate(span * SPAN + key, 1, values + key);
    }
    const bool has_next = (span + 1) * SPAN < kv_len;
    for (int key = 0; has_next && key < SPAN; key += PANEL) locate((span + 1) * SPAN + key, 0, next + key);
    const int64_t row_bytes = int64_t(a.num_kv_heads) * a.head_dim * sizeof(T);
    in_tiles().run({keys, values, has_next ? next : nullptr, row_bytes, a.block_size % TILE_ROWS == 0}, visible, count, any,
                   s.span_max, s.span_sum, s.span_out);
  }
#endif

  void run_span(int64_t span) {
    const Visible any = look(span);
    if (any.begin >= any.end) return;
#if PHLOEM_HAS_AMX
    if constexpr (A == TILES) return run_span_in_tiles(span, any);
#endif
    const int begin = any.begin / PANEL * PANEL;
    score_span(span, begin, any.end);
    for (int m = 0; m < count; m++) weigh(m);
    std::memset(s.span_out, 0, sizeof(float) * count * dim);
    add_span(span, begin, any.end);
  }

  void merge(int m, float maximum, float sum, const float* out) {
    float* merged = s.merged_out + m * dim;
    if (!is_merged[m]) {
      is_merged[m] = true;
      s.merged_max[m] = maximum, s.merged_sum[m] = sum;
      std::memcpy(merged, out, sizeof(float) * dim);
      return;
    }
    // one of the two factors is exp(0)
    const bool is_higher = maximum > s.merged_max[m];
    const float other = exp_negative(is_higher ? s.merged_max[m] - maximum : maximum - s.merged_max[m]);
    const float keep = is_higher ? other : 1.0f, add = is_higher ? 1.0f : other;
    if (is_higher) s.merged_max[m] = maximum;
    s.merged_sum[m] = std::fma(sum, add, s.merged_sum[m] * keep);
    for (int d = 0; d < dim; d += LANES)
      store(merged + d, fma(load(out + d), splat(add), load(merged + d) * keep));
  }

  void merge_computed() {
    for (int m = 0; m < count; m++)
      if (visible[m].begin < visible[m].end) merge(m, s.span_max[m], s.span_sum[m], s.span_out + m * dim);
  }

  void merge_kept(int64_t span) {
    look(span);
    for (int m = 0; m < count; m++) {
      const float* from = partial(span, m);
      if (visible[m].begin < visible[m].end) merge(m, from[0], from[1], from + 2);
    }
  }

  void write() const {
    for (int m = 0; m < count; m++) {
      Q* out = static_cast<Q*>(a.out) + (int64_t(token[m]) * a.num_q_heads + head * group + lane[m]) * a.head_dim;
      for (int d = 0; d < a.head_dim; d++) narrow(s.merged_out[m * dim + d] / s.merged_sum[m], out + d);
    }
  }

  // One item: a span's results, kept for the plan rows' own tiles.
  void keep(int64_t span) {
    load_queries();
    run_span(span);
    for (int m = 0; m < count; m++) {
      if (visible[m].begin >= visible[m].end) continue;
      float* to = partial(span, m);
      to[0] = s.span_max[m], to[1] = s.span_sum[m];
      std::memcpy(to + 2, s.span_out + m * dim, sizeof(float) * dim);
    }
  }

  void finish() {
    const int64_t end = end_span();
    if (a.tile_kept[tile] < end) load_queries();
    for (int64_t span = first_span(); span < end; span++) {
      if (span < a.tile_kept[tile]) merge_kept(span);
      else run_span(span), merge_computed();
    }
    write();
  }
};

struct NoTiles {};

template <class T, class Q, Arithmetic A> void attend_by(Member& member, const PhloemAttention& a) {
#if PHLOEM_HAS_AMX
  std::conditional_t<A == TILES, AmxTiles, NoTiles> registers;
#endif
  float* const scratch = a.scratch + Scratch::floats(padded(a.head_dim)) * member.index;
  auto tile = [&](int64_t index, int64_t i) { return Tile<T, Q, A>(a, scratch, int(index), int(i % a.num_kv_heads)); };
  if (a.num_items)
    member.share(a.num_items * a.num_kv_heads, [&](int64_t i) {
      tile(a.item_tile[i / a.num_kv_heads], i).keep(a.item_span[i / a.num_kv_heads]);
    });
  // from the end: the last tiles of a prompt see the most keys, and a long one should not be the last to start
  const int64_t num_tiles = a.num_tiles * a.num_kv_heads;
  member.share(num_tiles, [&](int64_t i) { tile((num_tiles - 1 - i) / a.num_kv_heads, num_tiles - 1 - i).finish(); });
}

}  // namespace

void phloem::attend(Member& member, const PhloemAttention& a) {
#if PHLOEM_HAS_AMX
  if (a.kv_is_bf16 && a.q_is_bf16 && a.head_dim % STEP == 0 && a.head_dim <= MAX_DIM && amx_is_allowed())
    return attend_by<bf16, bf16, TILES>(member, a);
#endif
#if defined(__AVX512BF16__)
  constexpr Arithmetic BF16 = PAIRS;
#else
  constexpr Arithmetic BF16 = FLOATS;
#endif
  if (a.kv_is_bf16) a.q_is_bf16 ? attend_by<bf16, bf16, BF16>(member, a) : attend_by<bf16, float, FLOATS>(member, a);
  else a.q_is_bf16 ? attend_by<float, bf16, FLOATS>(member, a) : attend_by<float, float, FLOATS>(member, a);
}

void phloem::append(const PhloemAppend& a, int64_t i) {
  const int64_t slot = a.slots[i], token = a.tokens ? a.tokens[i] : i;
  char* to = static_cast<char*>(a.kv) + (slot / a.block_size * 2 * a.block_size + slot % a.block_size) * a.row_bytes;
  std::memcpy(to, static_cast<const char*>(a.k) + token * a.stride_bytes, a.row_bytes);
  std::memcpy(to + a.block_size * a.row_bytes, static_cast<const char*>(a.v) + token * a.stride_bytes, a.row_bytes);
}

extern "C" {

int64_t phloem_scratch_floats(int32_t head_dim) { return Scratch::floats(padded(head_dim)); }
int64_t phloem_partial_floats(int32_t head_dim) { return padded(head_dim) + 2; }
int32_t phloem_tile_rows() { return TILE; }
int32_t phloem_span_keys() { return SPAN; }

void phloem_attend(const PhloemAttention* a) {
  const bool is_alone = (a->num_tiles + a->num_items) * a->num_kv_heads <= 1;
  in_team(is_alone ? 1 : a->num_threads, [&](Member& member) { attend(member, *a); });
}

void phloem_append(const PhloemAppend* a, int64_t num_slots) {
  for (int64_t i = 0; i < num_slots; i++) append(*a, i);
}
}
