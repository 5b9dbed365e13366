// Sixteen float lanes on any CPU: what all native kernels are written with.
//
// Every operation here rounds alike at every instruction level: elementwise IEEE operations and
// explicit fused multiply-adds only, sums over lanes in one tree. So the AVX-512, AVX2 and
// scalar builds of a kernel give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

constexpr int64_t LANES = 16;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

INLINE F splat(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE I splat_i(int32_t x) { return I{} + x; }
INLINE F load(const float* p) {
    F v;
    std::memcpy(&v, p, 64);
    return v;
}
INLINE void store(float* p, F v) { std::memcpy(p, &v, 64); }
INLINE F load_part(const float* p, int64_t n) {  // the other lanes are zero
    if (n >= LANES) return load(p);
    F v{};
    std::memcpy(&v, p, n * 4);
    return v;
}
INLINE void store_part(float* p, F v, int64_t n) {
    if (n >= LANES) return store(p, v);
    std::memcpy(p, &v, n * 4);
}
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union {
        F f;
        __m256 h[2];
    } x{a}, y{b}, z{c};
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.f;
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}
INLINE F vsqrt(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}
#if defined(__AVX512F__)  // both as `a > b ? a : b`: b if either is NaN
INLINE F vmax(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE F vmin(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE F vmax(F a, F b) { return a > b ? a : b; }
INLINE F vmin(F a, F b) { return a < b ? a : b; }
#endif
INLINE F vabs(F x) { return (F)((I)x & 0x7fffffff); }
INLINE F keep_nan(F x, F result) { return x == x ? result : x; }

INLINE F swap_8(F v) {
    return __builtin_shuffle(v, I{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
}
INLINE F swap_4(F v) {
    return __builtin_shuffle(v, I{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
}
INLINE F swap_2(F v) {
    return __builtin_shuffle(v, I{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
}
INLINE F swap_1(F v) {
    return __builtin_shuffle(v, I{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
}
// In every lane the sum over the lanes: halves, quarters, …; always this tree.
INLINE F sum_lanes(F v) {
    v += swap_8(v);
    v += swap_4(v);
    v += swap_2(v);
    return v + swap_1(v);
}
INLINE F max_lanes(F v) {
    v = vmax(v, swap_8(v));
    v = vmax(v, swap_4(v));
    v = vmax(v, swap_2(v));
    return vmax(v, swap_1(v));
}

// e^x = result * 2^n, n the nearest integer to x / ln 2.
INLINE F vexp_parts(F x, F& n) {
    n = fma(x, splat(1.44269504f), splat(12582912.0f)) - 12582912.0f;
    F r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return fma(p, r * r, r) + 1.0f;
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays.
INLINE F vexp(F x) {
    F n, p = vexp_parts(x, n);
    F clamped = vmin(vmax(n, splat(-126.0f)), splat(127.0f));
    I power = __builtin_convertvector(clamped, I);
    F y = p * (F)((power + 127) << 23);
    y = n > 127.5f ? p * 2.0f * (F)(splat_i(254 << 23)) : y;
    y = x > 88.7228394f ? splat(INFINITY) : y;
    y = x < -87.3f ? splat(0.0f) : y;
    return keep_nan(x, y);
}
INLINE F vsigmoid(F x) { return 1.0f / (1.0f + vexp(-x)); }
// log(1 + e^x) = max(x, 0) + log1p(t), t = e^-|x|; log1p(t) = 2 artanh(t / (2 + t)).
INLINE F vsoftplus(F x) {
    F t = vexp(-vabs(x));
    F s = t / (2.0f + t), q = s * s;
    F p = splat(1.0f / 17);
    for (float c : {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3})
        p = fma(p, q, splat(c));
    F log1p = 2.0f * fma(s * q, p, s);
    return keep_nan(x, log1p + vmax(x, splat(0.0f)));
}

// ---------------------------------------------------------------- rounding

INLINE F round_bf16(F x) {
    U bits = (U)x;
    U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return keep_nan(x, (F)rounded);
}
INLINE F power_of_two_above(F x) {  // the smallest >= x, for normal x > 0
    return (F)(((I)x + 0x7fffff) & 0x7f800000);
}
INLINE F binade(F x) { return (F)((I)x & 0x7f800000); }
// Adding 1.5 · 2^23 quanta and taking them off again rounds to whole quanta, ties to even.
INLINE F nearest_e4m3(F x) {  // |x| <= 448
    F magic = vmax(binade(x), splat(0x1p-6f)) * (1.5f * 0x1p20f);
    return keep_nan(x, (x + magic) - magic);
}
INLINE F nearest_e2m1(F x) {  // saturates at 6
    F clamped = vmin(vmax(x, splat(-6.0f)), splat(6.0f));
    F magic = vmin(vmax(binade(clamped), splat(1.0f)), splat(4.0f)) * (0.75f * 0x1p23f);
    return keep_nan(x, (clamped + magic) - magic);
}
// Groups in units of their scale, which comes back: what a packed store keeps.
INLINE F scaled_fp8_32(F& a, F& b) {
    F amax = max_lanes(vmax(vabs(a), vabs(b)));
    F scale = power_of_two_above(vmax(amax, splat(1e-4f)) / 448.0f);
    F inverse = (F)(splat_i(254 << 23) - (I)scale);  // exact: the scale is a power of two
    F limit = splat(448.0f);
    F x = a * inverse, y = b * inverse;
    a = keep_nan(a, nearest_e4m3(vmin(vmax(x, -limit), limit)));
    b = keep_nan(b, nearest_e4m3(vmin(vmax(y, -limit), limit)));
    return scale;
}
INLINE F scaled_fp4_ue8m0_32(F& a, F& b) {
    F amax = max_lanes(vmax(vabs(a), vabs(b)));
    F scale = power_of_two_above(vmax(amax, splat(6 * 0x1p-126f)) / 6.0f);
    a = nearest_e2m1(a / scale), b = nearest_e2m1(b / scale);
    return scale;
}
INLINE F scaled_fp4_e4m3_16(F& x) {
    F scale = vmax(max_lanes(vabs(x)), splat(6 * 0x1p-9f)) / 6.0f;
    scale = nearest_e4m3(vmin(scale, splat(448.0f)));
    x = nearest_e2m1(x / scale);
    return scale;
}
INLINE void round_fp8_32(F& a, F& b) {  // one group of 32
    const F scale = scaled_fp8_32(a, b);
    a *= scale, b *= scale;
}
INLINE void round_fp4_ue8m0_32(F& a, F& b) {
    const F scale = scaled_fp4_ue8m0_32(a, b);
    a *= scale, b *= scale;
}
INLINE F round_fp4_e4m3_16(F x) {
    const F scale = scaled_fp4_e4m3_16(x);
    return x * scale;
}

// ---------------------------------------------------------------- threads

// body(i) for i in [0, count), by up to `threads` threads.
template <class Body>
INLINE void parallel(int64_t count, int64_t threads, const Body& body) {
    if (threads > count) threads = count;
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
    } else {
        Pool::instance().run(count, threads, body);
    }
}

// Memory that a thread keeps from call to call, 64-byte aligned.
template <int Tag, class T>
static T* scratch(int64_t count) {
    static thread_local std::vector<char> buffer;
    size_t need = count * sizeof(T) + 64;
    if (buffer.size() < need) buffer.resize(need + need / 2);
    return (T*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);
}
