// The sum over a token's experts, for all kernels of experts on sm_90.

#pragma once

#include "hopper.cuh"

namespace moe {

constexpr int kCombineThreads = 128;
constexpr int kMaxTopK = 32;

// Which local expert a slot is for, or -1.
__device__ __forceinline__ int local_expert(const int* ids, int slot, int first_expert, int experts) {
  const int local = ids[slot] - first_expert;
  return local >= 0 && local < experts ? local : -1;
}

// Slots of a token in ascending expert id, in fp32; slots of experts elsewhere are skipped. With the shared
// expert's output the sum is rounded to bfloat16.
template <bool kShared>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const uint4* slots, const int* ids, int top_k, int pieces, int first_expert, int experts,
                   const uint4* shared, void* out) {
  constexpr int kAtOnce = 4;
  const int token = blockIdx.x, at = blockIdx.y * kCombineThreads + threadIdx.x, lane = threadIdx.x % 32;
  hopper::wait_for_previous();
  hopper::let_next_begin();
  const unsigned held =
      __ballot_sync(~0u, lane < top_k && local_expert(ids, token * top_k + lane, first_expert, experts) >= 0);
  if (at >= pieces) return;
  const uint4* const from = slots + static_cast<int64_t>(token) * top_k * pieces + at;
  float sum[8] = {}, values[8];
  for (int k = 0; k < top_k; k += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      raw[i] = held >> (k + i) & 1 ? from[static_cast<int64_t>(k + i) * pieces] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      hopper::widen(raw[i], values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += values[j];
    }
  }
  const int64_t to = static_cast<int64_t>(token) * pieces + at;
  if constexpr (kShared) {
    hopper::widen(shared[to], values);
    uint4 rounded;
    __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&rounded);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      pairs[j] = __floats2bfloat162_rn(sum[2 * j] + values[2 * j], sum[2 * j + 1] + values[2 * j + 1]);
    static_cast<uint4*>(out)[to] = rounded;
  } else {
    float4* const floats = static_cast<float4*>(out) + to * 2;
    floats[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    floats[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
}

// `out` [tokens, hidden] is float, or with `shared` bfloat16.
inline cudaError_t combine(const void* slots, const int* ids, int64_t tokens, int top_k, int hidden, int first_expert,
                           int experts, const void* shared, void* out, cudaStream_t stream) {
  const int pieces = hidden / 8;
  const dim3 grid(static_cast<unsigned>(tokens),
                  static_cast<unsigned>((pieces + kCombineThreads - 1) / kCombineThreads));
  return hopper::launch_behind(shared ? combine_kernel<true> : combine_kernel<false>, grid, kCombineThreads, 0,
                               stream, static_cast<const uint4*>(slots), ids, top_k, pieces, first_expert, experts,
                               static_cast<const uint4*>(shared), out);
}

}  // namespace moe
