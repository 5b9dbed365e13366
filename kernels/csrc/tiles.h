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
constexpr int64_t CACHED_GROUPS = 8;  // of two panels, in the level-1 cache while all rows pass by

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

// Sixteen halves, each in a lane of its own. The compiler takes them apart one by one.
INLINE U load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
    typedef uint16_t Half __attribute__((vector_size(32)));
    Half halves;
    std::memcpy(&halves, p, 32);
    return __builtin_convertvector(halves, U);
#endif
}
INLINE F from_halves(const uint16_t* p) { return (F)(load_halves(p) << 16); }

// Where results go, rounded to bfloat16 if asked for.
struct Target {
    float* data;
    int64_t stride;
    bool bf16;
    const int64_t* index = nullptr;  // row r goes to the index[r]-th
    bool is_large = false;           // more than the level-2 cache should keep
    uint16_t* halves = nullptr;      // instead of `data`, of tiles
    int64_t place(int64_t r) const { return (index ? index[r] : r) * stride; }
    float* row(int64_t r) const { return data + place(r); }
};

// Lines that are not read again soon pass the caches by.
INLINE void store_past(float* to, F v) {
#if defined(__AVX512F__)
    if ((uintptr_t)to % 64 == 0) return _mm512_stream_ps(to, (__m512)v);
#endif
    store(to, v);
}
INLINE void store_halves_past(uint16_t* to, F a, F b) {
#if defined(__AVX512F__)
    if ((uintptr_t)to % 64 == 0) {
        const __m512i low = (__m512i)((U)a >> 16), high = (__m512i)((U)b >> 16);
        const __m512i both = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
        return _mm512_stream_si512((__m512i*)to, both);
    }
#endif
    store_halves(to, a, b);
}
INLINE void end_of_stores_past() {  // before another thread reads them
#if defined(__SSE2__)
    _mm_sfence();
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

// M tiles of rows (1 or 2, `step` apart) times N panels (1 or 2) over `count` groups, added to the
// sums in c, or to zero: a tile after the other.
template <int M, int N>
static void tile_product(const uint16_t* a, int64_t step, const uint32_t* b0, const uint32_t* b1,
                         int64_t count, bool from_zero, float* c) {
    const uint16_t* a1 = a + (M > 1 ? step : 0);
    asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read and write
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
    asm volatile("" ::: "memory");
}

// Groups of one or two panels, `CACHED_GROUPS` at most, as tiles read them.
struct Slice {
    int64_t panel, panels, first, count;
    const uint32_t* b[2];
};

// The slices of panels [first, end), two panels at a time. Those of FP4 and FP8 are expanded, the
// next one in pieces between the products of the present one: tiles work beside the vector units.
class Slices {
   public:
    // up > 0: behind each two panels come those that lie `up` further on.
    Slices(const Weight& w, int64_t first, int64_t end, int64_t row_tiles, int64_t up = 0)
        : w_(w), groups_(w.groups()), end_(end), up_(up) {
        const int64_t most = has_scale(w.kind) || row_tiles > 2 ? CACHED_GROUPS : groups_;
        count_ = std::min(most, groups_);
        if (has_scale(w.kind)) rooms_ = scratch<8, uint32_t>(4 * count_ * group_words(BF16));
        start(first, 0);
        const int64_t products = (row_tiles + 1) / 2;
        piece_ = (2 * count_ + products - 1) / products;
    }
    Slice take() {
        expand(2 * count_);
        const Slice slice = next_;
        if (next_.first + count_ < groups_)
            start(next_.panel, next_.first + count_);
        else if (up_ && !is_up_)
            is_up_ = true, start(next_.panel + up_, 0);
        else
            start(next_.panel + 2 - (is_up_ ? up_ : 0), 0), is_up_ = false;
        return slice;
    }
    void go_on() { expand(piece_); }

   private:
    void start(int64_t panel, int64_t first) {
        const int64_t end = is_up_ ? end_ + up_ : end_;
        next_ = {panel, std::min<int64_t>(2, end - panel), first, std::min(count_, groups_ - first), {}};
        done_ = 0;
        for (int64_t i = 0; i < next_.panels; i++)
            next_.b[i] = rooms_ ? rooms_ + (2 * turn_ + i) * count_ * group_words(BF16)
                                : w_.panel(panel + i) + first * group_words(BF16);
        turn_ = !turn_;
    }
    void expand(int64_t some) {
        if (!rooms_) return;
        for (; some > 0 && done_ < next_.panels * next_.count; some--, done_++) {
            const int64_t i = done_ / next_.count, g = done_ % next_.count;
            expand_groups(w_, next_.panel + i, next_.first + g, 1,
                          (uint32_t*)next_.b[i] + g * group_words(BF16));
        }
    }
    const Weight w_;
    const int64_t groups_, end_, up_;
    int64_t count_, piece_, done_ = 0;
    uint32_t* rooms_ = nullptr;  // two by turns, each of two panels
    bool is_up_ = false, turn_ = false;
    Slice next_;
};

// Sums of all tiles of rows with the next two panels: for each tile those of the first panel, then of
// the second.
static void tile_sums(const uint16_t* rows, int64_t row_tiles, int64_t groups, Slices& weights,
                      float* sums) {
    const int64_t step = groups * TILE_HALVES;
    for (int64_t done = 0; done < groups;) {
        const Slice s = weights.take();
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
            const uint16_t* a = rows + tile * step + s.first * TILE_HALVES;
            float* c = sums + tile * 512;
            const bool two = tile + 1 < row_tiles, fresh = s.first == 0;
            if (two && s.panels == 2)
                tile_product<2, 2>(a, step, s.b[0], s.b[1], s.count, fresh, c);
            else if (two)
                tile_product<2, 1>(a, step, s.b[0], nullptr, s.count, fresh, c);
            else if (s.panels == 2)
                tile_product<1, 2>(a, step, s.b[0], s.b[1], s.count, fresh, c);
            else
                tile_product<1, 1>(a, step, s.b[0], nullptr, s.count, fresh, c);
            weights.go_on();
        }
        done += s.count;
    }
}

