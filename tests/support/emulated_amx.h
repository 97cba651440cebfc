// The tile registers and instructions of kernels/cpu_amx.h in software, so that what is written for AMX runs on any machine with
// AVX512: right and slow. Sums are taken pair by pair, as the instruction does; what a register holds at first is rubbish.

#define PHLOEM_HAS_AMX 1

#include <array>
#include <cstdint>
#include <cstring>

#include "cpu_vectors.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int STEP = 32;

inline bool amx_is_allowed() { return true; }

struct EmulatedTiles {
  unsigned char bytes[8][TILE_ROWS][TILE_BYTES];
  int rows[8];
};
inline thread_local EmulatedTiles emulated;

struct AmxTiles {
  AmxTiles() { set_rows({16, 16, 16, 16, 16, 16, 16, 16}); }
  ~AmxTiles() { set_rows({}); }
  AmxTiles(const AmxTiles&) = delete;
  void set_rows(const std::array<int, 8>& rows) {
    for (int i = 0; i < 8; i++) emulated.rows[i] = rows[i];
    std::memset(emulated.bytes, 0xff, sizeof emulated.bytes);
  }
};

template <int R> inline void tile_zero() { std::memset(emulated.bytes[R], 0, sizeof emulated.bytes[R]); }
template <int R> inline void tile_load(const void* from, int64_t stride) {
  for (int r = 0; r < emulated.rows[R]; r++)
    std::memcpy(emulated.bytes[R][r], static_cast<const char*>(from) + r * stride, TILE_BYTES);
}
template <int R> inline void tile_load_once(const void* from, int64_t stride) { tile_load<R>(from, stride); }
template <int R> inline void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < emulated.rows[R]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, emulated.bytes[R][r], TILE_BYTES);
}

template <int SUM, int A, int B> inline void tile_multiply() {
  for (int i = 0; i < emulated.rows[SUM]; i++) {
    float sums[LANES];
    std::memcpy(sums, emulated.bytes[SUM][i], TILE_BYTES);
    for (int k = 0; k < TILE_ROWS; k++) {
      bf16 x[2], y[LANES][2];
      std::memcpy(x, emulated.bytes[A][i] + 4 * k, sizeof x);
      std::memcpy(y, emulated.bytes[B][k], sizeof y);
      for (int j = 0; j < LANES; j++) sums[j] += widen(x[0]) * widen(y[j][0]) + widen(x[1]) * widen(y[j][1]);
    }
    std::memcpy(emulated.bytes[SUM][i], sums, TILE_BYTES);
  }
}

}  // namespace
