// Matrix products in which every output element is summed over K in one order, alone or among many
// rows. For every 32 positions of K, from zero: a chain of fused multiply-adds over the even ones, a
// chain over the odd ones, their sum, times the scale of the group (a power of two). These are
// added in order. (decisions/0007)
//
// That is what the matrix tiles (AMX) do, so they serve rows that are exact in bfloat16, if there
// are enough of them; like them, everything here flushes denormals.
#pragma once

#include "tiles.h"

enum Rounding : int64_t { NONE = 0, TO_BF16 = 1, TO_FP8 = 2 };  // FP8 in groups of 32

constexpr int64_t MIN_TILE_ROWS = 4;
constexpr int64_t MIN_WORK = 30000;  // 16 weights at a time, once and once a row: for two threads

INLINE int64_t row_stride(int64_t inner) { return (inner + GROUP - 1) / GROUP * GROUP; }

// Positions [k, k + 32) of a row of `inner` values, rounded, with zeros behind it.
INLINE void prepare_group(const float* x, int64_t k, int64_t inner, Rounding rounding, F& a, F& b) {
    a = b = F{};
    if (k + GROUP <= inner) {
        a = load(x + k), b = load(x + k + LANES);
    } else {
        a = load_part(x + k, inner - k);
        if (inner - k > LANES) b = load_part(x + k + LANES, inner - k - LANES);
    }
    if (rounding == TO_FP8) round_fp8_32(a, b);
    if (rounding == TO_BF16) a = round_bf16(a), b = round_bf16(b);
}
// A row, rounded, zeros behind it up to `row_stride`.
INLINE void prepare_row(const float* x, int64_t inner, Rounding rounding, float* row) {
    for (int64_t k = 0; k < inner; k += GROUP) {
        F a, b;
        prepare_group(x, k, inner, rounding, a, b);
        store(row + k, a), store(row + k + LANES, b);
    }
}
// The same in bfloat16, if it is exact there; groups are `step` halves apart.
INLINE void prepare_halves(const float* x, int64_t inner, Rounding rounding, int64_t step,
                           uint16_t* to) {
    for (int64_t k = 0; k < inner; k += GROUP, to += step) {
        F a, b;
        prepare_group(x, k, inner, rounding, a, b);
        store_halves(to, a, b);
    }
}
// Whether rows are exact in bfloat16.
static bool are_halves(const float* x, int64_t stride, int64_t rows, int64_t inner) {
    U low{};
    for (int64_t r = 0; r < rows; r++, x += stride)
        for (int64_t k = 0; k < inner; k += LANES) low |= (U)load_part(x + k, inner - k);
    for (int i = 0; i < LANES; i++)
        if (low[i] & 0xffffu) return false;
    return true;
}

// Whether tiles are the faster way for so many rows, if these are exact in bfloat16.
static bool tiles_pay(int64_t rows, const Weight& w) {
    const int64_t least = w.kind == BF16 ? 2 : w.kind == FP4 ? MIN_TILE_ROWS : 2 * MIN_TILE_ROWS;
    return rows >= least && w.kind != FP32 && tiles_ready();
}

// Rows for a product: floats, or, if `tiles` is set, tiles of 16 rows of bfloat16 (see tiles.h).
struct Rows {
    const float* data;
    int64_t stride;
    const int64_t* index = nullptr;  // row r is the index[r]-th
    const uint16_t* tiles = nullptr;
    const float* row(int64_t r) const { return data + (index ? index[r] : r) * stride; }
};

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 8;  // that share what is unpacked: two chains and a sum in registers
#else
constexpr int MAX_ROWS = 2;
#endif
constexpr int64_t AHEAD_WORDS = 768;  // to prefetch: panels follow one another in memory

INLINE void prefetch(const uint32_t* p, int64_t words) {
    for (int64_t i = 0; i < words; i += LANES) __builtin_prefetch(p + AHEAD_WORDS + i);
}

