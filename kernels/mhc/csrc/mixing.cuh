// What the seams between sublayers share: how streams collapse, and how their mix is made of the
// projection's columns.

#pragma once

#include "hopper.cuh"

namespace mixing {

using namespace hopper;

constexpr int kStreams = 4;
constexpr int kColumns = (2 + kStreams) * kStreams;

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }

__device__ __forceinline__ uint4 narrow(const float (&values)[8]) {
  uint4 packed;
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return packed;
}

// Eight channels of all streams with what the sublayer made of them: Σ_i comb_ij · X_i + post_j · y, rounded.
__device__ __forceinline__ void expand(uint4 (&streams)[kStreams], const uint4& output, const float (&post)[kStreams],
                                       const float (&comb)[kStreams][kStreams]) {
  float before[kStreams][8], own[8];
  widen(output, own);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) widen(streams[i], before[i]);
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    float mixed[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      mixed[c] = own[c] * post[j];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) mixed[c] = fmaf(before[i][c], comb[i][j], mixed[c]);
    }
    streams[j] = narrow(mixed);
  }
}

// Σ_i pre_i · X_i of eight channels, rounded.
__device__ __forceinline__ void collapse(const float (&streams)[kStreams][8], const float4& pre, float (&to)[8]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float sum = streams[0][c] * pre.x;
    sum = fmaf(streams[1][c], pre.y, sum);
    sum = fmaf(streams[2][c], pre.z, sum);
    to[c] = round_bf16(fmaf(streams[3][c], pre.w, sum));
  }
}

// Rows, then columns, `iters` times; comb[i][j] is source i, destination j.
__device__ inline void sinkhorn(float (&comb)[kStreams][kStreams], int iters, float eps) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    const float most = fmaxf(fmaxf(comb[i][0], comb[i][1]), fmaxf(comb[i][2], comb[i][3]));
#pragma unroll
    for (int j = 0; j < kStreams; ++j) comb[i][j] = expf(comb[i][j] - most);
  }
#pragma unroll 1
  for (int k = 0; k < iters; ++k) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      const float factor = reciprocal(comb[i][0] + comb[i][1] + comb[i][2] + comb[i][3] + (k ? eps : 0.f));
#pragma unroll
      for (int j = 0; j < kStreams; ++j) comb[i][j] = comb[i][j] * factor + (k ? 0.f : eps);
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float factor = reciprocal(comb[0][j] + comb[1][j] + comb[2][j] + comb[3][j] + eps);
#pragma unroll
      for (int i = 0; i < kStreams; ++i) comb[i][j] *= factor;
    }
  }
}

}  // namespace mixing
