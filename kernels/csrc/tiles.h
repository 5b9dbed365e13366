// Products in matrix tiles (AMX): 16 rows times 16 outputs over 32 positions in one instruction.
//
// Rows lie in tiles, too: for each 16 rows and 32 positions, 16 times 32 bfloat16, the tiles of one
// 16 rows side by side. Rows that fill up the last tile may hold anything finite or not: results
// do not mix. Weights that are not in bfloat16 are expanded, two panels at a time.
#pragma once

#include "weights.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_TILES 1
#endif

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_HALVES = TILE_ROWS * GROUP;
constexpr int64_t BATCH_PANELS = 8;   // whose results go to a row at once
constexpr int64_t CACHED_GROUPS = 8;  // of two panels, while all rows pass by

// Denormals are zeros while it lives, as they always are for tiles.
class Denormals {
#if defined(__SSE2__)
   public:
    Denormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
    ~Denormals() { _mm_setcsr(before_); }
    Denormals(const Denormals&) = delete;

   private:
    const unsigned before_;
#else
   public:
    Denormals() {}
#endif
};

INLINE void store_halves(uint16_t* to, F a, F b) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)((U)a >> 16)));
    _mm256_storeu_si256((__m256i*)(to + LANES), _mm512_cvtepi32_epi16((__m512i)((U)b >> 16)));
#else
    for (int i = 0; i < LANES; i++) to[i] = ((U)a)[i] >> 16, to[LANES + i] = ((U)b)[i] >> 16;
#endif
}

// Where results go, rounded to bfloat16 if asked for.
struct Target {
    float* data;
    int64_t stride;
    bool bf16;
    const int64_t* index = nullptr;  // row r goes to the index[r]-th
    float* row(int64_t r) const { return data + (index ? index[r] : r) * stride; }
};

// Halves of `rows` rows in tiles, and where in them row r begins; its groups are TILE_HALVES apart.
INLINE int64_t tile_halves(int64_t rows, int64_t groups) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS * groups * TILE_HALVES;
}
INLINE int64_t tile_place(int64_t r, int64_t groups) {
    return r / TILE_ROWS * groups * TILE_HALVES + r % TILE_ROWS * GROUP;
}

#if defined(HAVE_TILES)

// Linux gives the tiles' registers to processes that ask.
static bool tiles_ready() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
    return granted;
}

// Registers 0-3 take sums, 4 and 5 rows, 6 and 7 weights.
static void configure_tiles(int64_t rows) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.column_bytes[i] = 64, config.rows[i] = i < 6 ? rows : 16;
    asm volatile("" : : "m"(config));
    _tile_loadconfig(&config);
}

