// Engram: hash, gather, gate. Contracts: kernels/engram/*.py.
#include "cache_row.h"
#include "rows.h"
#include "step.h"

struct Hash {
    const int64_t *multipliers, *primes, *offsets;
    int64_t order, heads, pad_id;
    int64_t rows() const { return (order - 1) * heads; }
};

// Rows of one token from the id `back` positions back, negative for none.
template <class Id>
INLINE void hash_token(const Hash& hash, const Id& id, int64_t* rows) {
    uint64_t mixed = 0;
    bool is_dead = false;
    for (int64_t back = 0; back < hash.order; back++) {
        const int64_t found = is_dead ? -1 : id(back);
        is_dead = found < 0;
        mixed ^= (uint64_t)(is_dead ? hash.pad_id : found) * (uint64_t)hash.multipliers[back];
        for (int64_t h = 0; back && h < hash.heads; h++) {
            const int64_t at = (back - 1) * hash.heads + h, left = (int64_t)mixed % hash.primes[at];
            *rows++ = (left < 0 ? left + hash.primes[at] : left) + hash.offsets[at];
        }
    }
}

EXPORT void ngram_rows(const int64_t* last_ids, int64_t tokens, int64_t order, int64_t pad_id,
                       const int64_t* multipliers, const int64_t* primes, const int64_t* offsets,
                       int64_t heads, int64_t* rows) {
    const Hash hash{multipliers, primes, offsets, order, heads, pad_id};
    for (int64_t t = 0; t < tokens; t++)
        hash_token(hash, [&](int64_t back) { return last_ids[t * order + back]; }, rows + t * hash.rows());
}

// out[i] = table[rows[i]] dequantised, groups of 32.
EXPORT void gather_rows(const uint8_t* table, const uint8_t* scales, int64_t dim, const int64_t* rows,
                        int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < dim / 32; g++, out += 32) {
            const float scale = std::ldexp(1.0f, scales[rows[i] * (dim / 32) + g] - 127);
            const uint8_t* codes = table + rows[i] * dim + g * 32;
            store(out, from_e4m3(load_bytes(codes)) * scale);
            store(out + LANES, from_e4m3(load_bytes(codes + LANES)) * scale);
        }
}

// How much of the value a stream takes: key and weights are that stream's.
INLINE float gate_stream(const float* x, const float* key, const float* q, const float* k,
                         int64_t hidden, float eps) {
    F dot{};
    for (int64_t c = 0; c < hidden; c += LANES) {
        const int64_t left = hidden - c;
        F weighted = load_part(q + c, left) * load_part(k + c, left);
        dot = fma(load_part(x + c, left) * load_part(key + c, left), weighted, dot);
    }
    const float g = sum_lanes(dot)[0] * rms_scale(x, hidden, eps) * rms_scale(key, hidden, eps) *
                    (1.0f / std::sqrt((float)hidden));
    const float size = std::fabs(g) < 1e-6f ? 1e-6f : std::fabs(g);
    return vsigmoid(splat(std::copysign(std::sqrt(size), g)))[0];
}
// `to` may be `x`.
INLINE void add_gated_stream(const float* x, float gate, const float* value, int64_t hidden,
                             bool bf16, float* to) {
    for (int64_t c = 0; c < hidden; c += LANES) {
        const int64_t left = hidden - c;
        F v = fma(splat(gate), load_part(value + c, left), load_part(x + c, left));
        store_part(to + c, bf16 ? round_bf16(v) : v, left);
    }
}

// keys[token] has `stride` floats, the first hc · hidden of which are the keys.
EXPORT void engram_gate(const float* streams, const float* keys, int64_t stride, int64_t tokens,
                        int64_t hc, int64_t hidden, const float* q, const float* k, float eps,
                        float* gates) {
    for (int64_t t = 0; t < tokens; t++, keys += stride)
        for (int64_t i = 0; i < hc; i++, streams += hidden)
            *gates++ = gate_stream(streams, keys + i * hidden, q + i * hidden, k + i * hidden, hidden, eps);
}

// out[token, i] = streams[token, i] + gates[token, i] · value[token]
EXPORT void add_gated(const float* streams, const float* gates, const float* value, int64_t stride,
                      int64_t tokens, int64_t hc, int64_t hidden, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++, value += stride)
        for (int64_t i = 0; i < hc; i++, streams += hidden, out += hidden)
            add_gated_stream(streams, *gates++, value, hidden, bf16, out);
}

// ---------------------------------------------------------------- of a step

// Rows of the table for each token of the step, dequantised: out[token, rows · dim]. `compressed` is
// Engram's id of every token id.
EXPORT void step_engram_rows(const Step* s, const int64_t* compressed, const int64_t* multipliers,
                             const int64_t* primes, const int64_t* offsets, int64_t order,
                             int64_t heads, int64_t pad_id, const uint8_t* table,
                             const uint8_t* scales, int64_t dim, float* out) {
    const Hash hash{multipliers, primes, offsets, order, heads, pad_id};
    parallel_ranges(s->num_tokens, s->threads, 8, [&](int64_t first, int64_t end) {
        int64_t* rows = scratch<0, int64_t>(hash.rows());
        for (int64_t t = first; t < end; t++) {
            const int64_t row = s->row_of[t], start = s->row_starts[row];
            hash_token(hash, [&](int64_t back) {
                const int64_t at = t - back, before = s->num_context - (start - at);
                const int64_t id = at >= start ? s->ids[at]
                                   : before < 0 ? -1 : s->context[row * s->num_context + before];
                return id < 0 ? -1 : compressed[id];
            }, rows);
            gather_rows(table, scales, dim, rows, hash.rows(), out + t * hash.rows() * dim);
        }
    });
}

// streams[token, i] += gate · value, where both[token] = keys [hc · hidden] | value [hidden].
EXPORT void step_engram_add(const Step* s, float* streams, const float* both, int64_t hc,
                            int64_t hidden, const float* q, const float* k, float eps, int64_t bf16) {
    parallel_ranges(s->num_tokens, s->threads, 1, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            const float *keys = both + t * (hc + 1) * hidden, *value = keys + hc * hidden;
            for (int64_t i = 0; i < hc; i++) {
                float* x = streams + (t * hc + i) * hidden;
                const float gate = gate_stream(x, keys + i * hidden, q + i * hidden, k + i * hidden, hidden, eps);
                add_gated_stream(x, gate, value, hidden, bf16, x);
            }
        }
    });
}

CALLABLE(step_engram_rows)
CALLABLE(step_engram_add)
