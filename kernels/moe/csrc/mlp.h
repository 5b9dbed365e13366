// One expert's rows through both of its products, in pieces of which none looks at another.
#pragma once

#include "gemm.h"

constexpr int64_t UNIT = 32;  // channels: an FP8 group of the second product's input
constexpr int64_t STRETCH_UNITS = 4;

struct Mlp {
    Weight w13, w2;  // gate and up side by side
    float limit;
    bool bf16;
    Mlp part(int64_t index) const { return {w13.part(index), w2.part(index), limit, bf16}; }
    // Pieces of the first product; gate and up of odd sizes share panels and stay together.
    bool is_even() const { return w2.inner % UNIT == 0; }
    int64_t units() const { return is_even() ? w2.inner / UNIT : 1; }
    bool tiles_fit() const { return w13.kind != FP32 && w2.kind != FP32; }
};

INLINE Mlp make_mlp(const uint32_t* w13, int64_t kind13, const uint32_t* w2, int64_t kind2,
                    int64_t hidden, int64_t inter, float limit, int64_t bf16) {
    return {{w13, (Kind)kind13, hidden, 2 * inter}, {w2, (Kind)kind2, inter, hidden}, limit, !!bf16};
}

// Inputs of the second product: floats or, if set, tiles.
struct Middle {
    float* rows = nullptr;
    uint16_t* tiles = nullptr;
    int64_t stride = 0;
};

// Rows for one expert: its slots `order` of `shares` and `out`, or every row and no shares.
struct Part {
    Mlp mlp;
    Rows x;
    int64_t rows;
    const int64_t* order;
    const float* shares;
    float* out;
    Middle middle;
    uint16_t* out_halves = nullptr;  // instead of `out`, of tiles
    const uint16_t* halves = nullptr;  // of all tokens, row by row: `x` is to be made of them
    int64_t first_row = 0;             // without `order` and index

    int64_t cost() const { return rows * mlp.w2.inner; }
    float share(int64_t r) const { return order ? shares[order[r]] : 1.0f; }
    // Column `c` of the rows' results.
    Target target(int64_t c) const {
        const int64_t width = mlp.w2.outer;
        const int64_t at = (order ? 0 : first_row) * width + c;
        Target to{out + at, width, mlp.bf16, order};
        if (out_halves) to.halves = out_halves + at;
        return to;
    }
    int64_t input_halves() const { return tile_halves(rows, mlp.w13.groups()); }
    int64_t middle_halves() const { return tile_halves(rows, mlp.w2.groups()); }
    // Makes `x` of `halves`, in `input_halves` of room.
    void fill_tiles(uint16_t* tiles) {
        const int64_t groups = mlp.w13.groups();
        for (int64_t r = 0; r < rows; r++) {
            const uint16_t* from = halves + (x.index ? x.index[r] : first_row + r) * x.stride;
            uint16_t* to = tiles + tile_place(r, groups);
            for (int64_t g = 0; g < groups; g++)
                std::memcpy(to + g * TILE_HALVES, from + g * GROUP, GROUP * sizeof(uint16_t));
        }
        x.tiles = tiles;
    }
    Part block(int64_t first, int64_t count) const {
        Part part = *this;
        part.rows = count;
        if (order) {
            part.order += first, part.x.index += first;
        } else {
            part.first_row += first;
            if (x.data) part.x.data += first * x.stride;
        }
        return part;
    }
};

// silu(min(gate, limit)) · clamp(up, ±limit) · share for 16 channels.
INLINE F activate(const Mlp& e, F gate, F up, bool has_share, float share) {
    const F limit = splat(e.limit);
    gate = keep_nan(gate, vmin(gate, limit));
    up = keep_nan(up, vmin(vmax(up, -limit), limit));
    F h = vsigmoid(gate) * gate * up;
    if (has_share) h = h * share;
    return e.bf16 ? round_bf16(h) : h;
}

