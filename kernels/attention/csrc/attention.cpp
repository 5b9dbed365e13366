// Rotation, cache rows, sparse attention, indexer. Contracts: kernels/attention/*.py.
#include <algorithm>

#include "rows.h"

// ---------------------------------------------------------------- rotation

// The last 2 · half channels of a row, pairs side by side; `turn` holds cos and ±sin by channel.
struct Turn {
    const float *cos, *sin;
    int64_t dim;
};
static Turn make_turn(const float* cos, const float* sin, int64_t half, bool inverse, float* space) {
    for (int64_t k = 0; k < half; k++) {
        const float s = inverse ? -sin[k] : sin[k];
        space[2 * k] = space[2 * k + 1] = cos[k];
        space[2 * half + 2 * k] = -s, space[2 * half + 2 * k + 1] = s;
    }
    return {space, space + 2 * half, 2 * half};
}
static void rotate_row(const float* x, int64_t channels, const Turn& turn, bool bf16, float* to) {
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

EXPORT void rotate(const float* x, int64_t tokens, int64_t heads, int64_t channels, const float* cos,
                   const float* sin, int64_t half, int64_t inverse, int64_t bf16, float* out) {
    float* space = scratch<0, float>(4 * half);
    for (int64_t t = 0; t < tokens; t++) {
        const Turn turn = make_turn(cos + t * half, sin + t * half, half, inverse, space);
        for (int64_t h = 0; h < heads; h++, x += channels, out += channels)
            rotate_row(x, channels, turn, bf16, out);
    }
}

// Norm (unless weight is null), rotation, rounding to a cache format, into pool[slots[token]]
// (or pool[token] if slots is null).
EXPORT void cache_rows(const float* x, int64_t stride, int64_t tokens, int64_t dim,
                       const float* weight, float eps, const float* cos, const float* sin,
                       int64_t half, int64_t bf16, int64_t format, const int64_t* slots, float* pool) {
    float* space = scratch<0, float>(4 * half);
    float* row = scratch<1, float>(dim);
    for (int64_t t = 0; t < tokens; t++) {
        float* to = pool + (slots ? slots[t] : t) * dim;
        const float* from = x + t * stride;
        if (weight) norm_row(from, weight, dim, eps, bf16, row), from = row;
        rotate_row(from, dim, make_turn(cos + t * half, sin + t * half, half, false, space), bf16, to);
        for (int64_t c = 0; format && c < dim; c += 32) {
            F a = load(to + c), b = load(to + c + LANES);
            if (format == 1) round_fp8_32(a, b);
            if (format == 2) a = round_fp4_e4m3_16(a), b = round_fp4_e4m3_16(b);
            if (format == 3) round_fp4_ue8m0_32(a, b);
            store(to + c, a), store(to + c + LANES, b);
        }
    }
}

EXPORT void pool_pairs(const float* values, const float* gates, int64_t stride, int64_t groups,
                       int64_t dim, int64_t bf16, float* out) {
    for (int64_t g = 0; g < groups; g++, values += 2 * stride, gates += 2 * stride, out += dim)
        for (int64_t c = 0; c < dim; c += LANES) {
            const int64_t left = dim - c;
            F first = vsigmoid(load_part(gates + c, left) - load_part(gates + stride + c, left));
            F pooled = first * load_part(values + c, left) +
                       (1.0f - first) * load_part(values + stride + c, left);
            store_part(out + c, bf16 ? round_bf16(pooled) : pooled, left);
        }
}

// ---------------------------------------------------------------- sparse attention

// to[d] = lanes of sixteen heads: x[head][d].
static void heads_to_lanes(const float* x, int64_t heads, int64_t dim, F* to) {
    std::memset(to, 0, dim * sizeof(F));
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < dim; d++) ((float*)(to + d))[h] = x[h * dim + d];
}

// Products of sixteen queries with R rows, one chain over the channels each.
template <int R>
INLINE void dot_rows(const F* queries, const float* const* rows, int64_t dim, F* to) {
    F acc[R];
    for (int r = 0; r < R; r++) acc[r] = F{};
    for (int64_t d = 0; d < dim; d++) {
        const F q = queries[d];
        for (int r = 0; r < R; r++) acc[r] = fma(splat(rows[r][d]), q, acc[r]);
    }
    for (int r = 0; r < R; r++) to[r] = acc[r];
}
static void dot_all(const F* queries, const float* const* rows, int64_t count, int64_t dim, F* to) {
    int64_t r = 0;
    for (; r + 8 <= count; r += 8) {
        // The next rows lie anywhere: fetch them while these are multiplied.
        for (int64_t next = r + 8; next < std::min(r + 16, count); next++)
            for (int64_t d = 0; d < dim; d += LANES) __builtin_prefetch(rows[next] + d);
        dot_rows<8>(queries, rows + r, dim, to + r);
    }
    for (; r + 2 <= count; r += 2) dot_rows<2>(queries, rows + r, dim, to + r);
    if (r < count) dot_rows<1>(queries, rows + r, dim, to + r);
}

