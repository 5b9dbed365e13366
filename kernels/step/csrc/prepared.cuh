// Rows rounded to FP8 for a linear by whoever makes them. See PreparedRows in kernels/quant/linear_cuda.py.

#pragma once

#include "fp8_linear.cuh"

namespace prepared {

using namespace hopper;

// Rows as FP8 linears read them (`prepare_kernel` in fp8_linear.cuh): passes of `pass` rows.
struct Prepared {
  __half* inputs;  // null: not wanted
  float* unit;     // [tokens]
  int pass, swizzled;

  // As `rounded_positions` of hopper.cuh, without its divisions: scales and factors are powers of two.
  static __device__ __forceinline__ uint4 rounded(const uint4& raw, float factor) {
    float values[8], group = 0.f;
    widen(raw, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) group = fmaxf(group, fabsf(values[i]));
    const unsigned mask = 15u << (threadIdx.x % 32 & ~3);
    group = fmaxf(group, __shfl_xor_sync(mask, group, 1));
    group = fmaxf(group, __shfl_xor_sync(mask, group, 2));
    const float scale = power_of_two_above(__fdiv_rn(fmaxf(group, 1e-4f), 448.0f));
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
    const __half2 put_back = __float2half2_rn(scale * factor);
    uint4 packed;
    __half2* const pairs = reinterpret_cast<__half2*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_fp8x2_storage_t codes = __nv_cvt_float2_to_fp8x2(
          make_float2(values[2 * i] * inverse, values[2 * i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
      pairs[i] = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)), put_back);
    }
    return packed;
  }

  // Eight positions from k on of a row of `width`; `most` is the largest of the row. All lanes of a warp.
  __device__ __forceinline__ void store(int token, int k, int width, const uint4& raw, float most) const {
    const float factor = storage_factor(most);
    const uint4 packed = rounded(raw, factor);
    const int steps = width / kChunkPositions, row = token % pass;
    if (k >= width) return;
    if (k == 0) unit[token] = 1.f / factor;
    if (swizzled) {
      uint8_t* const to = reinterpret_cast<uint8_t*>(inputs);
      if (pass == 64)
        fp8_linear::store_swizzled<64>(to, token, k, steps, packed);
      else
        fp8_linear::store_swizzled<128>(to, token, k, steps, packed);
      return;
    }
    const int group = (k % kChunkPositions / 8) ^ ((row & 1) << 2);  // see `element`
    *reinterpret_cast<uint4*>(inputs + (static_cast<int64_t>(token / pass) * steps + k / kChunkPositions) *
                                           (pass * kChunkPositions) +
                              row * kChunkPositions + group * 8) = packed;
  }
};

// The largest over the block; all threads get it. `shared` has not been used since the last barrier.
__device__ __forceinline__ float block_largest(float most, float (&shared)[32]) {
  most = warp_largest(most);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = most;
  __syncthreads();
  most = shared[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) most = fmaxf(most, shared[w]);
  return most;
}

inline Prepared prepared_of(void* inputs, void* unit, int64_t pass, int64_t swizzled) {
  return {static_cast<__half*>(inputs), static_cast<float*>(unit), static_cast<int>(pass), static_cast<int>(swizzled)};
}

}  // namespace prepared
