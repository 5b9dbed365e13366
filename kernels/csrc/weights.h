// Packed weights: panels of 16 outputs, in them groups of 32 inner positions, in the order in which
// a product reads them. Inner size and outputs are padded with zeros.
//
// A group is 16 rows, one for each pair of positions; in a row lane n belongs to output n:
//   BF16  words of two bfloat16 (low half: the even position): what matrix tiles read, too
//   FP32  16 floats of the even position, then 16 of the odd one
//   FP8   halves of two e4m3 codes (low byte: the even position)
//   FP4   four pairs share a row: nibble j of the low half is the even position of pair j, nibble
//         j of the high half the odd one
// FP4 and FP8 come in blocks of four groups behind their scales: one byte b for a group and lane,
// 2^(b - 127). Scales are applied to a group's sum, which is exact.
#pragma once

#include "lanes.h"

enum Kind : int64_t { BF16 = 0, FP32 = 1, FP4 = 3, FP8 = 4 };  // 2: not packed, for references

constexpr int64_t GROUP = 32, PAIRS = 16;        // positions, pairs of them
constexpr int64_t BLOCK_GROUPS = 4, SCALE_WORDS = 16;  // of FP4 and FP8
// The FP8 code's bits, moved into an fp16, are worth 2^-8 of it; scales are stored times 2^8.
constexpr int E4M3_SHIFT = 8;

constexpr bool has_scale(Kind kind) { return kind == FP4 || kind == FP8; }
constexpr int64_t group_words(Kind kind) {
    return kind == BF16 ? 256 : kind == FP32 ? 512 : kind == FP8 ? 128 : 64;
}
constexpr int64_t block_words(Kind kind) { return SCALE_WORDS + BLOCK_GROUPS * group_words(kind); }

struct Weight {
    const uint32_t* data;
    Kind kind;
    int64_t inner, outer;
    int64_t groups() const { return (inner + GROUP - 1) / GROUP; }
    int64_t panels() const { return (outer + LANES - 1) / LANES; }
    int64_t panel_words() const {
        if (!has_scale(kind)) return groups() * group_words(kind);
        return (groups() + BLOCK_GROUPS - 1) / BLOCK_GROUPS * block_words(kind);
    }
    int64_t words() const { return panels() * panel_words(); }
    Weight part(int64_t index) const { return {data + index * words(), kind, inner, outer}; }
    const uint32_t* panel(int64_t index) const { return data + index * panel_words(); }
};

template <Kind kind>
INLINE const uint32_t* group_at(const uint32_t* panel, int64_t g) {
    if (!has_scale(kind)) return panel + g * group_words(kind);
    return panel + g / BLOCK_GROUPS * block_words(kind) + SCALE_WORDS +
           g % BLOCK_GROUPS * group_words(kind);
}
template <Kind kind>
INLINE const uint8_t* scales_at(const uint32_t* panel, int64_t g) {
    return (const uint8_t*)(panel + g / BLOCK_GROUPS * block_words(kind)) + g % BLOCK_GROUPS * LANES;
}

INLINE U load_words(const uint32_t* p) {
    U v;
    std::memcpy(&v, p, 64);
    return v;
}
INLINE F load_scales(const uint8_t* p) {
    U bytes;
#if defined(__AVX512F__)
    bytes = (U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    for (int i = 0; i < LANES; i++) bytes[i] = p[i];
#endif
    return (F)(bytes << 23);
}

// The values of 16 codes in the low four bits.
INLINE F e2m1(U codes) {
#if defined(__AVX512F__)
    const F values{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return (F)_mm512_permutexvar_ps((__m512i)codes, (__m512)values);
#elif defined(__AVX2__)
    const __m256 values = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    union {
        U u;
        __m256i h[2];
    } x{codes};
    union {
        __m256 h[2];
        F f;
    } y;
    for (int i = 0; i < 2; i++) {
        __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x.h[i], _mm256_set1_epi32(8)), 28);
        y.h[i] = _mm256_xor_ps(_mm256_permutevar8x32_ps(values, x.h[i]), _mm256_castsi256_ps(sign));
    }
    return y.f;
#else
    static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6,
                                     -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    F v;
    for (int i = 0; i < LANES; i++) v[i] = values[codes[i] & 15];
    return v;
#endif
}

// The values of one row of FP8, times 2^-8.
INLINE void e4m3(const uint16_t* row, F& even, F& odd) {
#if defined(__AVX2__)
    // To fp16: the sign stays in front, exponent and mantissa follow one bit behind it.
    const __m256i mask = _mm256_set1_epi16((int16_t)0xbf80);
    const __m256i both = _mm256_loadu_si256((const __m256i*)row);
    const __m256i high = _mm256_and_si256(_mm256_srai_epi16(both, 1), mask);
    const __m256i low =
        _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), mask);
#if defined(__AVX512F__)
    even = (F)_mm512_cvtph_ps(low), odd = (F)_mm512_cvtph_ps(high);
