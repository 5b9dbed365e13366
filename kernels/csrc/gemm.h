// Matrix products in which every output element is summed over K in one order, alone or among
// many rows: a chain of fused multiply-adds for every 1,024 inner positions, for each pair of them
// first the odd one, then the even one; the chains' results are added in order.
//
// Packed weights: panels of 16 outputs; a panel holds for each pair of inner positions either 16
// words of two bfloat16 (low half: the even position), or 16 floats of the even position, then 16
// of the odd one. Inner size and outputs are padded with zeros.
//
// Not with the bfloat16 dot product instruction: it starts every other cycle, so two FMAs that
// unpack on the way are as fast for one row and twice as fast for many.
#pragma once

#include "lanes.h"

enum Kind : int64_t { BF16 = 0, FP32 = 1 };
enum Rounding : int64_t { NONE = 0, TO_BF16 = 1, TO_FP8 = 2 };  // FP8 in groups of 32

struct Weight {
    const uint32_t* data;
    Kind kind;
    int64_t inner, outer;
    int64_t pairs() const { return (inner + 1) / 2; }
    int64_t panels() const { return (outer + LANES - 1) / LANES; }
    int64_t panel_words() const { return pairs() * LANES * (kind == FP32 ? 2 : 1); }
    int64_t words() const { return panels() * panel_words(); }
    Weight part(int64_t index) const { return {data + index * words(), kind, inner, outer}; }
};

INLINE int64_t row_stride(int64_t inner) { return (inner + 31) / 32 * 32; }

// A row of `inner` values, rounded, zeros behind it up to `row_stride`.
INLINE void prepare_row(const float* x, int64_t inner, Rounding rounding, float* row) {
    for (int64_t k = 0; k < inner; k += 32) {
        F a, b{};
        if (k + 32 <= inner) {
            a = load(x + k), b = load(x + k + LANES);
        } else {
            a = load_part(x + k, inner - k);
            if (inner - k > LANES) b = load_part(x + k + LANES, inner - k - LANES);
        }
        if (rounding == TO_FP8) round_fp8_32(a, b);
        if (rounding == TO_BF16) a = round_bf16(a), b = round_bf16(b);
        store(row + k, a), store(row + k + LANES, b);
    }
}

// Rows for a product: a row is `stride` floats behind the one before.
struct Rows {
    const float* data;
    int64_t stride;
};

INLINE I weight_bits(const uint32_t* w) {
    I v;
    std::memcpy(&v, w, 64);
    return v;
}

constexpr int64_t CHAIN_PAIRS = 512;

// R rows times C panels over pairs [first, end); acc[r][c] lanes are outputs.
template <int R, int C, Kind kind>
INLINE void chain(const Rows& x, int64_t first, int64_t end, int64_t step, const uint32_t* panel,
                  F (&acc)[R][C]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = F{};
    for (int64_t k = first; k < end; k++) {
        F w[C];
        for (int c = 0; c < C; c++)
            w[c] = kind == FP32 ? load((const float*)(panel + c * step + (2 * k + 1) * LANES))
                                : (F)(weight_bits(panel + c * step + k * LANES) & (int32_t)0xffff0000);
        for (int r = 0; r < R; r++) {
            F a = splat(x.data[r * x.stride + 2 * k + 1]);
            for (int c = 0; c < C; c++) acc[r][c] = fma(a, w[c], acc[r][c]);
        }
        for (int c = 0; c < C; c++)
            w[c] = kind == FP32 ? load((const float*)(panel + c * step + 2 * k * LANES))
                                : (F)(weight_bits(panel + c * step + k * LANES) << 16);
        for (int r = 0; r < R; r++) {
            F a = splat(x.data[r * x.stride + 2 * k]);
            for (int c = 0; c < C; c++) acc[r][c] = fma(a, w[c], acc[r][c]);
        }
    }
}

template <int R, int C, Kind kind>
INLINE void tile(const Rows& x, int64_t pairs, int64_t step, const uint32_t* panel, F (&sum)[R][C]) {
    chain<R, C, kind>(x, 0, pairs < CHAIN_PAIRS ? pairs : CHAIN_PAIRS, step, panel, sum);
    for (int64_t first = CHAIN_PAIRS; first < pairs; first += CHAIN_PAIRS) {
        F acc[R][C];
        const int64_t end = first + CHAIN_PAIRS < pairs ? first + CHAIN_PAIRS : pairs;
        chain<R, C, kind>(x, first, end, step, panel, acc);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] += acc[r][c];
    }
}

template <int R, int C>
static void tile_out(const Rows& x, const Weight& w, int64_t panel, float* out, int64_t stride,
                     bool bf16) {
    F acc[R][C];
    const uint32_t* data = w.data + panel * w.panel_words();
    if (w.kind == FP32)
        tile<R, C, FP32>(x, w.pairs(), w.panel_words(), data, acc);
    else
        tile<R, C, BF16>(x, w.pairs(), w.panel_words(), data, acc);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            F v = bf16 ? round_bf16(acc[r][c]) : acc[r][c];
            int64_t first = (panel + c) * LANES;
            store_part(out + r * stride + first, v, w.outer - first);
        }
}

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 4, WIDE_PANELS = 8;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 2, WIDE_PANELS = 2;
#endif

template <int R, int C>
static void tile_panels(const Rows& x, const Weight& w, int64_t panel, int64_t count, float* out,
                        int64_t stride, bool bf16) {
    if (count == C) return tile_out<R, C>(x, w, panel, out, stride, bf16);
    if constexpr (C > 1) tile_panels<R, C - 1>(x, w, panel, count, out, stride, bf16);
}
template <int R>
static void tile_rows(Rows x, int64_t rows, const Weight& w, int64_t panel, int64_t count,
                      float* out, int64_t stride, bool bf16) {
    for (; rows >= R; rows -= R) {
        tile_panels<R, R == 1 ? WIDE_PANELS : TILE_PANELS>(x, w, panel, count, out, stride, bf16);
        x.data += R * x.stride, out += R * stride;
    }
    if constexpr (R > 1)
        if (rows) tile_rows<R - 1>(x, rows, w, panel, count, out, stride, bf16);
}

// out[rows, outer] = x · w, panels [first, end) only; no threads in here.
static void multiply_panels(const Rows& x, int64_t rows, const Weight& w, int64_t first,
                            int64_t end, float* out, int64_t stride, bool bf16) {
    const int64_t step = rows == 1 ? WIDE_PANELS : TILE_PANELS;
    for (int64_t panel = first; panel < end; panel += step) {
        int64_t count = end - panel < step ? end - panel : step;
        tile_rows<TILE_ROWS>(x, rows, w, panel, count, out, stride, bf16);
    }
}
