// The linear layers of a decoder in bf16, on a processor that multiplies tiles (AMX): y = x W^T + b.
//
// The arithmetic of an output is fixed, so a row has the same bits whatever rows stand beside it: from zero, its products
// are added by TDPBF16PS over 32 inputs at a time, ascending (within the 32 the instruction itself fixes the order); then
// the bias is added; then the sum is rounded, once. Which rows make a tile, and which thread has it, does not enter.
//
//             16 outputs  16 outputs        A step of the innermost loop: 32 rows, 32 outputs, 32 inputs. A tile of x is
//            +-----------+-----------+      16 rows of 64 bytes, read where it lies. A tile of W is 16 pairs of inputs by
//   16 rows  |  SUMS_00  |  SUMS_01  |      16 outputs; the two of a step stand together in memory, and those of the
//            +-----------+-----------+      next step behind them (`pack` in cpu_linear.py), so that a *stripe* of 32
//   16 rows  |  SUMS_10  |  SUMS_11  |      outputs is one stream.
//            +-----------+-----------+
//
// A stripe is read from memory once for all rows of a panel (as many rows as stay in the second-level cache), and while it
// is worked on, the next one of this thread is prefetched. With few rows that is all there is to do: the pace is memory's.

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if HAS_TILES

constexpr int TILE_ROWS = 16, TILE_BYTES = 1024;
constexpr int STEP = 32;                     // inputs
constexpr int STRIPE = 32;                   // outputs
constexpr int STEP_BYTES = 2 * TILE_BYTES;   // of W
constexpr int LINE = 64;                     // bytes of a cache line, and of a tile's row
constexpr int LEAD = 6;                      // steps between a prefetch and its use, if rows are few
constexpr int64_t PANEL_BYTES = 768 << 10;   // of x
constexpr int64_t GRAIN = 256 << 10;         // bytes of W under which a second thread costs more than it saves

// Tile registers, as names for the preprocessor, since the compiler's own macros paste them into instructions.
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define ROWS_0 4
#define ROWS_1 5
#define OUTPUTS_0 6
#define OUTPUTS_1 7

struct Linear {
  const char* x;
  int64_t num_rows, row_bytes;
  const char* weight;
  const float* bias;
  void* out;
  int32_t num_steps, out_features, num_threads;
};

// Sets the shapes of the tile registers: the first row tile has up to 16 rows, the second one those that are left.
void configure(int num_rows) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  } shapes;
  const int first = std::min(num_rows, TILE_ROWS), second = std::max(1, num_rows - TILE_ROWS);
  const int rows[] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
  for (int tile = 0; tile < 8; tile++) {
    shapes.row_bytes[tile] = LINE;
    shapes.num_rows[tile] = uint8_t(rows[tile]);
  }
  __asm__ volatile("" ::"r"(&shapes) : "memory");  // GCC believes that the next line reads the first 8 bytes only
  _tile_loadconfig(&shapes);
}

// What to fetch during the steps of a block: `bytes` a step, from `first` and, after `turn` steps, from `then`.
struct Prefetch {
  const char *first, *then;
  int turn, bytes;
  void at(int step) const {
    const char* from = step < turn ? first + int64_t(step) * bytes : then + int64_t(step - turn) * bytes;
    for (int i = 0; i < bytes; i += LINE) _mm_prefetch(from + i, _MM_HINT_T1);
  }
};

// Up to 32 rows (two tiles of them, or one) by a stripe of W; sums is [32][32].
template <bool IS_PAIR>
inline void multiply(const char* x, int64_t row_bytes, const char* stripe, int num_steps, Prefetch next, float* sums) {
  _tile_zero(SUMS_00);
  _tile_zero(SUMS_01);
  if (IS_PAIR) {
    _tile_zero(SUMS_10);
    _tile_zero(SUMS_11);
  }
  for (int step = 0; step < num_steps; step++) {
    _tile_loadd(ROWS_0, x + step * LINE, row_bytes);
    _tile_loadd(OUTPUTS_0, stripe + int64_t(step) * STEP_BYTES, LINE);
    _tile_loadd(OUTPUTS_1, stripe + int64_t(step) * STEP_BYTES + TILE_BYTES, LINE);
    _tile_dpbf16ps(SUMS_00, ROWS_0, OUTPUTS_0);
    _tile_dpbf16ps(SUMS_01, ROWS_0, OUTPUTS_1);
    if (IS_PAIR) {
      _tile_loadd(ROWS_1, x + TILE_ROWS * row_bytes + step * LINE, row_bytes);
      _tile_dpbf16ps(SUMS_10, ROWS_1, OUTPUTS_0);
      _tile_dpbf16ps(SUMS_11, ROWS_1, OUTPUTS_1);
    }
    next.at(step);
  }
  constexpr int SUM_BYTES = STRIPE * sizeof(float);
  _tile_stored(SUMS_00, sums, SUM_BYTES);
  _tile_stored(SUMS_01, sums + 16, SUM_BYTES);
  if (IS_PAIR) {
    _tile_stored(SUMS_10, sums + TILE_ROWS * STRIPE, SUM_BYTES);
    _tile_stored(SUMS_11, sums + TILE_ROWS * STRIPE + 16, SUM_BYTES);
  }
}

