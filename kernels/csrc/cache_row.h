// Rows of the KV pools as they are stored: codes, then scales. Contract: kernels/attention/pools.py.
#pragma once

#include "tiles.h"

enum RowFormat : int64_t { ROW_FLOAT = 0, ROW_FP8 = 1, ROW_FP4_E4M3 = 2, ROW_FP4_UE8M0 = 3 };
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

INLINE int64_t row_bytes(RowFormat format, int64_t dim) {
    switch (format) {
        case ROW_FP8: return dim + dim / 32;
        case ROW_FP4_E4M3: return dim / 2 + dim / 16;
        case ROW_FP4_UE8M0: return dim / 2 + dim / 32;
        default: return dim * (int64_t)sizeof(float);
    }
}

// ---------------------------------------------------------------- codes

INLINE I either(I condition, I yes, I no) { return (condition & yes) | (~condition & no); }
INLINE uint8_t ue8m0_code(float scale) {  // infinity and NaN: 255
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    return bits >> 23 & 255;
}
INLINE float from_ue8m0(uint8_t code) {
    const uint32_t bits = code == 255 ? 0x7fc00000u : (uint32_t)code << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return scale;
}
// Of values that e4m3 holds exactly, and of NaN.
INLINE I e4m3_code(F x) {
    const F size = vabs(x);
    const I normal = ((I)size >> 20) - (120 << 3);
    const I small = __builtin_convertvector(vmin(size, splat(1.0f)) * 512.0f, I);
    const I code = either((I)(size < 0x1p-6f), small, normal) | ((I)x >> 24 & 0x80);
    return either((I)(x == x), code, splat_i(0x7f));
}
INLINE F from_e4m3(I code) {
    const I size = code & 0x7f;
    const F normal = (F)((size << 20) + (120 << 23));
    const F small = (F)((size << 20) + (121 << 23)) - 0x1p-6f;
    const F value = (F)((I)(size < 8 ? small : normal) | (code & 0x80) << 24);
    return size == 0x7f ? splat(NAN) : value;
}
INLINE float scale_from_e4m3(uint8_t code) {  // positive, or NaN
    const bool is_small = code < 8;
    const uint32_t bits = code == 0x7f ? 0x7fc00000u : ((uint32_t)code << 20) + ((120u + is_small) << 23);
    float value;
    std::memcpy(&value, &bits, 4);
    return is_small ? value - 0x1p-6f : value;
}
// Of values that e2m1 holds exactly.
INLINE I e2m1_code(F x) {
    const F size = vabs(x);
    const I large = ((I)size >> 22) - 252;
    const I small = __builtin_convertvector(vmin(size, splat(1.0f)) * 2.0f, I);
    return either((I)(size < 1.0f), small, large) | ((I)x >> 28 & 8);
}
// Sixteen whole numbers, each in a lane of its own. The compiler takes bytes apart one by one.
INLINE I load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    Bytes16 bytes;
    std::memcpy(&bytes, p, 16);
    return __builtin_convertvector(bytes, I);
#endif
}
INLINE void store_bytes(uint8_t* p, I values) {
    const Bytes16 bytes = __builtin_convertvector(values, Bytes16);
    std::memcpy(p, &bytes, 16);
}

// ---------------------------------------------------------------- rows

// What a pool of floats keeps: the values that the packed row would give back.
INLINE void round_row(float* row, int64_t dim, RowFormat format) {
    for (int64_t c = 0; format != ROW_FLOAT && c < dim; c += 32) {
        F a = load(row + c), b = load(row + c + LANES);
        if (format == ROW_FP8) round_fp8_32(a, b);
        if (format == ROW_FP4_E4M3) a = round_fp4_e4m3_16(a), b = round_fp4_e4m3_16(b);
        if (format == ROW_FP4_UE8M0) round_fp4_ue8m0_32(a, b);
        store(row + c, a), store(row + c + LANES, b);
    }
}

INLINE void store_nibbles(uint8_t* to, I a, I b) {  // 32 codes, the even channel low
    int32_t codes[32];
    std::memcpy(codes, &a, 64), std::memcpy(codes + LANES, &b, 64);
    for (int i = 0; i < 16; i++) to[i] = codes[2 * i] | codes[2 * i + 1] << 4;
}
// FP4 has no NaN: a group that holds one gets a scale that is.
INLINE bool has_nan(F x) {
    const I wrong = (I)(x != x);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= wrong[i];
    return any;
}

INLINE void pack_row(const float* row, int64_t dim, RowFormat format, uint8_t* to) {
    if (format == ROW_FLOAT) {
        std::memcpy(to, row, dim * sizeof(float));
        return;
    }
    uint8_t* scales = to + (format == ROW_FP8 ? dim : dim / 2);
    for (int64_t c = 0; c < dim; c += 32) {
        F a = load(row + c), b = load(row + c + LANES);
        if (format == ROW_FP8) {
            const F scale = scaled_fp8_32(a, b);
            store_bytes(to + c, e4m3_code(a)), store_bytes(to + c + LANES, e4m3_code(b));
            scales[c / 32] = ue8m0_code(scale[0]);
        } else if (format == ROW_FP4_E4M3) {
            const bool bad_a = has_nan(a), bad_b = has_nan(b);
            const F scale_a = scaled_fp4_e4m3_16(a), scale_b = scaled_fp4_e4m3_16(b);
            store_nibbles(to + c / 2, e2m1_code(a), e2m1_code(b));
            scales[c / 16] = bad_a ? 0x7f : e4m3_code(scale_a)[0];
            scales[c / 16 + 1] = bad_b ? 0x7f : e4m3_code(scale_b)[0];
        } else {
            const bool bad = has_nan(a) || has_nan(b);
            const F scale = scaled_fp4_ue8m0_32(a, b);
            store_nibbles(to + c / 2, e2m1_code(a), e2m1_code(b));
            scales[c / 32] = bad ? 255 : ue8m0_code(scale[0]);
        }
    }
}

