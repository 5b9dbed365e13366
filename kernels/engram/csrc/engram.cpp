// Engram: hash, gather, gate. Contracts: kernels/engram/*.py.
#include "rows.h"

EXPORT void ngram_rows(const int64_t* last_ids, int64_t tokens, int64_t order, int64_t pad_id,
                       const int64_t* multipliers, const int64_t* primes, const int64_t* offsets,
                       int64_t heads, int64_t* rows) {
    for (int64_t t = 0; t < tokens; t++, last_ids += order) {
        uint64_t mixed = 0;
        bool is_dead = false;
        for (int64_t back = 0; back < order; back++) {
            is_dead = is_dead || last_ids[back] < 0;
            mixed ^= (uint64_t)(is_dead ? pad_id : last_ids[back]) * (uint64_t)multipliers[back];
            for (int64_t h = 0; back && h < heads; h++) {
                const int64_t at = (back - 1) * heads + h, left = (int64_t)mixed % primes[at];
                *rows++ = (left < 0 ? left + primes[at] : left) + offsets[at];
            }
        }
    }
}

static float from_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float v = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if (exponent == 15 && mantissa == 7) v = NAN;
    return code & 0x80 ? -v : v;
}

// out[i] = table[rows[i]] dequantised, groups of 32.
EXPORT void gather_rows(const uint8_t* table, const uint8_t* scales, int64_t dim, const int64_t* rows,
                        int64_t count, float* out) {
    static const std::vector<float> values = [] {
        std::vector<float> all(256);
        for (int code = 0; code < 256; code++) all[code] = from_e4m3(code);
        return all;
    }();
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < dim / 32; g++) {
            const float scale = std::ldexp(1.0f, scales[rows[i] * (dim / 32) + g] - 127);
            const uint8_t* codes = table + rows[i] * dim + g * 32;
            for (int64_t c = 0; c < 32; c++) *out++ = values[codes[c]] * scale;
        }
}

// keys[token] has `stride` floats, the first hc · hidden of which are the keys.
EXPORT void engram_gate(const float* streams, const float* keys, int64_t stride, int64_t tokens,
                        int64_t hc, int64_t hidden, const float* q, const float* k, float eps,
                        float* gates) {
    const float root = 1.0f / std::sqrt((float)hidden);
    for (int64_t t = 0; t < tokens; t++, keys += stride)
        for (int64_t i = 0; i < hc; i++, streams += hidden) {
            const float *y = keys + i * hidden, *qi = q + i * hidden, *ki = k + i * hidden;
            F dot{};
            for (int64_t c = 0; c < hidden; c += LANES) {
                const int64_t left = hidden - c;
                F weighted = load_part(qi + c, left) * load_part(ki + c, left);
                dot = fma(load_part(streams + c, left) * load_part(y + c, left), weighted, dot);
            }
            const float g = sum_lanes(dot)[0] * rms_scale(streams, hidden, eps) *
                            rms_scale(y, hidden, eps) * root;
            const float size = std::fabs(g) < 1e-6f ? 1e-6f : std::fabs(g);
            *gates++ = vsigmoid(splat(std::copysign(std::sqrt(size), g)))[0];
        }
}

// out[token, i] = streams[token, i] + gates[token, i] · value[token]
EXPORT void add_gated(const float* streams, const float* gates, const float* value, int64_t stride,
                      int64_t tokens, int64_t hc, int64_t hidden, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++, value += stride)
        for (int64_t i = 0; i < hc; i++, streams += hidden, out += hidden, gates++)
            for (int64_t c = 0; c < hidden; c += LANES) {
                const int64_t left = hidden - c;
                F v = fma(splat(*gates), load_part(value + c, left), load_part(streams + c, left));
                store_part(out + c, bf16 ? round_bf16(v) : v, left);
            }
}