inline void write_row(float* out, uint32_t kept, __m512 low, __m512 high) {
  _mm512_mask_storeu_ps(out, __mmask16(kept), low);
  _mm512_mask_storeu_ps(out + 16, __mmask16(kept >> 16), high);
}
inline void write_row(uint16_t* out, uint32_t kept, __m512 low, __m512 high) {
  _mm512_mask_storeu_epi16(out, kept, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <class T> class Product {
 public:
  explicit Product(const Linear& linear)
      : a(linear), num_stripes((linear.out_features + STRIPE - 1) / STRIPE),
        panel_rows(std::max<int64_t>(1, PANEL_BYTES / (int64_t(linear.num_steps) * LINE * 2 * TILE_ROWS)) * 2 * TILE_ROWS),
        num_items((linear.num_rows + panel_rows - 1) / panel_rows * num_stripes) {}

  // One thread's part: items (a panel of rows by a stripe), each claimed one ahead so that it can be prefetched.
  void run() {
    configure(int(std::min<int64_t>(a.num_rows, 2 * TILE_ROWS)));
    bool is_first = true;
    for (int64_t item = claimed++, next; item < num_items; item = next) {
      next = claimed++;
      run_item(item, next < num_items ? stripe_of(next) : nullptr, is_first);
      is_first = false;
    }
    _tile_release();
  }

 private:
  const Linear& a;
  const int64_t num_stripes, panel_rows, num_items;
  std::atomic<int64_t> claimed{0};

  const char* stripe_of(int64_t item) const { return a.weight + item % num_stripes * a.num_steps * STEP_BYTES; }

  void run_item(int64_t item, const char* next, bool is_first) {
    alignas(LINE) float sums[2 * TILE_ROWS * STRIPE];
    const char* stripe = stripe_of(item);
    const int64_t begin = item / num_stripes * panel_rows, end = std::min(a.num_rows, begin + panel_rows);
    const int num_blocks = int((end - begin + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS));
    for (int block = 0; block < num_blocks; block++) {
      const int64_t row = begin + int64_t(block) * 2 * TILE_ROWS;
      const int num_rows = int(std::min<int64_t>(end - row, 2 * TILE_ROWS));
      const bool is_cut = num_rows < 2 * TILE_ROWS && a.num_rows > 2 * TILE_ROWS;
      const Prefetch fetch = to_prefetch(stripe, next, block, num_blocks, is_first);
      const char* x = a.x + row * a.row_bytes;
      if (is_cut) configure(num_rows);
      if (num_rows > TILE_ROWS) multiply<true>(x, a.row_bytes, stripe, a.num_steps, fetch, sums);
      else multiply<false>(x, a.row_bytes, stripe, a.num_steps, fetch, sums);
      if (is_cut) configure(2 * TILE_ROWS);
      write(sums, row, num_rows, item % num_stripes * STRIPE);
    }
  }

  // With one block of rows, a few steps ahead, running on into the next stripe; with more, the next stripe is spread over
  // them. A thread's first stripe has had nobody to fetch it.
  Prefetch to_prefetch(const char* stripe, const char* next, int block, int num_blocks, bool is_first) const {
    const int lead = std::min(LEAD, int(a.num_steps)), turn = a.num_steps - lead;
    if (num_blocks == 1) return {stripe + lead * STEP_BYTES, next ? next : stripe, turn, STEP_BYTES};
    if (is_first && block == 0) return {stripe + lead * STEP_BYTES, stripe, turn, STEP_BYTES};
    const int blocks_left = is_first ? num_blocks - 1 : num_blocks, at = is_first ? block - 1 : block;
    const int bytes = (STEP_BYTES / blocks_left + LINE - 1) / LINE * LINE;
    if (!next || at * bytes >= STEP_BYTES) return {stripe, stripe, a.num_steps, 0};
    return {next + int64_t(at) * a.num_steps * bytes, next, a.num_steps, bytes};
  }

  void write(const float* sums, int64_t row, int num_rows, int64_t column) const {
    const int64_t left = a.out_features - column;
    const uint32_t kept = left >= STRIPE ? ~0u : (1u << left) - 1;
    T* out = static_cast<T*>(a.out) + row * a.out_features + column;
    for (int r = 0; r < num_rows; r++, out += a.out_features) {
      __m512 low = _mm512_load_ps(sums + r * STRIPE), high = _mm512_load_ps(sums + r * STRIPE + 16);
      if (a.bias) {
        low = _mm512_add_ps(low, _mm512_loadu_ps(a.bias + column));
        high = _mm512_add_ps(high, _mm512_loadu_ps(a.bias + column + 16));
      }
      write_row(out, kept, low, high);
    }
  }
};

template <class T> void run(const Linear& linear) {
  Product<T> product(linear);
  const int64_t weight_bytes = int64_t(linear.num_steps) * LINE * linear.out_features;
#pragma omp parallel num_threads(linear.num_threads) if (weight_bytes * (1 + linear.num_rows / 64) > GRAIN)
  product.run();
}

#endif

}  // namespace

extern "C" {

// Whether this build has code for tiles, and the kernel lets this process use them.
int32_t phloem_linear_is_supported() {
#if HAS_TILES
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 0;
#endif
}

// out [num_rows, out_features] = x [num_rows, in_features] W^T + bias. x and W are bf16, in_features a multiple of 32, the
// bias (or null) float32 and padded with W to a multiple of 32 outputs. out is rounded to bf16, or float32.
void phloem_linear([[maybe_unused]] const void* x, [[maybe_unused]] int64_t num_rows, [[maybe_unused]] int64_t row_stride,
                   [[maybe_unused]] const void* weight, [[maybe_unused]] const float* bias, [[maybe_unused]] void* out,
                   [[maybe_unused]] int32_t in_features, [[maybe_unused]] int32_t out_features,
                   [[maybe_unused]] int32_t out_is_f32, [[maybe_unused]] int32_t num_threads) {
#if HAS_TILES
  const Linear linear{static_cast<const char*>(x), num_rows, row_stride * 2, static_cast<const char*>(weight), bias, out,
                      in_features / STEP, out_features, num_threads};
  if (num_rows == 0) return;
  out_is_f32 ? run<float>(linear) : run<uint16_t>(linear);
#endif
}
}
