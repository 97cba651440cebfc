// What the compiled kernels offer each other and Python: the same structures, field by field, are in the Python files named.

#pragma once

#include <cstdint>

#include "cpu_team.h"

extern "C" {

// A packed linear layer (cpu_linear.py). The last stripe is padded with zeros.
struct PhloemLinear {
  const void* weight;     // stripes of 32 outputs
  const float* bias;      // [stripes * 32], or null
  const float* scale;     // [stripes * 32], of int8 weights; else null
  int32_t in_features, out_features;
  int32_t format;         // see below
  int32_t is_gated;       // a stripe is 16 gates and the 16 outputs that they gate; out_features counts the results
};

// Rows that a layer reads, and rows that it writes; strides in values.
struct PhloemInput {
  const void* data;
  int64_t num_rows, row_stride;
  int32_t is_bf16;
};
struct PhloemResult {
  void* data;
  int64_t row_stride;
  int32_t is_bf16;
};

// One call of attention (cpu_native.py). A query row is one head of one token:
// row token * group + h is query head kv_head * group + h, for each KV head.
struct PhloemAttention {
  const void* kv;                // [num_blocks, 2, block_size, num_kv_heads, head_dim]
  const void* q;                 // [num_tokens, num_q_heads, head_dim], q_stride values from token to token
  void* out;                     // [num_tokens, num_q_heads, head_dim]
  const int64_t* positions;      // [num_tokens]
  const int64_t* token_partial;  // [num_tokens + 1] partial results kept for the tokens before each one, in spans
  const int32_t* kv_indptr;      // [num_rows + 1]
  const int32_t* kv_indices;     // [kv_indptr[num_rows]]
  const int32_t* kv_lens;        // [num_rows]
  const int32_t* query_rows;     // the query rows of all tiles, one tile after the other
  const int32_t* tile_row;       // [tiles] plan row whose blocks the tile reads
  const int32_t* tile_begin;     // [tiles] where its query rows begin in query_rows
  const int32_t* tile_count;     // [tiles] how many there are, TILE at most
  const int32_t* tile_kept;      // [num_tiles] spans from the first on whose results the items keep
  const int32_t* item_tile;      // [num_items]
  const int32_t* item_span;      // [num_items]
  float* partials;               // [num_kv_heads][token_partial[num_tokens]][group][phloem_partial_floats(head_dim)]
  float* scratch;                // [num_threads][phloem_scratch_floats(head_dim)]
  int64_t num_tokens, num_tiles; // tiles from num_tiles on are for items only
  int64_t num_items;
  int64_t window, q_stride;      // window 0: none
  int32_t block_size, num_q_heads, num_kv_heads, head_dim;
  int32_t kv_is_bf16, q_is_bf16, num_threads;
  float scale, soft_cap;         // soft_cap 0: none
};

// Keys and values of a step, and where they go. Slots are not checked here: the plan was.
struct PhloemAppend {
  void* kv;                      // [num_blocks, 2, block_size, num_kv_heads, head_dim]
  const void *k, *v;             // [num_tokens, num_kv_heads, head_dim], stride_bytes from token to token
  const int64_t* tokens;         // which token goes to each slot; null: token i to slot i
  const int64_t* slots;
  int64_t row_bytes, stride_bytes;
  int32_t block_size;
};

// A tensor [num_rows, num_heads, width], its last two dimensions contiguous.
struct PhloemRows {
  void* data;
  int64_t num_rows, row_stride;  // in values
  int32_t num_heads, width;
};

// Cosines, and sines with the sign of rotate-half: [max_position, rotary_dim] each.
struct PhloemRotary {
  const float *cos, *signed_sin;
  int64_t max_position;
  int32_t rotary_dim;
};

// One layer of a decoder (cpu_decoder.py). Norms are [hidden_size] or, of heads, [head_dim]; those of heads may be null.
struct PhloemLayer {
  const void *attention_norm, *q_norm, *k_norm, *mlp_norm;
  const PhloemLinear *qkv, *output, *gate_up, *down;
};

// A decoder between its embedding and its head. Everything is of one type, float32 or bf16, the KV too.
struct PhloemDecoder {
  const PhloemLayer* layers;
  const void* last_norm;
  PhloemRotary rotary;
  int32_t num_layers, hidden_size, num_q_heads, num_kv_heads, head_dim, is_bf16;
  float eps;
};

// The memory of a step.
struct PhloemStep {
  void *hidden, *normed;         // [num_tokens, hidden_size]: embeddings, overwritten by what layers add; the result
  void *qkv, *attended, *gated;  // [num_tokens, ...]: what layers hand on
  void* delta;                   // [num_tokens, hidden_size]
  void* kv;                      // [num_layers, ...]
  int64_t layer_bytes;           // of kv
  const int64_t *positions, *slots;
  const int64_t *mirror_tokens, *mirror_slots;  // [num_mirrors]: KV that is written to other slots as well
  const int64_t* windows;        // [num_layers], 0: none
  const PhloemAttention* attention;  // all but what differs by layer
  int64_t num_tokens, num_mirrors;
  int32_t num_threads;
};
}

namespace phloem {

// Parts of a step, called by all members of a team. They return when all have done their part.
void linear(Member&, const PhloemLinear&, const PhloemInput&, const PhloemResult&);
void attend(Member&, const PhloemAttention&);

// Of one row or slot, by whichever thread.
void append(const PhloemAppend&, int64_t i);
void add_norm(const PhloemRows& hidden, const void* delta, const void* weight, const PhloemRows& out, float eps, bool is_bf16,
              int64_t row);
void rotate(const PhloemRows& x, int64_t position, const PhloemRotary&, const PhloemRows& out, bool is_bf16, int64_t row);

}  // namespace phloem

namespace {

using namespace phloem;

// Formats of weights: type, and order in memory (`pack` in cpu_linear.py).
enum : int32_t { FLOAT_LANES, BF16_LANES, INT8_LANES, BF16_TILES, INT8_TILES };

}  // namespace
