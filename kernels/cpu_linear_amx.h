// The linear layers of cpu_linear.cpp with rows in bf16, on a processor that multiplies tiles (AMX). Weights in int8 become bf16, which
// holds them exactly, a stripe at a time.
//
// The arithmetic of an output is fixed, so a row has the same bits whatever rows stand beside it: from zero, its products
// are added by TDPBF16PS over 32 inputs at a time, ascending (within the 32 the instruction itself fixes the order); then
// it is scaled, if weights are int8; then the bias is added; then the sum is rounded, once. Which rows make a tile, and which thread has it, does not enter.
//
//             16 outputs  16 outputs     A step of the innermost loop: 32 rows, 32 outputs, 32 inputs. A tile of x is
//            +-----------+-----------+   16 rows of 64 bytes, read where it lies. A tile of W is 16 pairs of inputs by
//   16 rows  |   SUMS    | SUMS + 1  |   16 outputs; the two of a step stand together in memory, and those of the
//            +-----------+-----------+   next step behind them (`pack` in cpu_linear.py), so that a *stripe* of 32
//   16 rows  | SUMS + 2  | SUMS + 3  |   outputs is one stream.
//            +-----------+-----------+
//
// A stripe is read from memory once for all rows of a panel (as many rows as stay in the second-level cache), and while it
// is worked on, the next one of this thread is prefetched. With few rows that is all there is to do: the pace is memory's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "cpu_amx.h"
#include "cpu_kernels.h"
#include "cpu_vectors.h"

namespace {

constexpr int STRIPE = 32;                  // outputs
constexpr int64_t PANEL_BYTES = 768 << 10;  // of x
constexpr int64_t GRAIN = 1 << 20;          // products under which a second thread costs more than it saves

#if PHLOEM_HAS_AMX

constexpr int TILED_ROWS = 2 * TILE_ROWS;   // of a block
constexpr int HALF_STEP_BYTES = 1024;       // a tile of W
constexpr int STEP_BYTES = 2 * HALF_STEP_BYTES;
constexpr int LEAD_STEPS = 10;              // steps between a prefetch and its use, if rows are few
constexpr int SUMS = 0, ROWS = 4, OUTPUTS = 6;  // tile registers

struct Linear {
  const char* x;
  int64_t num_rows, row_bytes;
  const char* weight;
  const float *bias, *scale;
  void* out;
  int64_t out_stride;
  int32_t num_steps, out_features;
  bool is_int8;
  int step_bytes() const { return is_int8 ? STEP_BYTES / 2 : STEP_BYTES; }
};

// What becomes of 32 sums of a row: how many results, of which type; `kept` is a mask of them.
struct ToFloat {
  using T = float;
  static constexpr int COLUMNS = STRIPE;
  static void put(T* out, uint32_t kept, Vec low, Vec high) {
    _mm512_mask_storeu_ps(out, __mmask16(kept), (__m512)low);
    _mm512_mask_storeu_ps(out + LANES, __mmask16(kept >> LANES), (__m512)high);
  }
};
struct ToBf16 {
  using T = bf16;
  static constexpr int COLUMNS = STRIPE;
  static void put(T* out, uint32_t kept, Vec low, Vec high) {
    _mm512_mask_storeu_epi16(out, kept, round_to_bf16(low, high));
  }
};
struct ToGated {  // 16 gates, and what they gate; rounded wherever phloem_silu_and_mul rounds
  using T = bf16;
  static constexpr int COLUMNS = STRIPE / 2;
  static void put(T* out, uint32_t kept, Vec gate, Vec up) {
    const HVec values = round_to_bf16(rounded<bf16>(silu(rounded<bf16>(gate))) * rounded<bf16>(up));
    _mm256_mask_storeu_epi16(out, __mmask16(kept), (__m256i)values);
  }
};

// What to fetch during the steps of a block: of W `bytes` a step, from `first` and, after `turn` steps, from `then`.
struct Prefetch {
  const char *first, *then;
  int turn, bytes;
  void at(int step) const {
    const char* from = step < turn ? first + int64_t(step) * bytes : then + int64_t(step - turn) * bytes;
    for (int i = 0; i < bytes; i += TILE_BYTES) _mm_prefetch(from + i, _MM_HINT_T1);
  }
};

// The lines that results will be written to, two a step: those of this block, and with many steps of the blocks below it.
struct Results {
  const char* first;
  int64_t row_bytes;
  void fetch(int step) const {
    __builtin_prefetch(first + 2 * step * row_bytes, 1);
    __builtin_prefetch(first + (2 * step + 1) * row_bytes, 1);
  }
};

// Up to 32 rows (two tiles of them, or one) by a stripe of W; sums is [32][32].
template <bool IS_PAIR>
inline void multiply(const char* x, int64_t row_bytes, const char* stripe, int num_steps, Prefetch next, Results results,
                     float* sums) {
  tile_zero<SUMS>();
  tile_zero<SUMS + 1>();
  if (IS_PAIR) {
    tile_zero<SUMS + 2>();
    tile_zero<SUMS + 3>();
  }
  for (int step = 0; step < num_steps; step++) {
    tile_load<ROWS>(x + step * TILE_BYTES, row_bytes);
    tile_load_once<OUTPUTS>(stripe + int64_t(step) * STEP_BYTES, TILE_BYTES);
    tile_load_once<OUTPUTS + 1>(stripe + int64_t(step) * STEP_BYTES + HALF_STEP_BYTES, TILE_BYTES);
    tile_multiply<SUMS, ROWS, OUTPUTS>();
    tile_multiply<SUMS + 1, ROWS, OUTPUTS + 1>();
    if (IS_PAIR) {
      tile_load<ROWS + 1>(x + TILE_ROWS * row_bytes + step * TILE_BYTES, row_bytes);
      tile_multiply<SUMS + 2, ROWS + 1, OUTPUTS>();
      tile_multiply<SUMS + 3, ROWS + 1, OUTPUTS + 1>();
    }
    next.at(step);
    if (results.first) results.fetch(step);
  }
  constexpr int SUM_BYTES = STRIPE * sizeof(float);
  tile_store<SUMS>(sums, SUM_BYTES);
  tile_store<SUMS + 1>(sums + LANES, SUM_BYTES);
  if (IS_PAIR) {
    tile_store<SUMS + 2>(sums + TILE_ROWS * STRIPE, SUM_BYTES);
    tile_store<SUMS + 3>(sums + TILE_ROWS * STRIPE + LANES, SUM_BYTES);
  }
}

// A stripe of int8 weights as bf16.
class WideStripe {
 public:
  const char* of(const char* stripe, int num_steps) {
    const int64_t bytes = int64_t(num_steps) * STEP_BYTES;
    if (bytes > bytes_) {
      memory_.reset(new (std::align_val_t(TILE_BYTES)) char[bytes]);
      bytes_ = bytes;
    }
    for (int64_t at = 0; at < bytes; at += TILE_BYTES) {
      const Vec low = widened(stripe + at / 2), high = widened(stripe + at / 2 + LANES);
      store(memory_.get() + at, round_to_bf16(low, high));
    }
    return memory_.get();
  }

