// Operands of attention's products: rows of a pool, queries, weights. In bfloat16 and in tiles
// (csrc/tiles.h) where all values are exact there and the machine has them, else floats; the bits
// of the products are the same.
#pragma once

#include "cache_row.h"
#include "gemm.h"

INLINE int64_t whole_groups(int64_t n) { return (n + GROUP - 1) / GROUP * GROUP; }

// x[j][i] for x[i][j].
INLINE void transpose(U (&x)[LANES]) {
    const I low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const I high{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        U y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + 8], low);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + 8], high);
        }
        std::memcpy(x, y, sizeof(y));
    }
}
// [count, inner], zeros behind each row up to whole groups of 32.
struct Operand {
    int64_t count, inner;
    uint16_t* tiles;  // or null
    float* floats;

    int64_t depth() const { return whole_groups(inner) / GROUP; }
    Rows rows() const { return {floats, depth() * GROUP, nullptr, tiles}; }
    uint16_t* halves(int64_t r, int64_t group) const {
        return tiles + tile_place(r, depth()) + group * TILE_HALVES;
    }
    float* row(int64_t r) const { return floats + r * depth() * GROUP; }

    // Room for it: of its own for every tag.
    template <int Tag>
    static Operand make(int64_t count, int64_t inner, bool in_tiles) {
        Operand x{count, inner, nullptr, nullptr};
        if (in_tiles)
            x.tiles = scratch<Tag, uint16_t>(tile_halves(whole_groups(count), x.depth()));
        else
            x.floats = scratch<Tag, float>(count * x.depth() * GROUP);
        return x;
    }
    void put(int64_t r, const float* x) const {
        if (tiles)
            prepare_halves(x, inner, NONE, TILE_HALVES, halves(r, 0));
        else
            prepare_row(x, inner, NONE, row(r));
    }
    // Rows as outputs of a weight: of what its room must hold, see `words`.
    Weight as_outputs(uint32_t* to) const {
        const Weight w{to, tiles ? BF16 : FP32, inner, count};
        for (int64_t first = 0; first < w.panels() * LANES; first += LANES)
            for (int64_t g = 0; g < depth(); g++)
                for (int part = 0; part < (tiles ? 1 : 2); part++, to += LANES * LANES) {
                    U x[LANES];
                    for (int64_t i = 0; i < LANES; i++) {
                        x[i] = U{};
                        if (first + i >= count) continue;
                        const void* from = tiles ? (const void*)halves(first + i, g)
                                                 : row(first + i) + g * GROUP + part * LANES;
                        std::memcpy(&x[i], from, 64);
                    }
                    transpose(x);
                    std::memcpy(to, x, sizeof(x));
                }
        return w;
    }
    // Rows as positions of the sum. Tiles must hold zeros behind the last row: see `end`.
    Weight as_positions(uint32_t* to) const {
        const Weight w{to, tiles ? BF16 : FP32, count, inner};
        const int64_t groups = depth() * TILE_HALVES;
        for (int64_t c = 0; c < w.panels() * LANES; c += LANES)
            for (int64_t r = 0; r < whole_groups(count); r += LANES) {
                if (tiles) {
                    const uint16_t* from = tiles + r / LANES * groups + c / GROUP * TILE_HALVES + c % GROUP;
#pragma GCC unroll 8
                    for (int pair = 0; pair < 8; pair++, to += LANES) {
                        const U even = load_halves(from + 2 * pair * GROUP);
                        const U odd = load_halves(from + (2 * pair + 1) * GROUP);
                        const U both = even | odd << 16;
                        std::memcpy(to, &both, 64);
                    }
                } else {
                    for (int64_t i = r; i < r + LANES; i++, to += LANES)
                        store((float*)to, i < count ? load(row(i) + c) : F{});
                }
            }
        return w;
    }
    // Zeros from the last row to the end of its group of 32.
    void end() const {
        for (int64_t r = count; tiles && r < whole_groups(count); r++)
            for (int64_t g = 0; g < depth(); g++) std::memset(halves(r, g), 0, GROUP * sizeof(uint16_t));
    }
    int64_t output_words() const { return Weight{nullptr, tiles ? BF16 : FP32, inner, count}.words(); }
    int64_t position_words() const { return Weight{nullptr, tiles ? BF16 : FP32, count, inner}.words(); }
};

// out[r, c] = row r · output c
INLINE void multiply(const Operand& x, const Weight& w, float* out, int64_t stride) {
    multiply_panels(x.rows(), x.count, w, 0, w.panels(), out, stride, false);
}

// Which rows of which pools somebody looks at.
class PoolRows {
   public:
    PoolRows(int64_t most, int64_t dim) : places_(scratch<0, Place>(most)), dim_(dim) {}
    void add(const RowPool& pool, int64_t slot) {
        const uint8_t* row = pool.at(slot);
        __builtin_prefetch(row);
        is_exact_ = is_exact_ && (pool.format != ROW_FLOAT || are_halves((const float*)row, 0, 1, dim_));
        places_[count_++] = {row, pool.format};
    }
    int64_t count() const { return count_; }
    bool is_exact() const { return is_exact_; }  // in bfloat16
    template <int Tag>
    Operand unpack(bool in_tiles) const {
        const Operand x = Operand::make<Tag>(count_, dim_, in_tiles);
        for (int64_t r = 0; r < count_; r++) {
            if (in_tiles) {
                unpack_halves(places_[r].row, dim_, places_[r].format, TILE_HALVES, x.halves(r, 0));
            } else {
                for (int64_t c = dim_; c < x.depth() * GROUP; c++) x.row(r)[c] = 0.0f;
                unpack_row(places_[r].row, dim_, places_[r].format, x.row(r));
            }
        }
        x.end();
        return x;
    }

   private:
    struct Place {
        const uint8_t* row;
        RowFormat format;
    };
    Place* places_;
    int64_t dim_, count_ = 0;
    bool is_exact_ = true;
};