#else
    union {
        __m256 h[2];
        F f;
    } a, b;
    a.h[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
    a.h[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
    b.h[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
    b.h[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
    even = a.f, odd = b.f;
#endif
#else
    U codes[2];
    for (int i = 0; i < LANES; i++) codes[0][i] = row[i] & 255, codes[1][i] = row[i] >> 8;
    F* out[2] = {&even, &odd};
    for (int i = 0; i < 2; i++) {
        const U size = codes[i] & 127, sign = (codes[i] & 128) << 24;
        const F normal = (F)((size << 20) + (uint32_t)((127 - 7 - E4M3_SHIFT) << 23));
        const F small = __builtin_convertvector((I)size, F) * 0x1p-17f;
        *out[i] = (F)((U)((I)size < 8 ? small : normal) | sign);
    }
#endif
}

// Pair 4 · v + j of a group, without its scale.
template <Kind kind>
INLINE void unpack_pair(const uint32_t* group, int64_t v, int64_t j, F& even, F& odd) {
    const int64_t p = 4 * v + j;
    if (kind == FP32) {
        even = load((const float*)(group + 2 * p * LANES));
        odd = load((const float*)(group + (2 * p + 1) * LANES));
    } else if (kind == FP8) {
        e4m3((const uint16_t*)group + p * LANES, even, odd);
    } else if (kind == FP4) {
        const U codes = load_words(group + v * LANES);
        even = e2m1(codes >> (uint32_t)(4 * j)), odd = e2m1(codes >> (uint32_t)(4 * j + 16));
    } else {
        const U both = load_words(group + p * LANES);
        even = (F)(both << 16), odd = (F)(both & 0xffff0000u);
    }
}

// A group with its scale, as BF16: exact within the range of scales that `pack_codes` admits.
template <Kind kind>
INLINE void expand_group(const uint32_t* group, const uint8_t* scales, uint32_t* to) {
#if defined(__AVX512BW__)
    if (kind == FP4) {  // by table; a scale adds to the exponent of what is not zero
        alignas(64) static const uint16_t values[32] = {
            0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
            0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
            0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        const __m512i table = _mm512_load_si512(values);
        const U add = ((U)load_scales(scales) >> 16) - (127u << 7);
        const __m512i power = (__m512i)((add & 0xffffu) | (add << 16));
        for (int64_t v = 0; v < 4; v++) {
            const __m512i codes = _mm512_loadu_si512(group + v * LANES);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i x = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), table);
                const __mmask32 some = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff));
                x = _mm512_mask_add_epi16(x, some, x, power);
                _mm512_storeu_si512(to + (4 * v + j) * LANES, x);
            }
        }
        return;
    }
    if (kind == FP8) {  // normal codes by shifts, the few small ones by table
        alignas(64) static const uint16_t small[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                       0x3c00, 0x3c20, 0x3c40, 0x3c60};
        const __m512i table = _mm512_load_si512(small), sizes = _mm512_set1_epi16(127);
        const U add = ((U)load_scales(scales) >> 16) - ((127u + E4M3_SHIFT) << 7);
        const __m512i power = (__m512i)((add & 0xffffu) | (add << 16));
        const __m512i bias = _mm512_add_epi16(power, _mm512_set1_epi16((127 - 7) << 7));
        for (int64_t p = 0; p < PAIRS; p++) {
            const __m256i row = _mm256_loadu_si256((const __m256i*)(group + p * LANES / 2));
            const __m512i codes = _mm512_cvtepu8_epi16(row), size = _mm512_and_si512(codes, sizes);
            __m512i x = _mm512_add_epi16(_mm512_slli_epi16(size, 4), bias);
            const __mmask32 few = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
            if (few) {
                const __mmask32 some = few & _mm512_test_epi16_mask(size, size);
                x = _mm512_mask_permutexvar_epi16(x, few, size, table);
                x = _mm512_mask_add_epi16(x, some, x, power);
            }
            const __m512i sign = _mm512_slli_epi16(codes, 8);  // and its lower bits, not taken
            x = _mm512_ternarylogic_epi32(x, sign, _mm512_set1_epi16((int16_t)0x8000), 0xf8);
            _mm512_storeu_si512(to + p * LANES, x);
        }
        return;
    }
#endif
    const F scale = load_scales(scales);
    for (int64_t v = 0; v < 4; v++)
        for (int64_t j = 0; j < 4; j++) {
            F even, odd;
            unpack_pair<kind>(group, v, j, even, odd);
            const U pair = (U)(even * scale) >> 16 | ((U)(odd * scale) & 0xffff0000u);
            std::memcpy(to + (4 * v + j) * LANES, &pair, 64);
        }
}

// Groups [first, first + count) of a panel of FP4 or FP8 as BF16: `group_words(BF16)` words each.
static void expand_groups(const Weight& w, int64_t panel, int64_t first, int64_t count, uint32_t* to) {
    const uint32_t* data = w.panel(panel);
    for (int64_t g = first; g < first + count; g++, to += group_words(BF16))
        if (w.kind == FP4)
            expand_group<FP4>(group_at<FP4>(data, g), scales_at<FP4>(data, g), to);
        else
            expand_group<FP8>(group_at<FP8>(data, g), scales_at<FP8>(data, g), to);
}