 private:
  struct Free { void operator()(char* p) const { ::operator delete[](p, std::align_val_t(TILE_BYTES)); } };
  std::unique_ptr<char, Free> memory_;
  int64_t bytes_ = 0;

  static Vec widened(const char* p) { return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p))); }
};

// One thread's part in a product.
template <class Result> class TileProduct {
 public:
  explicit TileProduct(const Linear& linear)
      : a(linear), num_stripes((linear.out_features + Result::COLUMNS - 1) / Result::COLUMNS),
        panel_rows(std::max<int64_t>(1, PANEL_BYTES / (int64_t(linear.num_steps) * TILE_BYTES * TILED_ROWS)) * TILED_ROWS),
        num_items((linear.num_rows + panel_rows - 1) / panel_rows * num_stripes) {}

  // Items (a panel of rows by a stripe), each claimed one ahead so that it can be prefetched.
  void run(Member& member) {
    AmxTiles tiles;
    set_rows(tiles, int(std::min<int64_t>(a.num_rows, TILED_ROWS)));
    static thread_local WideStripe wide;
    bool is_first = true;
    for (int64_t item = member.claim(), next; item < num_items; item = next) {
      next = member.claim();
      const char* stripe = a.is_int8 ? wide.of(stripe_of(item), a.num_steps) : stripe_of(item);
      run_item(tiles, item, stripe, next < num_items ? stripe_of(next) : nullptr, is_first);
      is_first = false;
    }
  }

 private:
  using T = typename Result::T;
  const Linear& a;
  const int64_t num_stripes, panel_rows, num_items;

  const char* stripe_of(int64_t item) const { return a.weight + item % num_stripes * a.num_steps * a.step_bytes(); }
  T* out_at(int64_t item, int64_t row) const {
    return static_cast<T*>(a.out) + row * a.out_stride + item % num_stripes * Result::COLUMNS;
  }

  // The first tile of a block has up to 16 rows, the second one those that are left.
  static void set_rows(AmxTiles& tiles, int num_rows) {
    const int upper = std::min(num_rows, TILE_ROWS), lower = std::max(1, num_rows - TILE_ROWS);
    tiles.set_rows({upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS});
  }

  void run_item(AmxTiles& tiles, int64_t item, const char* stripe, const char* next, bool is_first) {
    alignas(64) float sums[TILED_ROWS * STRIPE];
    const int64_t begin = item / num_stripes * panel_rows, end = std::min(a.num_rows, begin + panel_rows);
    const int num_blocks = int((end - begin + TILED_ROWS - 1) / TILED_ROWS);
    for (int block = 0; block < num_blocks; block++) {
      const int64_t row = begin + int64_t(block) * TILED_ROWS;
      const int num_rows = int(std::min<int64_t>(end - row, TILED_ROWS));
      const bool is_cut = num_rows < TILED_ROWS && a.num_rows > TILED_ROWS;
      const Prefetch fetch = to_prefetch(stripe, next, block, num_blocks, is_first);
      const Results results{num_blocks > 1 ? reinterpret_cast<const char*>(out_at(item, row)) : nullptr,
                            a.out_stride * int(sizeof(T))};
      const char* x = a.x + row * a.row_bytes;
      if (is_cut) set_rows(tiles, num_rows);
      if (num_rows > TILE_ROWS) multiply<true>(x, a.row_bytes, stripe, a.num_steps, fetch, results, sums);
      else multiply<false>(x, a.row_bytes, stripe, a.num_steps, fetch, results, sums);
      if (is_cut) set_rows(tiles, TILED_ROWS);
      write(sums, item, row, num_rows);
    }
  }

  // With one block of rows, a few steps ahead, running on into the next stripe; with more, the next stripe is spread over
  // them. A thread's first stripe has had nobody to fetch it. One in int8 has been read as a whole by now.
  Prefetch to_prefetch(const char* stripe, const char* next, int block, int num_blocks, bool is_first) const {
    const int lead = std::min(LEAD_STEPS, int(a.num_steps)), turn = a.num_steps - lead;
    if (a.is_int8) return to_prefetch_next(next, block, num_blocks);
    if (num_blocks == 1) return {stripe + lead * STEP_BYTES, next ? next : stripe, turn, STEP_BYTES};
    if (is_first && block == 0) return {stripe + lead * STEP_BYTES, stripe, turn, STEP_BYTES};
    return to_prefetch_next(next, is_first ? block - 1 : block, is_first ? num_blocks - 1 : num_blocks);
  }
  Prefetch to_prefetch_next(const char* next, int at, int num_blocks) const {
    const int step_bytes = a.step_bytes(), bytes = (step_bytes / num_blocks + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES;
    if (!next || at * bytes >= step_bytes) return {a.weight, a.weight, a.num_steps, 0};
    return {next + int64_t(at) * a.num_steps * bytes, next, a.num_steps, bytes};
  }

  void write(const float* sums, int64_t item, int64_t row, int num_rows) const {
    const int64_t stripe = item % num_stripes, left = a.out_features - stripe * Result::COLUMNS;
    const uint32_t kept = left >= STRIPE ? ~0u : (1u << left) - 1;
    const float* bias = a.bias ? a.bias + stripe * STRIPE : nullptr;
    const float* scale = a.scale ? a.scale + stripe * STRIPE : nullptr;
    const int64_t out_stride = a.out_stride;  // a copy, since the compiler must take `out` for a part of `a`
    T* out = out_at(item, row);
    for (int r = 0; r < num_rows; r++, out += out_stride) {
      Vec low = load(sums + r * STRIPE), high = load(sums + r * STRIPE + LANES);
      if (scale) low *= load(scale), high *= load(scale + LANES);
      if (bias) {
        low += load(bias);
        high += load(bias + LANES);
      }
      Result::put(out, kept, low, high);
    }
  }
};

inline void run_tiles(Member& member, const PhloemLinear& layer, const PhloemInput& x, const PhloemResult& out) {
  const Linear linear{static_cast<const char*>(x.data), x.num_rows, x.row_stride * 2, static_cast<const char*>(layer.weight),
                      layer.bias, layer.scale, out.data, out.row_stride, layer.in_features / STEP, layer.out_features, layer.format == INT8_TILES};
  if (layer.is_gated) TileProduct<ToGated>(linear).run(member);
  else if (out.is_bf16) TileProduct<ToBf16>(linear).run(member);
  else TileProduct<ToFloat>(linear).run(member);
}

#endif

}  // namespace
