// Norms, hyper-connections and residual streams of any shape. Contract: kernels/mhc/streams_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

constexpr int kMaxStreams = 8;

// Sixteen partial sums of squares for each row.
struct Squares {
  const float* x;
  int64_t stride, width;
  float* parts;

  BOTH void operator()(int64_t i) const {
    const float* row = x + i / kLanes * stride;
    float sum = 0.0f;
    for (int64_t c = i % kLanes; c < width; c += kLanes) sum = fmaf(row[c], row[c], sum);
    parts[i] = sum;
  }
};

BOTH float rms_scale(const float* parts, int64_t width, float eps) {
  return 1.0f / sqrtf(sum_lanes(parts) / static_cast<float>(width) + eps);
}

struct Norm {
  const float *x, *parts, *weight;
  int64_t stride, width;
  float eps;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t row = i / width, c = i % width;
    const float scale = rms_scale(parts + row * kLanes, width, eps);
    out[i] = rounded(x[row * stride + c] * scale * weight[c], bf16);
  }
};

struct Collapse {
  const float *streams, *pre;
  int64_t hc, hidden;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t t = i / hidden, c = i % hidden;
    const float* x = streams + t * hc * hidden + c;
    float sum = x[0] * pre[t * hc];
    for (int64_t s = 1; s < hc; ++s) sum = fmaf(x[s * hidden], pre[t * hc + s], sum);
    out[i] = rounded(sum, bf16);
  }
};

struct Expand {
  const float *streams, *y, *post, *comb;
  int64_t hc, hidden;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t c = i % hidden, j = i / hidden % hc, t = i / hidden / hc;
    float sum = y[t * hidden + c] * post[t * hc + j];
    for (int64_t s = 0; s < hc; ++s)
      sum = fmaf(streams[(t * hc + s) * hidden + c], comb[(t * hc + s) * hc + j], sum);
    out[i] = rounded(sum, bf16);
  }
};

// Mixing weights of a token from the projection of its streams.
struct Mix {
  const float *raw, *parts, *scale, *base;
  int64_t hc, width, iters;
  float hc_eps, norm_eps;
  float *pre, *post, *comb;

  BOTH void operator()(int64_t t) const {
    const int n = static_cast<int>(hc);
    const float factor = rms_scale(parts + t * kLanes, width, norm_eps);
    const float* own = raw + t * (2 + n) * n;
    for (int j = 0; j < n; ++j) {
      pre[t * n + j] = sigmoid(own[j] * factor * scale[0] + base[j]) + hc_eps;
      post[t * n + j] = sigmoid(own[n + j] * factor * scale[1] + base[n + j]) * 2.0f;
    }
    float m[kMaxStreams][kMaxStreams];
    for (int i = 0; i < n; ++i) {
      float most = -INFINITY;
      for (int j = 0; j < n; ++j) {
        const int at = 2 * n + i * n + j;
        m[i][j] = own[at] * factor * scale[2] + base[at];
        most = j ? vmax(most, m[i][j]) : m[i][j];
      }
      for (int j = 0; j < n; ++j) m[i][j] = exp_of(m[i][j] - most);
      divide_row(m[i], n, 0.0f);
      for (int j = 0; j < n; ++j) m[i][j] += hc_eps;
    }
    divide_columns(m, n);
    for (int64_t k = 1; k < iters; ++k) {
      for (int i = 0; i < n; ++i) divide_row(m[i], n, hc_eps);
      divide_columns(m, n);
    }
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) comb[(t * n + i) * n + j] = m[i][j];
  }

  BOTH void divide_row(float* row, int n, float offset) const {
    float sum = row[0];
    for (int j = 1; j < n; ++j) sum += row[j];
    sum = 1.0f / (sum + offset);
    for (int j = 0; j < n; ++j) row[j] *= sum;
  }
  BOTH void divide_columns(float (*m)[kMaxStreams], int n) const {
    for (int j = 0; j < n; ++j) {
      float sum = m[0][j];
      for (int i = 1; i < n; ++i) sum += m[i][j];
      sum = 1.0f / (sum + hc_eps);
      for (int i = 0; i < n; ++i) m[i][j] *= sum;
    }
  }
};

}  // namespace

extern "C" int squares(const float* x, int64_t rows, int64_t stride, int64_t width, float* parts, void* stream) {
  return for_each(rows * kLanes, Squares{x, stride, width, parts}, stream);
}

extern "C" int rms_norm(const float* x, const float* parts, const float* weight, int64_t rows, int64_t stride,
                    int64_t width, float eps, int64_t bf16, float* out, void* stream) {
  return for_each(rows * width, Norm{x, parts, weight, stride, width, eps, !!bf16, out}, stream);
}

extern "C" int collapse(const float* streams, const float* pre, int64_t tokens, int64_t hc, int64_t hidden,
                        int64_t bf16, float* out, void* stream) {
  return for_each(tokens * hidden, Collapse{streams, pre, hc, hidden, !!bf16, out}, stream);
}

extern "C" int expand(const float* streams, const float* y, const float* post, const float* comb, int64_t tokens,
                      int64_t hc, int64_t hidden, int64_t bf16, float* out, void* stream) {
  return for_each(tokens * hc * hidden, Expand{streams, y, post, comb, hc, hidden, !!bf16, out}, stream);
}

// `width`: of all streams of a token; `parts` are their squares.
extern "C" int mix(const float* raw, const float* parts, const float* scale, const float* base, int64_t tokens,
                   int64_t hc, int64_t width, int64_t iters, float hc_eps, float norm_eps, float* pre, float* post,
                   float* comb, void* stream) {
  return for_each(tokens, Mix{raw, parts, scale, base, hc, width, iters, hc_eps, norm_eps, pre, post, comb}, stream);
}
