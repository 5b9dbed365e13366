// What the two kernels of FP8 linears share: the layout of weights, rounding of the inputs, the sum over
// slices of K. See kernels/quant/linear_cuda.py.

#pragma once

#include "hopper.cuh"

namespace fp8_linear {

using namespace hopper;

constexpr int kOut = 64;           // outputs of a unit
constexpr int kChunkBytes = 4224;  // of a unit and 64 positions of K: codes, four scales, padding
constexpr int kPrepareThreads = 512;

// Four e4m3 codes to two fp16 pairs, times 2^-8. Each half of the word holds a code in place, sign in
// bit 15 and the rest in 13..7, and one with its sign in bit 14 and the rest in 6..0.
__device__ __forceinline__ void unpack(uint32_t w, uint32_t& a, uint32_t& b) {
  a = w & 0xBF80BF80u;
  b = ((w << 7) & 0x3F803F80u) | ((w << 1) & 0x80008000u);
}

// Rows of 128 bytes as wgmma reads them, in the order of K that the weights have: of the 16 positions
// of a step thread q holds 2q, 2q + 1, 2q + 8, 2q + 9, which are 8q + 4 step + 0…3 of their 32.
template <int kRows>
__device__ __forceinline__ void store_swizzled(uint8_t* inputs, int token, int k, int steps, const uint4& packed) {
  const int row = token % kRows, group = k % 64 / 32, q = k % 32 / 8;
  uint8_t* const to =
      inputs + ((static_cast<int64_t>(token / kRows) * steps + k / kChunkPositions) * kRows + row) * 128 + q * 4;
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<uint32_t*>(to + ((group * 4 + i) ^ (row & 7)) * 16) = words[i];
}

// A token a block: FP8 rounding in groups of 32, then fp16 times a power of two, in its pass.
template <int kRows, bool kSwizzled>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    prepare_kernel(const __nv_bfloat16* x, int depth, __half* inputs, float* input_unit) {
  __shared__ float most_by_warp[kPrepareThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const uint4* const row = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(token) * depth);
  float most = 0.f;
  for (int at = threadIdx.x; at < depth / 8; at += kPrepareThreads) most = fmaxf(most, largest(row[at]));
  most = warp_largest(most);
  if (lane == 0) most_by_warp[warp] = most;
  __syncthreads();
  const float factor = storage_factor(warp_largest(most_by_warp[lane % (kPrepareThreads / 32)]));
  const int steps = depth / kChunkPositions;
  for (int at = threadIdx.x; at < depth / 8; at += kPrepareThreads) {
    const uint4 packed = rounded_positions(row[at], factor);
    if (kSwizzled)
      store_swizzled<kRows>(reinterpret_cast<uint8_t*>(inputs), token, at * 8, steps, packed);
    else
      *reinterpret_cast<uint4*>(inputs + element<kRows>(token / kRows, token % kRows, at * 8, steps)) = packed;
  }
  if (threadIdx.x == 0) input_unit[token] = 1.f / factor;
}

// Adds the slices in order: float [slices, tokens, width] -> bfloat16 [tokens, width].
__global__ void __launch_bounds__(256)
    add_slices_kernel(const float4* parts, const float* input_unit, int slices, int tokens, int width,
                      uint2* out) {
  wait_for_previous();
  const int quads = width / 4;
  const int64_t count = static_cast<int64_t>(tokens) * quads;
  for (int64_t at = blockIdx.x * 256 + threadIdx.x; at < count; at += static_cast<int64_t>(gridDim.x) * 256) {
    float4 sum = parts[at];
    for (int slice = 1; slice < slices; ++slice) {
      const float4 part = parts[slice * count + at];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    const float unit = input_unit[at / quads] * 256.0f;
    const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x * unit, sum.y * unit);
    const __nv_bfloat162 high = __floats2bfloat162_rn(sum.z * unit, sum.w * unit);
    out[at] = make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
  }
}

}  // namespace fp8_linear
