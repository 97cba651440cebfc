// A decoder's layers in one call: the same operations that can be called one by one, with the same bits, by one team of
// threads that stays together from the first layer to the last. In a decode step of a small model, calling them from outside and
// waking the threads for each takes longer than computing them.
//
//   normed = norm(hidden)
//   of each layer   qkv = normed W             rotate q and k where they stand; k and v go to their slots
//                   attended                   over the KV of each row's path
//                   hidden += attended W       normed = norm(hidden)
//                   gated = SwiGLU(normed W)
//                   hidden += gated W          normed = norm(hidden), by the next layer's weights

#include <cstring>

#include "cpu_kernels.h"

namespace {

// One thread's part in a step.
class Forward {
 public:
  Forward(Member& member, const PhloemDecoder& decoder, const PhloemStep& step)
      : member_(member), d_(decoder), s_(step), value_bytes_(decoder.is_bf16 ? 2 : 4),
        q_size_(decoder.num_q_heads * decoder.head_dim), kv_size_(decoder.num_kv_heads * decoder.head_dim),
        qkv_size_(q_size_ + 2 * kv_size_), hidden_(rows(step.hidden)), normed_(rows(step.normed)) {}

  void run() {
    member_.split(s_.num_tokens, [&](int64_t row) { norm(nullptr, d_.layers[0].attention_norm, row); });
    for (int i = 0; i < d_.num_layers; i++) {
      const PhloemLayer& layer = d_.layers[i];
      multiply(*layer.qkv, s_.normed, d_.hidden_size, s_.qkv, qkv_size_);
      attend(layer, static_cast<char*>(s_.kv) + i * s_.layer_bytes, s_.windows[i]);
      multiply(*layer.output, s_.attended, q_size_, s_.delta, d_.hidden_size);
      add_and_norm(layer.mlp_norm);
      multiply(*layer.gate_up, s_.normed, d_.hidden_size, s_.gated, layer.gate_up->out_features);
      multiply(*layer.down, s_.gated, layer.gate_up->out_features, s_.delta, d_.hidden_size);
      add_and_norm(i + 1 < d_.num_layers ? d_.layers[i + 1].attention_norm : d_.last_norm);
    }
  }

 private:
  Member& member_;
  const PhloemDecoder& d_;
  const PhloemStep& s_;
  const int value_bytes_, q_size_, kv_size_, qkv_size_;
  const PhloemRows hidden_, normed_;

  PhloemRows rows(void* data) const { return {data, s_.num_tokens, d_.hidden_size, 1, d_.hidden_size}; }

  void multiply(const PhloemLinear& layer, const void* x, int64_t x_stride, void* out, int64_t out_stride) {
    linear(member_, layer, {x, s_.num_tokens, x_stride, d_.is_bf16}, {out, out_stride, d_.is_bf16});
  }

  void norm(const void* delta, const void* weight, int64_t row) {
    add_norm(hidden_, delta, weight, normed_, d_.eps, d_.is_bf16, row);
  }

  void add_and_norm(const void* weight) {
    member_.split(s_.num_tokens, [&](int64_t row) { norm(s_.delta, weight, row); });
  }

  void* qkv_at(int column) const { return static_cast<char*>(s_.qkv) + column * value_bytes_; }

  void attend(const PhloemLayer& layer, void* kv, int64_t window) {
    const PhloemRows q{s_.qkv, s_.num_tokens, qkv_size_, d_.num_q_heads, d_.head_dim};
    const PhloemRows k{qkv_at(q_size_), s_.num_tokens, qkv_size_, d_.num_kv_heads, d_.head_dim};
    PhloemAppend to{kv, k.data, qkv_at(q_size_ + kv_size_), nullptr, s_.slots, int64_t(kv_size_) * value_bytes_,
                    int64_t(qkv_size_) * value_bytes_, s_.attention->block_size};
    member_.split(s_.num_tokens, [&](int64_t row) {
      if (layer.q_norm) add_norm(q, nullptr, layer.q_norm, q, d_.eps, d_.is_bf16, row);
      if (layer.k_norm) add_norm(k, nullptr, layer.k_norm, k, d_.eps, d_.is_bf16, row);
      rotate(q, s_.positions[row], d_.rotary, q, d_.is_bf16, row);
      rotate(k, s_.positions[row], d_.rotary, k, d_.is_bf16, row);
      append(to, row);
    });
    if (s_.num_mirrors) {
      to.tokens = s_.mirror_tokens, to.slots = s_.mirror_slots;
      member_.split(s_.num_mirrors, [&](int64_t i) { append(to, i); });
    }
    PhloemAttention attention = *s_.attention;
    attention.kv = kv;
    attention.q = s_.qkv, attention.q_stride = qkv_size_, attention.q_is_bf16 = d_.is_bf16;
    attention.out = s_.attended;
    attention.window = window;
    phloem::attend(member_, attention);
  }
};

}  // namespace

extern "C" {

// All positions must have a place in the rotary tables.
void phloem_decode(const PhloemDecoder* decoder, const PhloemStep* step) {
  if (step->num_tokens == 0) return;
  in_team(step->num_threads, [&](Member& member) { Forward(member, *decoder, *step).run(); });
}
}
