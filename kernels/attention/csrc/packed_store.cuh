// Norm, rotation, rounding and packing of one cache row by a warp. See kernels/attention/packed_rows.py.

#pragma once

#include "hopper.cuh"

namespace packed_store {

using namespace hopper;

constexpr int kRotated = 64;  // channels at the end
enum Format { kWindow = 0, kCompressed = 1, kKey = 2 };

template <int kFormat>
constexpr int kDim = kFormat == kKey ? 128 : 512;

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <int kLanes>
__device__ __forceinline__ float most_of(float x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The nearest of 0, ½, 1, 1½, 2, 3, 4, 6, ties to the even code, with the sign in bit 3.
__device__ __forceinline__ uint32_t e2m1(float x) {
  const float size = fminf(fabsf(x), 6.f);
  const float step = size < 2.f ? 0.5f : size < 4.f ? 1.f : 2.f;
  const int halves = static_cast<int>(rintf(size / step) * step * 2.f);
  const uint32_t code = halves <= 4 ? halves : halves == 6 ? 5 : halves == 8 ? 6 : 7;
  return code | (__float_as_uint(x) >> 31) << 3;
}
// Channels 2 · pair and 2 · pair + 1 of a word of eight.
__device__ __forceinline__ uint32_t place(int pair, uint32_t even, uint32_t odd) {
  const int sign = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
  const int size = pair == 0 ? 6 : pair == 1 ? 3 : pair == 2 ? 0 : 9;
  return ((even >> 3) << sign | (even & 7u) << size) | ((odd >> 3) << sign | (odd & 7u) << size) << 16;
}

// `v`: a lane's channels of the row, lane · kDim / 32 and on; norm: weight or null; cos and sin of the row.
template <int kFormat>
__device__ __forceinline__ void store_row(float (&v)[kDim<kFormat> / 32], int lane, const float* norm, float eps,
                                          const float* cos, const float* sin, int slot, int entries, uint8_t* pool) {
  constexpr int kDim = packed_store::kDim<kFormat>, kOwn = kDim / 32;
  if (norm) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) squares = fmaf(v[i], v[i], squares);
    const float scale = __fdiv_rn(1.f, sqrtf(warp_sum(squares) / kDim + eps));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] = round_bf16(v[i] * scale * norm[lane * kOwn + i]);
  }
  const int rotated = lane * kOwn - (kDim - kRotated);
  if (rotated >= 0) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const float c = cos[(rotated + i) / 2], s = sin[(rotated + i) / 2], a = v[i], b = v[i + 1];
      v[i] = round_bf16(__fadd_rn(__fmul_rn(a, c), -__fmul_rn(b, s)));
      v[i + 1] = round_bf16(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
    }
  }
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) most = fmaxf(most, fabsf(v[i]));

  if constexpr (kFormat == kWindow) {
    uint8_t* const to = pool + static_cast<int64_t>(slot) * (kDim + kDim / 32);
    const float scale = power_of_two_above(__fdiv_rn(fmaxf(most_of<2>(most), 1e-4f), 448.f));
    uint32_t words[kOwn / 4];
#pragma unroll
    for (int w = 0; w < kOwn / 4; ++w) {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // bytes 0 2 1 3
        const uint32_t code = __nv_cvt_float_to_fp8(__fdiv_rn(v[4 * w + i], scale), __NV_SATFINITE, __NV_E4M3);
        words[w] |= code << 8 * (i / 2 + i % 2 * 2);
      }
    }
    uint4* const codes = reinterpret_cast<uint4*>(to + lane * kOwn);
#pragma unroll
    for (int w = 0; w < kOwn / 4; w += 4) codes[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    if (lane % 2 == 0) to[kDim + lane / 2 % 4 * (kDim / 128) + lane / 8] = __float_as_uint(scale) >> 23;
  } else if constexpr (kFormat == kCompressed) {
    uint8_t* const to = pool + static_cast<int64_t>(slot) * (kDim / 2 + kDim / 16);
    const float wanted = fminf(__fdiv_rn(fmaxf(most, 6.f / 512.f), 6.f), 448.f);
    const __nv_fp8_storage_t rounded = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(rounded, __NV_E4M3)));
    uint32_t words[kOwn / 8];
#pragma unroll
    for (int w = 0; w < kOwn / 8; ++w) {
      words[w] = 0;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        words[w] |= place(pair, e2m1(__fdiv_rn(v[8 * w + 2 * pair], scale)),
                          e2m1(__fdiv_rn(v[8 * w + 2 * pair + 1], scale)));
    }
#pragma unroll
    for (int w = 0; w < kOwn / 8; ++w) reinterpret_cast<uint32_t*>(to)[lane * (kOwn / 8) + w] = words[w];
    to[kDim / 2 + lane % 8 / 2 * (kDim / 64) + lane / 8 * 2 + lane % 2] = rounded;
  } else {
    const int block = slot / entries, entry = slot % entries;
    uint8_t* const to = pool + static_cast<int64_t>(block) * entries * (kDim / 2 + kDim / 32);
    const float scale =
        power_of_two_above(__fdiv_rn(fmaxf(most_of<8>(most), 6.f * __uint_as_float(1u << 23)), 6.f));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const uint32_t even = e2m1(__fdiv_rn(v[i], scale)), odd = e2m1(__fdiv_rn(v[i + 1], scale));
      word |= lane % 2 ? place(2 + i / 2, even, odd) : place(i / 2, even, odd);
    }
    word |= __shfl_xor_sync(~0u, word, 1);
    if (lane % 2 == 0) reinterpret_cast<uint32_t*>(to + entry * (kDim / 2))[lane / 2] = word;
    if (lane % 8 == 0) to[entries * (kDim / 2) + entry * (kDim / 32) + lane / 8] = __float_as_uint(scale) >> 23;
  }
}

}  // namespace packed_store