// R rows times a panel; lanes of acc are outputs.
template <Kind kind, int R>
INLINE void panel_rows(const float* const (&x)[R], const uint32_t* panel, int64_t groups, F (&acc)[R]) {
    for (int r = 0; r < R; r++) acc[r] = F{};
    for (int64_t g = 0; g < groups; g++) {
        const uint32_t* group = group_at<kind>(panel, g);
        prefetch(group, group_words(kind));
        F even[R], odd[R];
        for (int r = 0; r < R; r++) even[r] = odd[r] = F{};
        for (int64_t v = 0; v < 4; v++) {
#pragma GCC unroll 4
            for (int64_t j = 0; j < 4; j++) {
                const int64_t k = g * GROUP + 8 * v + 2 * j;
                F a, b;
                unpack_pair<kind>(group, v, j, a, b);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    even[r] = fma(splat(x[r][k]), a, even[r]);
                    odd[r] = fma(splat(x[r][k + 1]), b, odd[r]);
                }
            }
        }
        const F scale = has_scale(kind) ? load_scales(scales_at<kind>(panel, g)) : F{};
        for (int r = 0; r < R; r++) {
            const F sum = even[r] + odd[r];
            acc[r] = has_scale(kind) ? fma(sum, scale, acc[r]) : acc[r] + sum;
        }
    }
}

template <Kind kind, int R>
static void some_rows(const Rows& rows, int64_t first, const uint32_t* panel, int64_t groups,
                      const Target& to, int64_t width) {
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.row(first + r);
    F acc[R];
    panel_rows<kind, R>(x, panel, groups, acc);
    for (int r = 0; r < R; r++)
        store_part(to.row(first + r), to.bf16 ? round_bf16(acc[r]) : acc[r], width);
}
template <Kind kind, int R>
static void all_rows(const Rows& rows, int64_t first, int64_t count, const uint32_t* panel,
                     int64_t groups, const Target& to, int64_t width) {
    for (; count - first >= R; first += R) some_rows<kind, R>(rows, first, panel, groups, to, width);
    if constexpr (R > 1)
        if (first < count) all_rows<kind, R - 1>(rows, first, count, panel, groups, to, width);
}

// out[r, c] = row r · output 16 · first + c, of panels [first, end) only; no threads in here.
static void multiply_panels(const Rows& x, int64_t rows, const Weight& w, int64_t first,
                            int64_t end, const Target& out) {
    const Denormals flushed;
    if (x.tiles) return multiply_tiles(x.tiles, rows, w, first, end, out);
    const int64_t groups = w.groups();
    // Unpacking once, for more rows than share it in registers; the bits are the same.
    const bool expands = has_scale(w.kind) && rows > MAX_ROWS;
    uint32_t* room = expands ? scratch<8, uint32_t>(groups * group_words(BF16)) : nullptr;
    for (int64_t panel = first; panel < end; panel++) {
        const int64_t width = w.outer - panel * LANES;
        Target to = out;
        to.data += (panel - first) * LANES;
        const uint32_t* data = w.panel(panel);
        if (expands) expand_groups(w, panel, 0, groups, room);
        if (expands)
            all_rows<BF16, MAX_ROWS>(x, 0, rows, room, groups, to, width);
        else if (w.kind == FP4)
            all_rows<FP4, MAX_ROWS>(x, 0, rows, data, groups, to, width);
        else if (w.kind == FP8)
            all_rows<FP8, MAX_ROWS>(x, 0, rows, data, groups, to, width);
        else if (w.kind == FP32)
            all_rows<FP32, MAX_ROWS>(x, 0, rows, data, groups, to, width);
        else
            all_rows<BF16, MAX_ROWS>(x, 0, rows, data, groups, to, width);
    }
}
static void multiply_panels(const Rows& x, int64_t rows, const Weight& w, int64_t first,
                            int64_t end, float* out, int64_t stride, bool bf16) {
    multiply_panels(x, rows, w, first, end, Target{out, stride, bf16});
}
