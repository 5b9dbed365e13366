// Router and experts of any shape. Contract: kernels/moe/experts_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

struct Route {
  const float *scores, *bias;
  int64_t experts, top_k;
  float scaling, temperature;
  int64_t* ids;
  float* shares;

  BOTH float affinity(int64_t t, int64_t e) const { return sqrtf(softplus(scores[t * experts + e] / temperature)); }

  // Experts are taken one after the other, the best that comes behind the last one taken.
  BOTH void operator()(int64_t t) const {
    int64_t* own = ids + t * top_k;
    float last = INFINITY;
    int64_t last_id = -1;
    for (int64_t k = 0; k < top_k; ++k) {
      float best = 0.0f;
      int64_t best_id = -1;
      for (int64_t e = 0; e < experts; ++e) {
        const float sum = affinity(t, e) + bias[e], choice = sum == sum ? sum : 0.0f;
        const bool is_left = choice < last || (choice == last && e > last_id);
        if (is_left && (best_id < 0 || choice > best)) best = choice, best_id = e;
      }
      last = best, last_id = best_id;
      int64_t at = k;  // in ascending order
      for (; at > 0 && own[at - 1] > best_id; --at) own[at] = own[at - 1];
      own[at] = best_id;
    }
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      const float a = affinity(t, own[k]);
      shares[t * top_k + k] = a;
      total = k ? total + a : a;
    }
    for (int64_t k = 0; k < top_k; ++k) shares[t * top_k + k] = shares[t * top_k + k] / (total + 1e-20f) * scaling;
  }
};

// Row i / per_row of x times the weights of expert ids[i]: [experts][position][output].
template <class W>
struct Product {
  const float* x;
  int64_t per_row;
  const int64_t* ids;
  int64_t first_expert, num_local;
  const W* weights;
  int64_t inner, outer;
  bool bf16;
  float* out;

  BOTH float value(float w) const { return w; }
  BOTH float value(uint16_t bfloat16) const { return from_bits(static_cast<uint32_t>(bfloat16) << 16); }

  BOTH void operator()(int64_t i) const {
    const int64_t slot = i / outer, column = i % outer, expert = ids[slot] - first_expert;
    if (expert < 0 || expert >= num_local) {
      out[i] = 0.0f;
      return;
    }
    const float* row = x + slot / per_row * inner;
    const W* weight = weights + expert * inner * outer + column;
    out[i] = rounded(dot(inner, [&](int64_t k) { return row[k]; }, [&](int64_t k) { return value(weight[k * outer]); }),
                     bf16);
  }
};

struct Activate {
  const float* gate_up;  // [rows, 2 · inter]
  const float* shares;   // null: one
  int64_t inter;
  float limit;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t row = i / inter, c = i % inter;
    float gate = gate_up[row * 2 * inter + c], up = gate_up[(row * 2 + 1) * inter + c];
    gate = keep_nan(gate, vmin(gate, limit));
    up = keep_nan(up, vmin(vmax(up, -limit), limit));
    float h = sigmoid(gate) * gate * up;
    if (shares) h = h * shares[row];
    out[i] = rounded(h, bf16);
  }
};

struct Combine {
  const float *slots, *shared;
  int64_t top_k, hidden;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const float* from = slots + i / hidden * top_k * hidden + i % hidden;
    float sum = from[0];
    for (int64_t k = 1; k < top_k; ++k) sum += from[k * hidden];
    out[i] = rounded(sum + shared[i], bf16);
  }
};

}  // namespace

extern "C" int route(const float* scores, const float* bias, int64_t tokens, int64_t experts, int64_t top_k,
                     float scaling, float temperature, int64_t* ids, float* shares, void* stream) {
  return for_each(tokens, Route{scores, bias, experts, top_k, scaling, temperature, ids, shares}, stream);
}

extern "C" int expert_product(const float* x, int64_t per_row, const int64_t* ids, int64_t slots,
                              int64_t first_expert, int64_t num_local, const void* weights, int64_t is_bf16,
                              int64_t inner, int64_t outer, int64_t bf16, float* out, void* stream) {
  if (is_bf16)
    return for_each(slots * outer,
                    Product<uint16_t>{x, per_row, ids, first_expert, num_local, static_cast<const uint16_t*>(weights),
                                      inner, outer, !!bf16, out},
                    stream);
  return for_each(slots * outer,
                  Product<float>{x, per_row, ids, first_expert, num_local, static_cast<const float*>(weights), inner,
                                 outer, !!bf16, out},
                  stream);
}

extern "C" int activate(const float* gate_up, const float* shares, int64_t rows, int64_t inter, float limit,
                        int64_t bf16, float* out, void* stream) {
  return for_each(rows * inter, Activate{gate_up, shares, inter, limit, !!bf16, out}, stream);
}

// Slots in order, then the shared expert.
extern "C" int combine(const float* slots, const float* shared, int64_t tokens, int64_t top_k, int64_t hidden,
                       int64_t bf16, float* out, void* stream) {
  return for_each(tokens * hidden, Combine{slots, shared, top_k, hidden, !!bf16, out}, stream);
}