// H heads from `head` on, C vectors of channels from `at` on; one chain over the rows each.
template <int H, int C>
INLINE void weigh_rows(const F* weights, const float* const* rows, int64_t count, int64_t head,
                       int64_t at, F total, int64_t dim, float* out) {
    F acc[H][C];
    for (int h = 0; h < H; h++)
        for (int c = 0; c < C; c++) acc[h][c] = F{};
    for (int64_t r = 0; r < count; r++) {
        const float* p = (const float*)(weights + r) + head;
        F v[C];
        for (int c = 0; c < C; c++) v[c] = load_part(rows[r] + at + c * LANES, dim - at - c * LANES);
        for (int h = 0; h < H; h++) {
            const F w = splat(p[h]);
            for (int c = 0; c < C; c++) acc[h][c] = fma(w, v[c], acc[h][c]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int c = 0; c < C; c++)
            store_part(out + (head + h) * dim + at + c * LANES, acc[h][c] / splat(total[head + h]),
                       dim - at - c * LANES);
}
template <int H>
static void weigh_heads(const F* weights, const float* const* rows, int64_t count, int64_t head,
                        F total, int64_t dim, float* out) {
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        weigh_rows<H, 4>(weights, rows, count, head, at, total, dim, out);
    for (; at < dim; at += LANES) weigh_rows<H, 1>(weights, rows, count, head, at, total, dim, out);
}

// Up to sixteen heads of one token over `count` rows.
static void attend(const float* queries, int64_t heads, int64_t dim, const float* const* rows,
                   int64_t count, const float* sinks, bool bf16, float* out) {
    F* q = scratch<2, F>(dim);
    F* weights = scratch<3, F>(count + 1);
    heads_to_lanes(queries, heads, dim, q);
    dot_all(q, rows, count, dim, weights);
    const F scale = splat(1.0f / std::sqrt((float)dim)), sink = load_part(sinks, heads);
    F most = sink;
    for (int64_t r = 0; r < count; r++) {
        weights[r] *= scale;
        most = vmax(weights[r], most);
    }
    F total = vexp(sink - most);
    for (int64_t r = 0; r < count; r++) {
        const F w = vexp(weights[r] - most);
        total += w;
        weights[r] = bf16 ? round_bf16(w) : w;
    }
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) weigh_heads<4>(weights, rows, count, h, total, dim, out);
    for (; h < heads; h++) weigh_heads<1>(weights, rows, count, h, total, dim, out);
}

struct Source {
    const float* pool;
    int64_t none;  // the slot that stands for no row
    const int64_t* slots;
    int64_t width;
};

EXPORT void sparse_attention(const float* queries, int64_t tokens, int64_t heads, int64_t dim,
                             const float* window, int64_t window_none, const int64_t* window_slots,
                             int64_t window_width, const float* compressed, int64_t compressed_none,
                             const int64_t* compressed_slots, int64_t compressed_width,
                             const float* sinks, int64_t bf16, float* out, int64_t threads) {
    const Source sources[2] = {{window, window_none, window_slots, window_width},
                               {compressed, compressed_none, compressed_slots, compressed_width}};
    parallel(tokens, threads, [&](int64_t t) {
        const float** rows = scratch<0, const float*>(window_width + compressed_width);
        int64_t count = 0;
        for (const Source& s : sources)
            for (int64_t i = 0; i < s.width; i++) {
                const int64_t slot = s.slots[t * s.width + i];
                if (slot != s.none) rows[count++] = s.pool + slot * dim;
            }
        for (int64_t h = 0; h < heads; h += LANES) {
            const int64_t at = (t * heads + h) * dim;
            attend(queries + at, std::min(LANES, heads - h), dim, rows, count, sinks + h, bf16, out + at);
        }
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
                         int64_t dim, const float* pool, const int64_t* table_blocks,
                         int64_t max_blocks, int64_t per_block, const int64_t* rows,
                         const int64_t* visible, int64_t num_keys, int64_t bf16, float* scores,
                         int64_t threads) {
    const Table table{table_blocks, max_blocks, per_block};
    const int64_t blocks = (heads + LANES - 1) / LANES;
    parallel(tokens, threads, [&](int64_t t) {
        const int64_t seen = std::min(visible[t], num_keys);
        float* to = scores + t * num_keys;
        const float** keys = scratch<0, const float*>(seen + 1);
        for (int64_t k = 0; k < seen; k++) keys[k] = pool + std::max<int64_t>(0, table.slot(rows[t], k)) * dim;
        F* products = scratch<1, F>(seen + 1);
        F* q = scratch<2, F>(dim);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = b * LANES, count = std::min(LANES, heads - first);
            heads_to_lanes(queries + (t * heads + first) * dim, count, dim, q);
            dot_all(q, keys, seen, dim, products);
            const F per_head = load_part(weights + t * heads + first, count);
            for (int64_t k = 0; k < seen; k++) {
                F p = products[k];
                if (bf16) p = round_bf16(p);
                p = keep_nan(p, vmax(p, splat(0.0f))) * per_head;
                const float sum = sum_lanes(bf16 ? round_bf16(p) : p)[0];
                to[k] = b ? to[k] + sum : sum;
            }
        }
        for (int64_t k = seen; k < num_keys; k++) to[k] = -INFINITY;
    });
}

// The `top_k` best of n scores; a tie goes to the lower index; -inf is never chosen. Calls
// pick(index) in ascending order.
template <class Pick>
static void select_best(const float* scores, int64_t n, int64_t top_k, const Pick& pick) {
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
    const int64_t blocks = (n + size - 1) / size;
    for (int64_t r = 0; r < rows; r++, scores += n, chosen += n) {
        float* best = scratch<5, float>(blocks);
        for (int64_t b = 0; b < blocks; b++) {
            best[b] = -INFINITY;
            for (int64_t i = b * size; i < std::min(n, (b + 1) * size); i++)
                best[b] = std::max(best[b], scores[i]);
        }
        if (visible[r] > 0) best[(visible[r] - 1) / size] = INFINITY;
        std::memset(chosen, 0, n);
        select_best(best, blocks, num_blocks, [&](int64_t b) {
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
