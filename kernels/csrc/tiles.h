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

// M tiles of rows (1 or 2) times N panels (1 or 2); sums go to c, a tile after the other.
template <int M, int N>
static void tile_product(const uint16_t* a, const uint32_t* b0, const uint32_t* b1, int64_t groups,
                         float* c) {
    const uint16_t* a1 = a + groups * TILE_HALVES;
    _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (M > 1) _tile_zero(2);
    if (M > 1 && N > 1) _tile_zero(3);
    for (int64_t g = 0; g < groups; g++) {
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
    asm volatile("" ::: "memory");  // the intrinsics do not say that they write
}

static void multiply_tiles(const uint16_t* rows_in, int64_t rows, const Weight& w, int64_t first,
                           int64_t end, float* out, int64_t stride, bool bf16) {
    const int64_t groups = w.groups(), row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t size = groups * group_words(BF16);
    const bool expands = has_scale(w.kind);
    uint32_t* room = expands ? scratch<8, uint32_t>(2 * size) : nullptr;
    alignas(64) float sums[4 * 256];
    configure_tiles(rows < TILE_ROWS ? rows : TILE_ROWS);
    for (int64_t panel = first; panel < end; panel += 2) {
        const int64_t panels = end - panel < 2 ? 1 : 2;
        const uint32_t* b[2] = {w.panel(panel), w.panel(panel) + size};
        if (expands)
            for (int64_t i = 0; i < panels; i++) {
                b[i] = room + i * size;
                expand_panel(w, panel + i, room + i * size);
            }
        asm volatile("" ::: "memory");  // the intrinsics do not say that they read
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
            const bool two = tile + 1 < row_tiles;
            const uint16_t* a = rows_in + tile * groups * TILE_HALVES;
            if (two && panels == 2)
                tile_product<2, 2>(a, b[0], b[1], groups, sums);
            else if (two)
                tile_product<2, 1>(a, b[0], nullptr, groups, sums);
            else if (panels == 2)
                tile_product<1, 2>(a, b[0], b[1], groups, sums);
            else
                tile_product<1, 1>(a, b[0], nullptr, groups, sums);
            const int64_t first_row = tile * TILE_ROWS;
            const int64_t count = std::min<int64_t>(rows - first_row, two ? 2 * TILE_ROWS : TILE_ROWS);
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < panels; i++) {
                    const F v = load(sums + r / TILE_ROWS * 512 + i * 256 + r % TILE_ROWS * LANES);
                    store_part(out + (first_row + r) * stride + (panel - first + i) * LANES,
                               bf16 ? round_bf16(v) : v, w.outer - (panel + i) * LANES);
                }
        }
    }
    _tile_release();
}

#else

static bool tiles_ready() { return false; }
static void multiply_tiles(const uint16_t*, int64_t, const Weight&, int64_t, int64_t, float*,
                           int64_t, bool) {}

#endif