// M tiles of rows (1 or 2, `step` apart) times N panels (1 or 2) over `count` groups, added to the
// sums in c, or to zero: a tile after the other.
template <int M, int N>
static void tile_product(const uint16_t* a, int64_t step, const uint32_t* b0, const uint32_t* b1,
                         int64_t count, bool from_zero, float* c) {
    const uint16_t* a1 = a + (M > 1 ? step : 0);
    if (from_zero) {
        _tile_zero(0);
        if (N > 1) _tile_zero(1);
        if (M > 1) _tile_zero(2);
        if (M > 1 && N > 1) _tile_zero(3);
    } else {
        _tile_loadd(0, c, 64);
        if (N > 1) _tile_loadd(1, c + 256, 64);
        if (M > 1) _tile_loadd(2, c + 512, 64);
        if (M > 1 && N > 1) _tile_loadd(3, c + 768, 64);
    }
    for (int64_t g = 0; g < count; g++) {
        _tile_loadd(4, a + g * TILE_HALVES, 64);
        _tile_loadd(6, b0 + g * group_words(BF16), 64);
        _tile_dpbf16ps(0, 4, 6);
        if (N > 1) {
            _tile_loadd(7, b1 + g * group_words(BF16), 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (M > 1) {
            _tile_loadd(5, a1 + g * TILE_HALVES, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (N > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 64);
    if (N > 1) _tile_stored(1, c + 256, 64);
    if (M > 1) _tile_stored(2, c + 512, 64);
    if (M > 1 && N > 1) _tile_stored(3, c + 768, 64);
}

// One or two panels b, whose groups [first, first + count) stay in the level-1 cache meanwhile, times
// all tiles of rows.
static void tile_panels(const uint16_t* rows, int64_t row_tiles, const uint32_t* const (&b)[2],
                        int64_t panels, int64_t groups, int64_t first, int64_t count, float* sums) {
    const int64_t at = first * group_words(BF16), step = groups * TILE_HALVES;
    for (int64_t tile = 0; tile < row_tiles; tile += 2) {
        const uint16_t* a = rows + tile * step + first * TILE_HALVES;
        float* c = sums + tile * 512;
        const bool two = tile + 1 < row_tiles, fresh = first == 0;
        if (two && panels == 2)
            tile_product<2, 2>(a, step, b[0] + at, b[1] + at, count, fresh, c);
        else if (two)
            tile_product<2, 1>(a, step, b[0] + at, nullptr, count, fresh, c);
        else if (panels == 2)
            tile_product<1, 2>(a, step, b[0] + at, b[1] + at, count, fresh, c);
        else
            tile_product<1, 1>(a, step, b[0] + at, nullptr, count, fresh, c);
    }
}

// Sums of tiles (pairs of panels one after the other, in each the tiles of all rows) to their rows.
template <bool bf16>
static void tile_results(const float* sums, int64_t rows, int64_t row_tiles, int64_t panels,
                         const Target& out, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const float* from = sums + r / TILE_ROWS * 512 + r % TILE_ROWS * LANES;
        float* to = out.row(r);
        for (int64_t i = 0; i < panels; i++) {
            const F v = load(from + i / 2 * row_tiles * 512 + i % 2 * 256);
            store_part(to + i * LANES, bf16 ? round_bf16(v) : v, width - i * LANES);
        }
    }
}

static void multiply_tiles(const uint16_t* rows_in, int64_t rows, const Weight& w, int64_t first,
                           int64_t end, const Target& out) {
    const int64_t groups = w.groups(), row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t size = groups * group_words(BF16), batch_sums = row_tiles * 512;
    const bool expands = has_scale(w.kind);
    uint32_t* room = expands ? scratch<8, uint32_t>(2 * size) : nullptr;
    float* sums = scratch<9, float>(batch_sums * BATCH_PANELS / 2);
    const int64_t count = row_tiles > 2 ? CACHED_GROUPS : groups;
    configure_tiles(rows < TILE_ROWS ? rows : TILE_ROWS);
    for (int64_t batch = first; batch < end; batch += BATCH_PANELS) {
        const int64_t batch_end = std::min(batch + BATCH_PANELS, end);
        for (int64_t panel = batch; panel < batch_end; panel += 2) {
            const int64_t panels = batch_end - panel < 2 ? 1 : 2;
            const uint32_t* b[2] = {w.panel(panel), w.panel(panel) + (expands ? 0 : size)};
            if (expands)
                for (int64_t i = 0; i < panels; i++) {
                    expand_panel(w, panel + i, room + i * size);
                    b[i] = room + i * size;
                }
            asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read and write
            for (int64_t g = 0; g < groups; g += count)
                tile_panels(rows_in, row_tiles, b, panels, groups, g, std::min(count, groups - g),
                            sums + (panel - batch) / 2 * batch_sums);
            asm volatile("" ::: "memory");
        }
        Target to = out;
        to.data += (batch - first) * LANES;
        const auto put = out.bf16 ? tile_results<true> : tile_results<false>;
        put(sums, rows, row_tiles, batch_end - batch, to, w.outer - batch * LANES);
    }
    _tile_release();
}

#else

static bool tiles_ready() { return false; }
static void multiply_tiles(const uint16_t*, int64_t, const Weight&, int64_t, int64_t,
                           const Target&) {}

#endif
