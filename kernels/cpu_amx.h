// AMX: eight tile registers of 16 rows of 64 bytes, and products of bf16 pairs summed in float32.
//
// One use of the multiplier adds, to each element [i][j] of a 16 x 16 tile of sums, the products of row i of A (32 values)
// with column j of B. B holds pairs: word [k][j] is (B[2k][j], B[2k+1][j]). An element's bits depend on its own row and
// column alone, so rows may share a tile in any company.

#pragma once

#if defined(PHLOEM_AMX_HEADER)  // the same in software, for tests on other machines
#include PHLOEM_AMX_HEADER
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define PHLOEM_HAS_AMX 1

#include <array>
#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;  // of a register: its rows, and the bytes of each
constexpr int STEP = 32;                        // bf16 values of a row, which one product sums over

// Whether this process may use the tiles: Linux grants their 8 KiB of state per thread on request.
inline bool amx_is_allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_allowed;
}

// The tile registers of this thread, for as long as the object lives: of full size, until told otherwise.
struct AmxTiles {
  AmxTiles() { set_rows({TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS}); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;

  // Rows of each register, 1 to 16; what they hold is lost.
  void set_rows(const std::array<int, 8>& rows) {
    struct alignas(64) { uint8_t palette = 1, start_row = 0, reserved[14] = {}; uint16_t row_bytes[16] = {}; uint8_t rows[16] = {}; } config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = TILE_BYTES, config.rows[i] = uint8_t(rows[i]);
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
};

// The instructions, on registers 0 to 7. As assembly, since the compiler's own forms let stores move past a load of a tile.
template <int R> inline void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(R)); }
template <int R> inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R> inline void tile_load_once(const void* from, int64_t stride) {  // of data that is not soon needed again
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R> inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}
template <int SUM, int A, int B> inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

}  // namespace

#endif
