// Attention of one token over rows that may lie anywhere.
#pragma once

#include "panels.h"

// e^x of x <= 0, as `vexp`.
INLINE F vexp_falling(F x) {
    F n, p = vexp_parts(x, n);
    const I power = __builtin_convertvector(vmax(n, splat(-126.0f)), I);
    return x < -87.3f ? splat(0.0f) : p * (F)((power + 127) << 23);  // NaN stays in p
}

// Sixteen heads' scores, scores[n] apart by `stride`, to weights; returns in each lane their sum
// with the sink's. A weight is rounded behind the sum.
INLINE F weigh(float* scores, int64_t n, int64_t stride, float scale, F sink, bool bf16) {
    F most = sink;
    for (int64_t r = 0; r < n; r++) {
        const F v = load(scores + r * stride) * scale;
        store(scores + r * stride, v);
        most = vmax(v, most);
    }
    F total = vexp_falling(sink - most);
    for (int64_t r = 0; r < n; r++) {
        const F w = vexp_falling(load(scores + r * stride) - most);
        total += w;
        store(scores + r * stride, bf16 ? round_bf16(w) : w);
    }
    return total;
}

// weights[n][stride], heads in the lanes, as rows of heads.
INLINE void put_weights(const float* weights, int64_t n, int64_t stride, const Operand& to) {
    for (int64_t first = 0; first < to.count; first += LANES)
        for (int64_t r = 0; r < whole_groups(n); r += GROUP) {
            U x[2][LANES];
            for (int part = 0; part < 2; part++) {
                for (int64_t i = 0; i < LANES; i++) {
                    const int64_t at = r + part * LANES + i;
                    x[part][i] = at < n ? (U)load(weights + at * stride + first) : U{};
                }
                transpose(x[part]);
            }
            for (int64_t h = 0; h < std::min(LANES, to.count - first); h++) {
                const F a = (F)x[0][h], b = (F)x[1][h];
                if (to.tiles)
                    store_halves(to.halves(first + h, r / GROUP), a, b);
                else
                    store(to.row(first + h) + r, a), store(to.row(first + h) + r + LANES, b);
            }
        }
}

static void attend(const float* queries, int64_t heads, int64_t dim, const PoolRows& rows,
                   const float* sinks, bool bf16, float* out) {
    const int64_t n = rows.count(), width = (heads + LANES - 1) / LANES * LANES;
    if (n == 0) {  // tiles want a row
        std::fill_n(out, heads * dim, 0.0f);
        return;
    }
    const bool in_tiles = tiles_ready() && bf16 && rows.is_exact() && are_halves(queries, dim, heads, dim);
    const Operand q = Operand::make<1>(heads, dim, in_tiles);
    for (int64_t h = 0; h < heads; h++) q.put(h, queries + h * dim);
    const Weight asked = q.as_outputs(scratch<0, uint32_t>(q.output_words()));
    const Operand attended = rows.unpack<2>(in_tiles);
    float* weights = scratch<3, float>(n * width);
    float* totals = scratch<5, float>(width);
    multiply(attended, asked, weights, width);
    const float scale = 1.0f / std::sqrt((float)dim);
    for (int64_t h = 0; h < heads; h += LANES)
        store(totals + h, weigh(weights + h, n, width, scale, load_part(sinks + h, heads - h), bf16));
    const Operand p = Operand::make<4>(heads, n, in_tiles);
    put_weights(weights, n, width, p);
    const Weight values = attended.as_positions(scratch<1, uint32_t>(attended.position_words()));
    multiply(p, values, out, dim);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < dim; c += LANES) {
            float* at = out + h * dim + c;
            store_part(at, load_part(at, dim - c) / totals[h], dim - c);
        }
}
