// Operations on one row of floats, of any length.
#pragma once

#include "lanes.h"

INLINE float rms_scale(const float* x, int64_t n, float eps) {
    F squares{};
    for (int64_t i = 0; i < n; i += LANES) {
        F v = load_part(x + i, n - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum_lanes(squares)[0] / (float)n + eps);
}
// to = weight · x · scale
INLINE void norm_row(const float* x, const float* weight, int64_t n, float eps, bool bf16, float* to) {
    const float scale = rms_scale(x, n, eps);
    for (int64_t i = 0; i < n; i += LANES) {
        F v = load_part(x + i, n - i) * scale * load_part(weight + i, n - i);
        store_part(to + i, bf16 ? round_bf16(v) : v, n - i);
    }
}
