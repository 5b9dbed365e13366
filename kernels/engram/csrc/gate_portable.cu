// Engram's gate, and what it lets through, of any shape. Contract: kernels/engram/gate_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

// Sixteen partial sums for each stream of a token: of products, of squares of x, of squares of keys.
struct Parts {
  const float *streams, *both, *q, *k;  // both: [tokens, (hc + 1) · hidden], keys | value
  int64_t hc, hidden;
  float* parts;

  BOTH void operator()(int64_t i) const {
    const int64_t lane = i % kLanes, stream = i / kLanes % hc, t = i / kLanes / hc;
    const float* x = streams + (t * hc + stream) * hidden;
    const float* key = both + (t * (hc + 1) + stream) * hidden;
    float product = 0.0f, own = 0.0f, other = 0.0f;
    for (int64_t c = lane; c < hidden; c += kLanes) {
      product = fmaf(x[c] * key[c], q[stream * hidden + c] * k[stream * hidden + c], product);
      own = fmaf(x[c], x[c], own);
      other = fmaf(key[c], key[c], other);
    }
    float* to = parts + (t * hc + stream) * 3 * kLanes + lane;
    to[0] = product, to[kLanes] = own, to[2 * kLanes] = other;
  }
};

struct Gate {
  const float* parts;
  int64_t hidden;
  float eps;
  float* gates;

  BOTH float scale(const float* squares) const {
    return 1.0f / sqrtf(sum_lanes(squares) / static_cast<float>(hidden) + eps);
  }
  BOTH void operator()(int64_t i) const {
    const float* own = parts + i * 3 * kLanes;
    const float g = sum_lanes(own) * scale(own + kLanes) * scale(own + 2 * kLanes) *
                    (1.0f / sqrtf(static_cast<float>(hidden)));
    const float size = fabsf(g) < 1e-6f ? 1e-6f : fabsf(g);
    gates[i] = sigmoid(copysignf(sqrtf(size), g));
  }
};

struct Add {
  const float *streams, *gates, *both;
  int64_t hc, hidden;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t c = i % hidden, row = i / hidden, t = row / hc;
    out[i] = rounded(fmaf(gates[row], both[(t * (hc + 1) + hc) * hidden + c], streams[i]), bf16);
  }
};

}  // namespace

extern "C" int engram(const float* streams, const float* both, const float* q, const float* k, int64_t tokens,
                      int64_t hc, int64_t hidden, float eps, int64_t bf16, float* parts, float* gates, float* out,
                      void* stream) {
  int error = for_each(tokens * hc * kLanes, Parts{streams, both, q, k, hc, hidden, parts}, stream);
  if (!error) error = for_each(tokens * hc, Gate{parts, hidden, eps, gates}, stream);
  if (!error) error = for_each(tokens * hc * hidden, Add{streams, gates, both, hc, hidden, !!bf16, out}, stream);
  return error;
}
