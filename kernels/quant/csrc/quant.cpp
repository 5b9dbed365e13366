// Linears and roundings. Contracts: kernels/quant/linear.py and rounding.py.
#include "gemm.h"

constexpr int64_t BLOCK_ROWS = 96;  // rows prepared at once: they stay in the level-2 cache

EXPORT void pack_weight(const float* w, int64_t outer, int64_t inner, int64_t kind, uint32_t* to) {
    Weight shape{to, (Kind)kind, inner, outer};
    for (int64_t p = 0; p < shape.panels(); p++)
        for (int64_t k = 0; k < shape.pairs(); k++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t n = p * LANES + lane;
                float pair[2];
                for (int64_t j = 0; j < 2; j++)
                    pair[j] = n < outer && 2 * k + j < inner ? w[n * inner + 2 * k + j] : 0.0f;
                uint32_t bits[2];
                std::memcpy(bits, pair, 8);
                uint32_t* at = to + p * shape.panel_words() + k * LANES * (kind == FP32 ? 2 : 1);
                if (kind == FP32)
                    at[lane] = bits[0], at[LANES + lane] = bits[1];
                else
                    at[lane] = bits[0] >> 16 | (bits[1] & 0xffff0000u);
            }
}

// `groups` linears of equal shape side by side: inputs, weights and outputs follow one another.
EXPORT void linear(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weight,
                   int64_t kind, int64_t inner, int64_t outer, int64_t groups, int64_t rounding,
                   int64_t bf16_out, float* out, int64_t out_stride, int64_t threads) {
    const Weight all{weight, (Kind)kind, inner, outer};
    const int64_t stride = row_stride(inner);
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        const int64_t count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        float* prepared = scratch<0, float>(groups * count * stride);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < count; r++)
                prepare_row(x + (first + r) * x_stride + g * inner, inner, (Rounding)rounding,
                            prepared + (g * count + r) * stride);
        // One chunk of panels a thread and group: the weights are read once a block of rows.
        const int64_t panels = all.panels();
        const int64_t chunk = threads > 1 ? (panels / threads + TILE_PANELS) / TILE_PANELS * TILE_PANELS : panels;
        const int64_t chunks = (panels + chunk - 1) / chunk;
        parallel(groups * chunks, threads, [&](int64_t item) {
            const int64_t g = item / chunks, begin = item % chunks * chunk;
            const int64_t end = begin + chunk < panels ? begin + chunk : panels;
            const Rows in{prepared + g * count * stride, stride};
            multiply_panels(in, count, all.part(g), begin, end,
                            out + first * out_stride + g * outer, out_stride, bf16_out);
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
