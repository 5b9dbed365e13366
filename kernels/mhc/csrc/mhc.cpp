// Hyper-connections and norms. Contracts: kernels/mhc/*.py.
#include "seam.h"

EXPORT void rms_norm(const float* x, int64_t stride, int64_t rows, int64_t n, const float* weight,
                     float eps, int64_t bf16, float* out) {
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * stride, weight, n, eps, bf16, out + r * n);
}

EXPORT void collapse(const float* streams, const float* pre, int64_t tokens, int64_t hc,
                     int64_t hidden, const float* weight, float eps, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++)
        collapse_token(streams + t * hc * hidden, pre + t * hc, hc, hidden, weight, eps, bf16,
                       out + t * hidden);
}

// out[j] = post[j] · y + Σ_i comb[i, j] · streams[i]
EXPORT void expand(const float* streams, const float* y, const float* post, const float* comb,
                   int64_t tokens, int64_t hc, int64_t hidden, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++)
        expand_token(streams + t * hc * hidden, y + t * hidden, post + t * hc, comb + t * hc * hc, hc,
                     hidden, bf16, out + t * hc * hidden);
}

EXPORT void hyper_mix(const float* streams, const uint32_t* fn, int64_t kind, const float* scale,
                      const float* base, int64_t tokens, int64_t hc, int64_t hidden, int64_t iters,
                      float hc_eps, float norm_eps, float* pre, float* post, float* comb,
                      int64_t threads) {
    const Weight weight{fn, (Kind)kind, hc * hidden, (2 + hc) * hc};
    mix_tokens({scale, base, hc, iters, hc_eps, norm_eps, weight}, streams, tokens, threads, pre, post,
               comb, [](int64_t, int64_t) {});
}

CALLABLE(rms_norm)
