// Linears and roundings. Contracts: kernels/quant/linear.py and rounding.py.
#include "gemm.h"
#include "program.h"

#include <sys/mman.h>

constexpr int64_t BLOCK_ROWS = 96, BLOCK_TILE_ROWS = 512;  // prepared at once: they stay in level 2
constexpr int64_t CHUNKS = 4;        // of a weight, for each thread
constexpr int64_t LARGE = 1 << 18;   // floats of a result, of which a cache of level 2 keeps nothing

// Asks for huge pages for memory that is not yet written: page tables slow down a stream of weights.
EXPORT void advise_huge(char* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, first = ((uintptr_t)data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)data + bytes) / page * page;
    if (end > first) (void)madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}

// [outer, inner] floats to BF16, whose values must fit, or FP32.
EXPORT void pack_weight(const float* w, int64_t outer, int64_t inner, int64_t kind, uint32_t* to) {
    const Weight shape{to, (Kind)kind, inner, outer};
    std::memset(to, 0, shape.words() * 4);
    for (int64_t n = 0; n < outer; n++) {
        uint32_t* lane = to + n / LANES * shape.panel_words() + n % LANES;
        for (int64_t k = 0; k < inner; k++) {
            uint32_t bits;
            std::memcpy(&bits, w + n * inner + k, 4);
            if (kind == FP32)
                lane[k * LANES] = bits;
            else
                lane[k / 2 * LANES] |= k % 2 ? bits & 0xffff0000u : bits >> 16;
        }
    }
}

// Released codes to FP4 (two in a byte, the even position in the low half) or FP8, with a scale for
// each row and 32 positions: [outer, inner / 32]. Sets `refused` if a scale is too far from 1 for
// sums of bfloat16 to be exact, or a code is not a number; `to` is then of no use.
EXPORT void pack_codes(const uint8_t* codes, const uint8_t* scales, int64_t outer, int64_t inner,
                       int64_t kind, uint32_t* to, int64_t* refused) {
    const Weight shape{to, (Kind)kind, inner, outer};
    const int64_t bytes = kind == FP4 ? inner / 2 : inner, groups = shape.groups();
    const int shift = kind == FP4 ? 0 : E4M3_SHIFT;
    std::memset(to, 0, shape.words() * 4);
    for (int64_t n = 0; n < outer; n++) {
        const int64_t lane = n % LANES;
        uint32_t* panel = to + n / LANES * shape.panel_words();
        for (int64_t g = 0; g < groups; g++) {
            uint8_t code[GROUP] = {};
            bool any = false;
            for (int64_t i = 0; i < GROUP && g * GROUP + i < inner; i++) {
                const int64_t k = g * GROUP + i;
                code[i] = kind == FP4 ? codes[n * bytes + k / 2] >> (k % 2 * 4) & 15
                                      : codes[n * bytes + k];
                any |= (code[i] & (kind == FP4 ? 7 : 127)) != 0;
                if (kind == FP8 && (code[i] & 127) == 127) *refused = 1;
            }
            const int scale = any ? scales[n * groups + g] : 127;
            if (scale < 127 - 100 || scale > 127 + 100) *refused = 1;
            uint8_t* to_scales = (uint8_t*)(kind == FP4 ? scales_at<FP4>(panel, g)
                                                        : scales_at<FP8>(panel, g));
            to_scales[lane] = (uint8_t)(scale + shift);
            if (kind == FP4) {
                uint32_t* group = (uint32_t*)group_at<FP4>(panel, g);
                for (int64_t p = 0; p < PAIRS; p++)
                    group[p / 4 * LANES + lane] |= (uint32_t)code[2 * p] << p % 4 * 4 |
                                                   (uint32_t)code[2 * p + 1] << (p % 4 * 4 + 16);
            } else {
                uint8_t* group = (uint8_t*)group_at<FP8>(panel, g);
                for (int64_t k = 0; k < GROUP; k++)
                    group[k / 2 * 2 * LANES + 2 * lane + k % 2] = code[k];
            }
        }
    }
}

// `groups` linears of equal shape side by side: inputs, weights and outputs follow one another.
EXPORT void linear(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weight,
                   int64_t kind, int64_t inner, int64_t outer, int64_t groups, int64_t rounding,
                   int64_t bf16_out, float* out, int64_t out_stride, int64_t threads) {
    const Weight all{weight, (Kind)kind, inner, outer};
    const int64_t stride = row_stride(inner), panels = all.panels(), depth = all.groups();
    if (groups * panels * depth * GROUP * (1 + std::min(rows, TILE_ROWS)) < MIN_WORK) threads = 1;
    const bool in_tiles = tiles_pay(rows, all) &&
                          (rounding != NONE || are_halves(x, x_stride, rows, groups * inner));
    const int64_t block = in_tiles ? BLOCK_TILE_ROWS : BLOCK_ROWS;
    for (int64_t first = 0; first < rows; first += block) {
        const int64_t count = std::min(block, rows - first);
        const int64_t halves = in_tiles ? tile_halves(count, depth) : 0;
        uint16_t* tiles = in_tiles ? scratch<1, uint16_t>(groups * halves) : nullptr;
        float* floats = in_tiles ? nullptr : scratch<0, float>(groups * count * stride);
        parallel((count + TILE_ROWS - 1) / TILE_ROWS, threads, [&](int64_t tile) {
            for (int64_t g = 0; g < groups; g++)
                for (int64_t r = tile * TILE_ROWS; r < std::min(count, (tile + 1) * TILE_ROWS); r++) {
                    const float* row = x + (first + r) * x_stride + g * inner;
                    if (in_tiles)
                        prepare_halves(row, inner, (Rounding)rounding, TILE_HALVES,
                                       tiles + g * halves + tile_place(r, depth));
                    else
                        prepare_row(row, inner, (Rounding)rounding, floats + (g * count + r) * stride);
                }
        });
        const int64_t even = (panels / (threads * CHUNKS) + 2) / 2 * 2;
        const int64_t chunk = threads > 1 ? even : panels;
        const int64_t chunks = (panels + chunk - 1) / chunk;
        parallel(groups * chunks, threads, [&](int64_t item) {
            const int64_t g = item / chunks, begin = item % chunks * chunk;
            const Rows in{in_tiles ? nullptr : floats + g * count * stride, stride, nullptr,
                          in_tiles ? tiles + g * halves : nullptr};
            Target to{out + first * out_stride + g * outer + begin * LANES, out_stride, !!bf16_out};
            to.is_large = rows * out_stride >= LARGE;
            multiply_panels(in, count, all.part(g), begin, std::min(begin + chunk, panels), to);
        });
    }
}

EXPORT void round_rows_fp8(const float* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 32) {
        F a = load(x + i), b = load(x + i + LANES);
        round_fp8_32(a, b);
        store(out + i, a), store(out + i + LANES, b);
    }
}
EXPORT void round_rows_fp4_ue8m0(const float* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 32) {
        F a = load(x + i), b = load(x + i + LANES);
        round_fp4_ue8m0_32(a, b);
        store(out + i, a), store(out + i + LANES, b);
    }
}
EXPORT void round_rows_fp4_e4m3(const float* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += LANES) store(out + i, round_fp4_e4m3_16(load(x + i)));
}

CALLABLE(linear)