// Sums of up to eight panels to their rows: column `c` of the target and those behind it.
template <bool bf16>
static void tile_results(const float* sums, int64_t rows, int64_t row_tiles, int64_t panels,
                         const Target& out, int64_t c, int64_t width) {
    const bool is_whole = panels == BATCH_PANELS && width >= BATCH_PANELS * LANES;
    for (int64_t r = 0; r < rows; r++) {
        const float* from = sums + r / TILE_ROWS * 512 + r % TILE_ROWS * LANES;
        const int64_t place = out.place(r) + c;
        const auto result = [&](int64_t i) {
            const F v = load(from + i / 2 * row_tiles * 512 + i % 2 * 256);
            return bf16 ? round_bf16(v) : v;
        };
        if (out.halves) {
            for (int64_t i = 0; i < panels; i += 2)
                store_halves_past(out.halves + place + i * LANES, result(i), result(i + 1));
        } else if (is_whole && out.is_large) {
#pragma GCC unroll 8
            for (int64_t i = 0; i < BATCH_PANELS; i++) store_past(out.data + place + i * LANES, result(i));
        } else if (is_whole) {
#pragma GCC unroll 8
            for (int64_t i = 0; i < BATCH_PANELS; i++) store(out.data + place + i * LANES, result(i));
        } else {
            for (int64_t i = 0; i < panels; i++)
                store_part(out.data + place + i * LANES, result(i), width - i * LANES);
        }
    }
}

static void multiply_tiles(const uint16_t* rows_in, int64_t rows, const Weight& w, int64_t first,
                           int64_t end, const Target& out) {
    const int64_t row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, pair_sums = row_tiles * 512;
    float* sums = scratch<9, float>(pair_sums * BATCH_PANELS / 2);
    const auto put = out.bf16 ? tile_results<true> : tile_results<false>;
    configure_tiles(rows < TILE_ROWS ? rows : TILE_ROWS);
    Slices weights(w, first, end, row_tiles);
    for (int64_t batch = first; batch < end; batch += BATCH_PANELS) {
        const int64_t panels = std::min(BATCH_PANELS, end - batch);
        for (int64_t i = 0; i < panels; i += 2)
            tile_sums(rows_in, row_tiles, w.groups(), weights, sums + i / 2 * pair_sums);
        put(sums, rows, row_tiles, panels, out, (batch - first) * LANES, w.outer - batch * LANES);
    }
    if (out.is_large || out.halves) end_of_stores_past();
    _tile_release();
}

#else

static bool tiles_ready() { return false; }
static void multiply_tiles(const uint16_t*, int64_t, const Weight&, int64_t, int64_t,
                           const Target&) {}

#endif
