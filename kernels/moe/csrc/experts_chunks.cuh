// What kernels that stream MXFP4 experts share: a chunk of 64 outputs by 64 positions of K. See
// kernels/moe/experts_cuda.py for its layout.

#pragma once

#include "hopper.cuh"

namespace moe {

constexpr int kChunkOutputs = 64;
constexpr int kChunkBytes = 2176;  // 2,048 of nibbles, 128 of scales
constexpr int kCodeBytes = 2048;

constexpr float kHiddenScale = 128.0f;  // stored fp16 = hidden · 2^7: the least quantum fits
constexpr float kCodeScale = 16384.0f;  // codes are unpacked times 2^-14

// Eight e2m1 codes to the four fp16 pairs of a fragment, times 2^-14. An fp16 takes its sign in bit
// 15 and the code's magnitude in 11..9. Each half of the word holds four codes: the first in place,
// the second 3 bits lower, the others with sign and magnitude apart, so that all are left shifts:
// those run beside the logic unit, which is the bottleneck.
__device__ __forceinline__ void unpack(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x0E000E00u;
  a[0] = w & (kSign | kMagnitude);
  a[1] = (w << 3) & (kSign | kMagnitude);
  a[2] = ((w << 6) & kMagnitude) | ((w << 1) & kSign);
  a[3] = ((w << 9) & kMagnitude) | ((w << 2) & kSign);
}

// Barriers in shared memory that count the bytes of copies; one arrival each.
__device__ __forceinline__ void init_barriers(uint64_t* barriers, int count) {
  for (int i = 0; i < count; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(hopper::shared_address(barriers + i)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Threads of a part of a block.
__device__ __forceinline__ void sync_team(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(threads) : "memory");
}

// A channel of SwiGLU from its two sums, times the token's share, FP8-rounded in the group of 32 that
// the lanes of a warp hold.
__device__ __forceinline__ float activated(float gate_sum, float up_sum, float unit, float limit, float share) {
  const float gate = fminf(hopper::round_bf16(gate_sum * unit), limit);
  const float up = fminf(fmaxf(hopper::round_bf16(up_sum * unit), -limit), limit);
  const float h = __fdiv_rn(1.0f, 1.0f + expf(-gate)) * gate * up;
  return hopper::round_fp8_group(hopper::round_bf16(h * share));
}

}  // namespace moe
