// What lies between two sublayers, for many tokens on sm_90, around a projection by the tensor cores: see
// kernels/mhc/seam_prefill_cuda.py. Each kernel does one token at a time, in one order of sums.

#include "mixing.cuh"

using namespace mixing;

namespace {

constexpr int kThreads = 320, kWarps = kThreads / 32;
constexpr int kMaxPieces = 4;  // of eight channels, of a thread
constexpr int kMixThreads = 64;
constexpr int kStreamColumns = 128;  // of a stream's share of the projection: three times 24, the rest unused

struct Arguments {
  __nv_bfloat16* streams;       // [tokens, 4, hidden], replaced
  const __nv_bfloat16* output;  // [tokens, hidden] of the sublayer behind, or null: streams stay
  const float *post, *comb;     // [tokens, 4], [tokens, 4, 4], of the same sublayer
  const float* carried;         // [tokens, 4]: weights of the collapse
  const float* norm;            // [hidden]
  uint4 *next, *rounded;        // [tokens, hidden]: input of the sublayer ahead, and FP8-rounded
  float* unit;                  // [tokens]: of the projection's columns
  int hidden;
  float norm_eps;
};

// Eight values of a group of 32 that four neighbouring lanes share.
__device__ __forceinline__ uint4 round_eight(const float (&values)[8]) {
  float most = 0.f, rounded[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
  const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(scale));  // of a power of two
#pragma unroll
  for (int i = 0; i < 8; ++i) rounded[i] = round_e4m3(values[i] * inverse) * scale;
  return narrow(rounded);
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <int kPieces>
__global__ void __launch_bounds__(kThreads, kPieces <= 2 ? 2 : 1) streams_kernel(const Arguments args) {
  __shared__ float by_warp[2][kWarps];
  const int64_t token = blockIdx.x;
  const int pieces = args.hidden / 8;
  wait_for_previous();
  let_next_begin();
  uint4* const streams = reinterpret_cast<uint4*>(args.streams) + token * kStreams * pieces;
  const float4 pre = *reinterpret_cast<const float4*>(args.carried + token * kStreams);
  uint4 held[kPieces][kStreams], output[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int at = p * kThreads + threadIdx.x;
    if (at >= pieces) continue;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) held[p][i] = streams[i * pieces + at];
    if (args.output) output[p] = __ldg(reinterpret_cast<const uint4*>(args.output) + token * pieces + at);
  }
  float post[kStreams], comb[kStreams][kStreams];
  if (args.output) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      post[i] = args.post[token * kStreams + i];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) comb[i][j] = args.comb[(token * kStreams + i) * kStreams + j];
    }
  }
  float folded[kPieces][8], own = 0.f, of_folded = 0.f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int at = p * kThreads + threadIdx.x;
#pragma unroll
    for (int c = 0; c < 8; ++c) folded[p][c] = 0.f;
    if (at >= pieces) continue;
    if (args.output) {
      expand(held[p], output[p], post, comb);
#pragma unroll
      for (int i = 0; i < kStreams; ++i) streams[i * pieces + at] = held[p][i];
    }
    float values[kStreams][8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      widen(held[p][i], values[i]);
#pragma unroll
      for (int c = 0; c < 8; ++c) own = fmaf(values[i][c], values[i][c], own);
    }
    collapse(values, pre, folded[p]);
#pragma unroll
    for (int c = 0; c < 8; ++c) of_folded = fmaf(folded[p][c], folded[p][c], of_folded);
  }
  own = warp_sum(own), of_folded = warp_sum(of_folded);
  if (threadIdx.x % 32 == 0) by_warp[0][threadIdx.x / 32] = own, by_warp[1][threadIdx.x / 32] = of_folded;
  __syncthreads();
  own = of_folded = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) own += by_warp[0][w], of_folded += by_warp[1][w];
  const float width = static_cast<float>(args.hidden);
  const float factor = __fdiv_rn(1.f, sqrtf(__fdiv_rn(of_folded, width) + args.norm_eps));
  if (threadIdx.x == 0) args.unit[token] = __fdiv_rn(1.f, sqrtf(__fdiv_rn(own, kStreams * width) + args.norm_eps));
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int at = p * kThreads + threadIdx.x;  // whole groups of four lanes are there, or not
    float gain[8] = {};
    if (at < pieces) {
      *reinterpret_cast<float4*>(gain) = __ldg(reinterpret_cast<const float4*>(args.norm + at * 8));
      *reinterpret_cast<float4*>(gain + 4) = __ldg(reinterpret_cast<const float4*>(args.norm + at * 8 + 4));
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) folded[p][c] = round_bf16(folded[p][c] * factor * gain[c]);
    const uint4 rounded = round_eight(folded[p]);
    if (at >= pieces) continue;
    args.next[token * pieces + at] = narrow(folded[p]);
    args.rounded[token * pieces + at] = rounded;
  }
}

