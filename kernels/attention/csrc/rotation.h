// Rotary position embedding of one row.
#pragma once

#include "lanes.h"

// The last `dim` channels of a row, pairs side by side; cos and ±sin by channel.
struct Turn {
    const float *cos, *sin;
    int64_t dim;
};
INLINE Turn make_turn(const float* cos, const float* sin, int64_t half, bool inverse, float* space) {
    for (int64_t k = 0; k < half; k++) {
        const float s = inverse ? -sin[k] : sin[k];
        space[2 * k] = space[2 * k + 1] = cos[k];
        space[2 * half + 2 * k] = -s, space[2 * half + 2 * k + 1] = s;
    }
    return {space, space + 2 * half, 2 * half};
}
// `to` may be `x`.
INLINE void rotate_row(const float* x, int64_t channels, const Turn& turn, bool bf16, float* to) {
    const int64_t kept = channels - turn.dim;
    for (int64_t c = 0; c < kept; c += LANES) {
        F v = load_part(x + c, kept - c);
        store_part(to + c, bf16 ? round_bf16(v) : v, kept - c);
    }
    for (int64_t c = 0; c < turn.dim; c += LANES) {
        const int64_t left = turn.dim - c;
        F v = load_part(x + kept + c, left);
        if (bf16) v = round_bf16(v);
        v = v * load_part(turn.cos + c, left) + swap_1(v) * load_part(turn.sin + c, left);
        store_part(to + kept + c, bf16 ? round_bf16(v) : v, left);
    }
}