// The group of channels [k, k + 32) of row r, from its gate and up.
INLINE void put_middle(const Part& part, int64_t r, int64_t k, const F (&gate)[2], const F (&up)[2]) {
    const Mlp& e = part.mlp;
    F h[2];
    for (int i = 0; i < 2; i++)
        h[i] = activate(e, gate[i], up[i], part.order != nullptr, part.share(r));
    if (e.bf16) round_fp8_32(h[0], h[1]);
    if (part.middle.tiles) {
        const int64_t groups = e.w2.groups();
        store_halves(part.middle.tiles + tile_place(r, groups) + k / GROUP * TILE_HALVES, h[0], h[1]);
    } else {
        float* to = part.middle.rows + r * part.middle.stride + k;
        store(to, h[0]), store(to + LANES, h[1]);
    }
}
INLINE void put_middle(const Part& part, int64_t r, int64_t k, const float* gate, const float* up) {
    const int64_t left = part.mlp.w2.inner - k;
    F a[2] = {}, b[2] = {};
    for (int64_t i = 0; i < 2 && left > i * LANES; i++)
        a[i] = load_part(gate + i * LANES, left - i * LANES), b[i] = load_part(up + i * LANES, left - i * LANES);
    put_middle(part, r, k, a, b);
}

#if defined(HAVE_TILES)
// `gate_up` in tiles, whose sums it reads where they are.
static void gate_up_tiles(const Part& part, int64_t first, int64_t end) {
    const Mlp& e = part.mlp;
    const int64_t row_tiles = (part.rows + TILE_ROWS - 1) / TILE_ROWS, panels = UNIT / LANES;
    float *gates = scratch<9, float>(2 * row_tiles * 512), *ups = gates + row_tiles * 512;
    configure_tiles(std::min(part.rows, TILE_ROWS));
    Slices weights(e.w13, first * panels, end * panels, row_tiles, e.w2.inner / LANES);
    for (int64_t unit = first; unit < end; unit++) {
        tile_sums(part.x.tiles, row_tiles, e.w13.groups(), weights, gates);
        tile_sums(part.x.tiles, row_tiles, e.w13.groups(), weights, ups);
        for (int64_t r = 0; r < part.rows; r++) {
            const int64_t at = r / TILE_ROWS * 512 + r % TILE_ROWS * LANES;
            const F gate[2] = {round_bf16(load(gates + at)), round_bf16(load(gates + at + 256))};
            const F up[2] = {round_bf16(load(ups + at)), round_bf16(load(ups + at + 256))};
            put_middle(part, r, unit * UNIT, gate, up);
        }
    }
    _tile_release();
}
#endif

// Units [first, end) of the first product, and what they become for the second.
static void gate_up(const Part& part, int64_t first, int64_t end) {
    const Mlp& e = part.mlp;
    const int64_t inter = e.w2.inner;
    if (!e.is_even()) {
        float* both = scratch<6, float>(part.rows * 2 * inter);
        multiply_panels(part.x, part.rows, e.w13, 0, e.w13.panels(), both, 2 * inter, e.bf16);
        for (int64_t r = 0; r < part.rows; r++)
            for (int64_t k = 0; k < inter; k += GROUP)
                put_middle(part, r, k, both + r * 2 * inter + k, both + r * 2 * inter + inter + k);
        return;
    }
#if defined(HAVE_TILES)
    if (part.x.tiles && e.bf16) return gate_up_tiles(part, first, end);
#endif
    // Gate and up lie apart: some units of each by turns, so that both are read in long stretches.
    const int64_t panels = UNIT / LANES, up = inter / LANES;
    const int64_t some = std::min(part.rows > TILE_ROWS ? 1 : STRETCH_UNITS, end - first);
    const int64_t width = some * UNIT;
    float* both = scratch<6, float>(part.rows * 2 * width);
    for (int64_t unit = first; unit < end; unit += some) {
        const int64_t last = std::min(unit + some, end), p = unit * panels, q = last * panels;
        multiply_panels(part.x, part.rows, e.w13, p, q, both, 2 * width, e.bf16);
        multiply_panels(part.x, part.rows, e.w13, up + p, up + q, both + width, 2 * width, e.bf16);
        for (int64_t r = 0; r < part.rows; r++)
            for (int64_t u = unit; u < last; u++) {
                const float* gate = both + r * 2 * width + (u - unit) * UNIT;
                put_middle(part, r, u * UNIT, gate, gate + width);
            }
    }
}

// Panels [first, end) of the second product, to where the rows belong.
static void down(const Part& part, int64_t first, int64_t end) {
    const Rows in{part.middle.rows, part.middle.stride, nullptr, part.middle.tiles};
    multiply_panels(in, part.rows, part.mlp.w2, first, end, part.target(first * LANES));
}