struct Mix {
  const float* columns;  // [tokens, 4, 128]: by the weights' first, second and third eight bits
  const float *unit, *scale, *base;
  float *pre, *post, *comb;
  int tokens, iters;
  float eps;
};

__global__ void __launch_bounds__(kMixThreads) mix_kernel(const Mix args) {
  const int token = blockIdx.x * kMixThreads + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  if (token >= args.tokens) return;
  const float unit = args.unit[token];
  float raw[kColumns] = {};
  for (int stream = 0; stream < kStreams; ++stream) {
    const float4* const columns =
        reinterpret_cast<const float4*>(args.columns + (static_cast<int64_t>(token) * kStreams + stream) * kStreamColumns);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const float4 high = columns[i], middle = columns[kColumns / 4 + i], low = columns[kColumns / 2 + i];
      raw[4 * i] += low.x + middle.x + high.x;
      raw[4 * i + 1] += low.y + middle.y + high.y;
      raw[4 * i + 2] += low.z + middle.z + high.z;
      raw[4 * i + 3] += low.w + middle.w + high.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) raw[i] *= unit;
  float comb[kStreams][kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    args.pre[token * kStreams + i] = sigmoid(fmaf(raw[i], args.scale[0], args.base[i])) + args.eps;
    args.post[token * kStreams + i] = sigmoid(fmaf(raw[kStreams + i], args.scale[1], args.base[kStreams + i])) * 2.f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const int at = 2 * kStreams + i * kStreams + j;
      comb[i][j] = fmaf(raw[at], args.scale[2], args.base[at]);
    }
  }
  sinkhorn(comb, args.iters, args.eps);
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
    *reinterpret_cast<float4*>(args.comb + (token * kStreams + i) * kStreams) =
        make_float4(comb[i][0], comb[i][1], comb[i][2], comb[i][3]);
}

}  // namespace

// All pointers are of the device; hidden is a multiple of 64, at most 10,240. Both return a cudaError_t.
extern "C" int seam_streams(void* streams, const void* output, const void* post, const void* comb,
                            const void* carried, const void* norm, int64_t tokens, int64_t hidden, float norm_eps,
                            void* next, void* rounded, void* unit, void* stream_pointer) {
  const Arguments args{static_cast<__nv_bfloat16*>(streams),
                       static_cast<const __nv_bfloat16*>(output),
                       static_cast<const float*>(post),
                       static_cast<const float*>(comb),
                       static_cast<const float*>(carried),
                       static_cast<const float*>(norm),
                       static_cast<uint4*>(next),
                       static_cast<uint4*>(rounded),
                       static_cast<float*>(unit),
                       static_cast<int>(hidden),
                       norm_eps};
  const int64_t pieces = (hidden / 8 + kThreads - 1) / kThreads;
  if (pieces > kMaxPieces) return cudaErrorInvalidValue;
  const auto kernel = pieces == 1 ? streams_kernel<1> : pieces == 2 ? streams_kernel<2> : streams_kernel<kMaxPieces>;
  return launch_behind(kernel, static_cast<unsigned>(tokens), kThreads, 0, static_cast<cudaStream_t>(stream_pointer),
                       args);
}

extern "C" int seam_mix(const void* columns, const void* unit, const void* scale, const void* base, int64_t tokens,
                        int64_t iters, float eps, void* pre, void* post, void* comb, void* stream_pointer) {
  const Mix args{static_cast<const float*>(columns),
                 static_cast<const float*>(unit),
                 static_cast<const float*>(scale),
                 static_cast<const float*>(base),
                 static_cast<float*>(pre),
                 static_cast<float*>(post),
                 static_cast<float*>(comb),
                 static_cast<int>(tokens),
                 static_cast<int>(iters),
                 eps};
  return launch_behind(mix_kernel, static_cast<unsigned>((tokens + kMixThreads - 1) / kMixThreads), kMixThreads, 0,
                       static_cast<cudaStream_t>(stream_pointer), args);
}
