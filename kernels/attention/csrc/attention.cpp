// Rotation, cache rows, sparse attention, indexer. Contracts: kernels/attention/*.py.
#include "attend.h"
#include "indexer.h"
#include "rotation.h"
#include "rows.h"
#include "step_rows.h"

EXPORT void rotate(const float* x, int64_t tokens, int64_t heads, int64_t channels, const float* cos,
                   const float* sin, int64_t half, int64_t inverse, int64_t bf16, float* out) {
    float* space = scratch<0, float>(4 * half);
    for (int64_t t = 0; t < tokens; t++) {
        const Turn turn = make_turn(cos + t * half, sin + t * half, half, inverse, space);
        for (int64_t h = 0; h < heads; h++, x += channels, out += channels)
            rotate_row(x, channels, turn, bf16, out);
    }
}

// Norm (unless weight is null), rotation, rounding to a cache format, into row slots[token] of the
// pool (or row `token` if slots is null).
EXPORT void cache_rows(const float* x, int64_t stride, int64_t tokens, int64_t dim,
                       const float* weight, float eps, const float* cos, const float* sin,
                       int64_t half, int64_t bf16, int64_t format, int64_t is_packed,
                       const int64_t* slots, uint8_t* pool) {
    float* space = scratch<0, float>(4 * half);
    float* row = scratch<1, float>(dim);
    const RowFormat kept = (RowFormat)format;
    const int64_t bytes = row_bytes(is_packed ? kept : ROW_FLOAT, dim);
    for (int64_t t = 0; t < tokens; t++) {
        const float* from = x + t * stride;
        if (weight) norm_row(from, weight, dim, eps, bf16, row), from = row;
        rotate_row(from, dim, make_turn(cos + t * half, sin + t * half, half, false, space), bf16, row);
        if (!is_packed) round_row(row, dim, kept);
        pack_row(row, dim, is_packed ? kept : ROW_FLOAT, pool + (slots ? slots[t] : t) * bytes);
    }
}

// Pool row i as floats.
EXPORT void unpack_rows(const uint8_t* pool, int64_t format, int64_t dim, int64_t rows, float* out) {
    const RowPool from(pool, format, dim);
    for (int64_t r = 0; r < rows; r++) unpack_row(from.at(r), dim, from.format, out + r * dim);
}

EXPORT void pool_pairs(const float* values, const float* gates, int64_t stride, int64_t groups,
                       int64_t dim, int64_t bf16, float* out) {
    for (int64_t g = 0; g < groups; g++, values += 2 * stride, gates += 2 * stride, out += dim)
        pool_pair(values, gates, values + stride, gates + stride, dim, bf16, out);
}

struct Source {
    RowPool pool;
    int64_t none;  // the slot that stands for no row
    const int64_t* slots;
    int64_t width;
};

EXPORT void sparse_attention(const float* queries, int64_t tokens, int64_t heads, int64_t dim,
                             const void* window, int64_t window_format, int64_t window_none,
                             const int64_t* window_slots, int64_t window_width,
                             const void* compressed, int64_t compressed_format,
                             int64_t compressed_none, const int64_t* compressed_slots,
                             int64_t compressed_width, const float* sinks, int64_t bf16, float* out,
                             int64_t threads) {
    const Source sources[2] = {
        {RowPool(window, window_format, dim), window_none, window_slots, window_width},
        {RowPool(compressed, compressed_format, dim), compressed_none, compressed_slots,
         compressed_width}};
    parallel(tokens, threads, [&](int64_t t) {
        PoolRows rows(window_width + compressed_width, dim);
        for (const Source& s : sources)
            for (int64_t i = 0; i < s.width; i++) {
                const int64_t slot = s.slots[t * s.width + i];
                if (slot != s.none) rows.add(s.pool, slot);
            }
        const int64_t at = t * heads * dim;
        attend(queries + at, heads, dim, rows, sinks, bf16, out + at);
    });
}

// ---------------------------------------------------------------- indexer

// A block table: entry e of `row` is pool row table[row, e / per_block] · per_block + e % per_block.
struct Table {
    const int64_t* blocks;
    int64_t max_blocks, per_block;
    int64_t slot(int64_t row, int64_t entry) const {  // negative if there is none
        const int64_t block = blocks[row * max_blocks + entry / per_block];
        return block < 0 ? -1 : block * per_block + entry % per_block;
    }
};

// scores[token, key] of the first `visible[token]` keys, -inf behind them.
EXPORT void index_scores(const float* queries, const float* weights, int64_t tokens, int64_t heads,
                         int64_t dim, const void* pool, int64_t format, const int64_t* table_blocks,
                         int64_t max_blocks, int64_t per_block, const int64_t* rows,
                         const int64_t* visible, int64_t num_keys, int64_t bf16, float* scores,
                         int64_t threads) {
    const Table table{table_blocks, max_blocks, per_block};
    const RowPool keys(pool, format, dim);
    parallel(tokens, threads, [&](int64_t t) {
        const int64_t seen = std::min(visible[t], num_keys);
        float* to = scores + t * num_keys;
        score_keys({queries + t * heads * dim, weights + t * heads, 1, heads, dim, !!bf16}, keys, seen,
                   [&](int64_t k) { return std::max<int64_t>(0, table.slot(rows[t], k)); }, to, num_keys);
        for (int64_t k = seen; k < num_keys; k++) to[k] = -INFINITY;
    });
}

// indices[row, :width]: ascending, -1 behind them. `allowed` (null: all) masks scores.
EXPORT void top_k_indices(const float* scores, const uint8_t* allowed, int64_t rows, int64_t n,
                          int64_t top_k, int64_t* indices) {
    for (int64_t r = 0; r < rows; r++, scores += n, indices += top_k) {
        const float* from = scores;
        if (allowed) {
            float* masked = scratch<5, float>(n);
            for (int64_t i = 0; i < n; i++) masked[i] = allowed[r * n + i] ? scores[i] : -INFINITY;
            from = masked;
        }
        int64_t count = 0;
        select_best(from, n, top_k, [&](int64_t i) { indices[count++] = i; });
        while (count < top_k) indices[count++] = -1;
    }
}

EXPORT void candidate_blocks(const float* scores, const int64_t* visible, int64_t rows, int64_t n,
                             int64_t size, int64_t num_blocks, uint8_t* chosen) {
    for (int64_t r = 0; r < rows; r++, scores += n, chosen += n) {
        std::memset(chosen, 0, n);
        select_blocks(scores, n, visible[r], size, num_blocks, [&](int64_t b) {
            for (int64_t i = b * size; i < std::min(n, (b + 1) * size); i++) chosen[i] = 1;
        });
    }
}

// Pool rows of entries (negative: none) of each row's block table.
EXPORT void entry_slots(const int64_t* table_blocks, int64_t max_blocks, int64_t per_block,
                        int64_t none, const int64_t* rows, const int64_t* entries, int64_t count,
                        int64_t width, int64_t* slots) {
    const Table table{table_blocks, max_blocks, per_block};
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = i * width; j < (i + 1) * width; j++) {
            const int64_t slot = entries[j] < 0 ? -1 : table.slot(rows[i], entries[j]);
            slots[j] = slot < 0 ? none : slot;
        }
}
