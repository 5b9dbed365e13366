// Attention of consecutive tokens of one row in matrix tiles: they share the rows of their windows,
// which are unpacked and interleaved once. The bits are those of `attend`.
#pragma once

#include "attend.h"

#if defined(HAVE_TILES)

// Rows of all windows of a run: as rows of tiles, and as positions of the sum from the first row on
// and from the second, since two positions share a word.
struct SharedWindow {
    Operand rows;
    const uint32_t* from[2];
    int64_t panel_words[2];

    // Panel `c` of the values, from row `first` on.
    const uint32_t* panel(int64_t c, int64_t first) const {
        return from[first % 2] + c * panel_words[first % 2] + first / 2 * LANES;
    }
};

// Words of rows [first, count) as positions; see `Operand::as_positions`.
INLINE int64_t put_positions(const Operand& x, int64_t first, uint32_t* to) {
    const int64_t groups = x.depth() * TILE_HALVES, pairs = whole_groups(x.count - first) / 2;
    const auto at = [&](int64_t r, int64_t c) {
        return load_halves(x.tiles + r / LANES * groups + c / GROUP * TILE_HALVES + r % LANES * GROUP + c % GROUP);
    };
    for (int64_t c = 0; c < x.inner; c += LANES)
        for (int64_t pair = 0; pair < pairs; pair++, to += LANES) {
            const int64_t even = first + 2 * pair, odd = even + 1;
            const U low = even < x.count ? at(even, c) : U{}, high = odd < x.count ? at(odd, c) : U{};
            const U both = low | high << 16;
            std::memcpy(to, &both, 64);
        }
    return pairs * LANES;
}
INLINE SharedWindow share_window(const PoolRows& rows) {
    SharedWindow w{rows.unpack<7>(true), {}, {}};
    const int64_t words = w.rows.position_words();
    uint32_t* to = scratch<10, uint32_t>(2 * words);
    for (int i = 0; i < 2; i++) {
        w.from[i] = to + i * words;
        w.panel_words[i] = put_positions(w.rows, i, to + i * words);
    }
    return w;
}

// out[head, c] of up to sixteen heads: weights p times the values of `window` rows of the shared
// ones, from row `first` on, then of `values`.
static void multiply_values(const Operand& p, const SharedWindow& shared, int64_t first, int64_t window,
                            const Weight& values, float* out, int64_t dim) {
    const int64_t groups = window / GROUP, others = values.groups(), step = p.depth() * TILE_HALVES;
    float* sums = scratch<9, float>(512);
    configure_tiles(TILE_ROWS);
    for (int64_t heads = 0; heads < p.count; heads += TILE_ROWS) {
        const uint16_t* a = p.tiles + heads / TILE_ROWS * step;
        for (int64_t c = 0; c < dim / LANES; c += 2) {
            tile_product<1, 2>(a, 0, shared.panel(c, first), shared.panel(c + 1, first), groups, true, sums);
            if (others)
                tile_product<1, 2>(a + groups * TILE_HALVES, 0, values.panel(c), values.panel(c + 1), others,
                                   false, sums);
            for (int64_t h = 0; h < std::min(TILE_ROWS, p.count - heads); h++)
                for (int i = 0; i < 2; i++)
                    store(out + (heads + h) * dim + (c + i) * LANES, load(sums + i * 256 + h * LANES));
        }
    }
    _tile_release();
}

// Whether `attend_run` can take rows of such shapes.
INLINE bool can_share(int64_t heads, int64_t dim, int64_t window) {
    return tiles_ready() && heads % LANES == 0 && dim % GROUP == 0 && window % GROUP == 0;
}

// queries [tokens, heads, dim], exact in bfloat16; token i attends to rows [i, i + window) of `recent` and to those that
// `entries(i)` gives as rows of tiles. done(i, result [heads, dim]) takes each result.
template <class Entries, class Done>
static void attend_run(const float* queries, int64_t tokens, int64_t heads, int64_t dim,
                       const PoolRows& recent, int64_t window, const Entries& entries,
                       const float* sinks, const Done& done) {
    const SharedWindow shared = share_window(recent);  // whose places `entries` may overwrite
    const int64_t all = tokens * heads;
    const Operand q = Operand::make<1>(all, dim, true);
    for (int64_t h = 0; h < all; h++) q.put(h, queries + h * dim);
    const Weight asked = q.as_outputs(scratch<11, uint32_t>(q.output_words()));
    float* scores = scratch<12, float>(recent.count() * all);
    multiply(shared.rows, asked, scores, all);
    const float scale = 1.0f / std::sqrt((float)dim);
    float* out = scratch<13, float>(heads * dim);
    float* totals = scratch<5, float>(heads);
    for (int64_t t = 0; t < tokens; t++) {
        const Operand attended = entries(t);
        const int64_t n = window + attended.count;
        float* weights = scratch<3, float>(n * heads);
        for (int64_t r = 0; r < window; r++)
            std::memcpy(weights + r * heads, scores + (t + r) * all + t * heads, heads * sizeof(float));
        const Weight own{asked.panel(t * heads / LANES), BF16, dim, heads};
        if (attended.count) multiply(attended, own, weights + window * heads, heads);
        for (int64_t h = 0; h < heads; h += LANES)
            store(totals + h, weigh(weights + h, n, heads, scale, load(sinks + h), true));
        const Operand p = Operand::make<4>(heads, n, true);
        put_weights(weights, n, heads, p);
        const Weight values = attended.as_positions(scratch<14, uint32_t>(attended.position_words()));
        multiply_values(p, shared, t, window, values, out, dim);
        for (int64_t h = 0; h < heads; h++)
            for (int64_t c = 0; c < dim; c += LANES) {
                float* at = out + h * dim + c;
                store(at, load(at) / totals[h]);
            }
        done(t, out);
    }
}

#endif