INLINE void load_nibbles(const uint8_t* p, F& a, F& b) {
    const I bytes = load_bytes(p);
    const F low = e2m1((U)bytes & 15u), high = e2m1((U)bytes >> 4);
    a = __builtin_shuffle(low, high, I{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    b = __builtin_shuffle(low, high, I{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}

template <RowFormat format>
INLINE void unpack_groups(const uint8_t* row, int64_t dim, float* to) {
    const uint8_t* scales = row + (format == ROW_FP8 ? dim : dim / 2);
    for (int64_t c = 0; c < dim; c += 32) {
        F a, b;
        if (format == ROW_FP8) {
            a = from_e4m3(load_bytes(row + c)), b = from_e4m3(load_bytes(row + c + LANES));
        } else {
            load_nibbles(row + c / 2, a, b);
        }
        if (format == ROW_FP4_E4M3) {
            a *= scale_from_e4m3(scales[c / 16]), b *= scale_from_e4m3(scales[c / 16 + 1]);
        } else {
            const float scale = from_ue8m0(scales[c / 32]);
            a *= scale, b *= scale;
        }
        store(to + c, a), store(to + c + LANES, b);
    }
}
INLINE void unpack_row(const uint8_t* row, int64_t dim, RowFormat format, float* to) {
    switch (format) {
        case ROW_FP8: return unpack_groups<ROW_FP8>(row, dim, to);
        case ROW_FP4_E4M3: return unpack_groups<ROW_FP4_E4M3>(row, dim, to);
        case ROW_FP4_UE8M0: return unpack_groups<ROW_FP4_UE8M0>(row, dim, to);
        default: std::memcpy(to, row, dim * sizeof(float));
    }
}

typedef uint16_t H __attribute__((vector_size(64)));  // bfloat16, which holds all these values
typedef int16_t SH __attribute__((vector_size(64)));
INLINE bool any_lane(SH condition) {
#if defined(__AVX512BW__)
    return _mm512_movepi16_mask((__m512i)condition) != 0;
#else
    int16_t any = 0;
    for (int i = 0; i < 32; i++) any |= condition[i];
    return any;
#endif
}
INLINE H e4m3_halves(const uint8_t* codes, uint8_t scale) {
#if defined(__AVX512BW__)
    const H code = (H)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
#else
    typedef uint8_t Bytes32 __attribute__((vector_size(32)));
    Bytes32 bytes;
    std::memcpy(&bytes, codes, 32);
    const H code = __builtin_convertvector(bytes, H);
#endif
    const H size = code & 0x7f, sign = (code << 8) & 0x8000;
    const uint16_t power = (uint16_t)((scale - 127) * 128);
    const H normal = (size << 4) + (uint16_t)(power + (120 << 7));
    if (!any_lane(size - 8 > 0x7e - 8)) return normal | sign;
    const H subnormal{0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    H value = size < 8 ? __builtin_shuffle(subnormal, size & 7) + power : normal;
    value = size == 0 ? H{} : value;
    value = size == 0x7f ? H{} + (uint16_t)0x7fc0 : value;
    return value | sign;
}
// Sixteen channels by each scale. The table has the two scales' values by turns.
INLINE H e2m1_halves(const uint8_t* codes, float scale_a, float scale_b) {
    const F values{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const H table = (H)((U)(values * scale_a) >> 16 | ((U)(values * scale_b) & 0xffff0000u));
    const H second{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const I bytes = load_bytes(codes);
    const H twice = (H)((bytes & 15) << 1 | (bytes & 0xf0) << 13);
    return __builtin_shuffle(table, twice | second);
}
// `unpack_row` in bfloat16; groups of 32 are `step` apart. Float rows must be exact there.
INLINE void unpack_halves(const uint8_t* row, int64_t dim, RowFormat format, int64_t step, uint16_t* to) {
    const uint8_t* scales = row + (format == ROW_FP8 ? dim : dim / 2);
    for (int64_t c = 0; c < dim; c += 32, to += step) {
        if (format == ROW_FLOAT) {
            const float* x = (const float*)row + c;
            const int64_t left = dim - c - LANES;
            store_halves(to, load_part(x, dim - c), left > 0 ? load_part(x + LANES, left) : F{});
            continue;
        }
        H halves;
        if (format == ROW_FP8) {
            const uint8_t scale = scales[c / 32];
            halves = scale == 255 ? H{} + (uint16_t)0x7fc0 : e4m3_halves(row + c, scale);
        } else if (format == ROW_FP4_E4M3) {
            halves = e2m1_halves(row + c / 2, scale_from_e4m3(scales[c / 16]),
                                 scale_from_e4m3(scales[c / 16 + 1]));
        } else {
            const float scale = from_ue8m0(scales[c / 32]);
            halves = e2m1_halves(row + c / 2, scale, scale);
        }
        std::memcpy(to, &halves, 64);
    }
}

// A pool of rows: bytes that hold `format`, or floats.
struct RowPool {
    const uint8_t* data;
    RowFormat format;
    int64_t dim, bytes;
    RowPool(const void* data, int64_t format, int64_t dim)
        : data((const uint8_t*)data),
          format((RowFormat)format),
          dim(dim),
          bytes(row_bytes((RowFormat)format, dim)) {}
    const uint8_t* at(int64_t slot) const { return data + slot * bytes; }
};
