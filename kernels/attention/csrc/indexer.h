// Scores of the indexer for tokens of one row, and the choice of the best.
#pragma once

#include "panels.h"

constexpr int64_t KEY_TILE = 64;

// Queries of some tokens, [tokens · heads, dim], and the weights of their heads.
struct IndexQueries {
    const float* rows;
    const float* weights;  // [tokens, heads]
    int64_t tokens, heads, dim;
    bool bf16;
};

// Sixteen keys of one token, from its heads' products: Σ_h relu(q_h · k) · w_h, heads in order.
INLINE F sum_heads(const IndexQueries& q, int64_t token, const float* products) {
    F sum{};
    for (int64_t h = 0; h < q.heads; h++) {
        F p = load(products + (token * q.heads + h) * KEY_TILE);
        if (q.bf16) p = round_bf16(p);
        p = keep_nan(p, vmax(p, splat(0.0f))) * q.weights[token * q.heads + h];
        if (q.bf16) p = round_bf16(p);
        sum = h ? sum + p : p;
    }
    return sum;
}

// scores[token, i] of `count` keys, the i-th of which lies in pool row slot(i); rows of scores are
// `stride` apart.
template <class Slot>
INLINE void score_keys(const IndexQueries& q, const RowPool& pool, int64_t count, const Slot& slot,
                       float* scores, int64_t stride) {
    const int64_t rows = q.tokens * q.heads;
    const bool in_tiles =
        tiles_ready() && pool.format != ROW_FLOAT && are_halves(q.rows, q.dim, rows, q.dim);
    const Operand asked = Operand::make<1>(rows, q.dim, in_tiles);
    for (int64_t r = 0; r < rows; r++) asked.put(r, q.rows + r * q.dim);
    float* products = scratch<3, float>(rows * KEY_TILE);
    for (int64_t first = 0; first < count; first += KEY_TILE) {
        const int64_t some = std::min(KEY_TILE, count - first);
        PoolRows keys(some, q.dim);
        for (int64_t i = 0; i < some; i++) keys.add(pool, slot(first + i));
        const Operand found = keys.unpack<2>(in_tiles);
        const Weight w = found.as_outputs(scratch<0, uint32_t>(found.output_words()));
        multiply(asked, w, products, KEY_TILE);
        for (int64_t t = 0; t < q.tokens; t++)
            for (int64_t i = 0; i < some; i += LANES)
                store_part(scores + t * stride + first + i, sum_heads(q, t, products + i), some - i);
    }
}

// The `top_k` best of n scores; a tie goes to the lower index; -inf is never chosen. Calls
// pick(index) in ascending order.
template <class Pick>
INLINE void select_best(const float* scores, int64_t n, int64_t top_k, const Pick& pick) {
    float* finite = scratch<4, float>(n);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (scores[i] > -INFINITY) finite[count++] = scores[i];
    if (count <= top_k) {
        for (int64_t i = 0; i < n; i++)
            if (scores[i] > -INFINITY) pick(i);
        return;
    }
    std::nth_element(finite, finite + top_k - 1, finite + count, std::greater<float>());
    const float last = finite[top_k - 1];
    int64_t room = top_k;
    for (int64_t i = 0; i < top_k; i++) room -= finite[i] > last;
    for (int64_t i = 0; i < n; i++)
        if (scores[i] > last || (scores[i] == last && room-- > 0)) pick(i);
}

// Blocks of `size` entries with the best entries, ascending; that of the newest one is always in.
template <class Pick>
INLINE void select_blocks(const float* scores, int64_t n, int64_t visible, int64_t size,
                          int64_t num_blocks, const Pick& pick) {
    const int64_t blocks = (n + size - 1) / size;
    float* best = scratch<5, float>(blocks);
    for (int64_t b = 0; b < blocks; b++) {
        best[b] = -INFINITY;
        for (int64_t i = b * size; i < std::min(n, (b + 1) * size); i++)
            best[b] = std::max(best[b], scores[i]);
    }
    if (visible > 0) best[(visible - 1) / size] = INFINITY;
    select_best(best, blocks, num_blocks, pick);
}
