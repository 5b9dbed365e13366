// What lies between two sublayers, in one launch on sm_90. See kernels/mhc/seam_cuda.py.
//
// A cluster of sixteen blocks takes kTokens tokens, each block its share of the channels of all four
// streams: the output is mixed in, the next input collapsed, and while the cluster exchanges the sums
// of squares, the projection runs over the new streams in shared memory, its weights streaming
// by. Sums have an order of their own: the bits of a token do not depend on how many share a cluster.

#include "mixing.cuh"

using namespace mixing;

namespace {

constexpr int kRanks = 16;  // more than what is portable: sm_90 has clusters of 16
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kWarpColumns = kColumns / kWarps;
constexpr int kChunk = 256;  // inputs of the projection, of a block's share
constexpr int kChunkBytes = kColumns * kChunk * 4;
constexpr int kMaxShared = 108 * 1024;  // two blocks a multiprocessor

struct Arguments {
  __nv_bfloat16* streams;       // [tokens, 4, hidden], replaced
  const __nv_bfloat16* output;  // [tokens, hidden] of the sublayer behind, or null: streams stay
  const float *post, *comb;     // [tokens, 4], [tokens, 4, 4], of the same sublayer
  const float* carried;         // [tokens, 4]: weights of the collapse
  const float* fn;              // [16, chunks, 24, 256]
  const float *scale, *base;    // [3], [24]
  const float* norm;            // [hidden]
  __nv_bfloat16* next;          // [tokens, hidden]: input of the sublayer ahead, or null: not wanted
  float *next_pre, *next_post, *next_comb;
  int tokens, hidden, iters, stages;
  float hc_eps, norm_eps;
};

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ float read_of_rank(const float* p, int rank) {
  uint32_t address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
// In the order of ranks.
__device__ __forceinline__ float sum_of_ranks(const float* p) {
  float parts[kRanks];
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank) parts[rank] = read_of_rank(p, rank);
  float sum = parts[0];
#pragma unroll
  for (int rank = 1; rank < kRanks; ++rank) sum += parts[rank];
  return sum;
}

template <int kTokens>
__global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 2) seam_kernel(const Arguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float squares[kTokens][2];  // of this block's share: streams, collapse
  __shared__ float columns[kTokens][kColumns];
  __shared__ float totals[kTokens][2];
  __shared__ float raw[kTokens][kColumns];
  __shared__ __align__(8) uint64_t barriers[8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kRanks, first_token = blockIdx.x / kRanks * kTokens;
  const int count = min(kTokens, args.tokens - first_token);
  const int share = args.hidden / kRanks, pieces = share / 8;
  const int chunks = (kStreams * share + kChunk - 1) / kChunk, padded = chunks * kChunk;
  uint8_t* const ring = shared;
  __nv_bfloat16* const held = reinterpret_cast<__nv_bfloat16*>(shared + args.stages * kChunkBytes);
  float2* const piece_squares = reinterpret_cast<float2*>(held + kTokens * padded);

  const float* const weights = args.fn + static_cast<int64_t>(rank) * chunks * (kColumns * kChunk);
  auto load = [&](int chunk) {
    const uint32_t barrier = shared_address(barriers + chunk % args.stages);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kChunkBytes) : "memory");
    bulk_copy(shared_address(ring + chunk % args.stages * kChunkBytes), weights + chunk * (kColumns * kChunk),
              kChunkBytes, barrier);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.stages; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + s)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int chunk = 0; chunk < min(chunks, args.stages); ++chunk) load(chunk);
  }
  for (int i = threadIdx.x; i < kTokens * (padded - kStreams * share) / 2; i += kThreads) {
    const int gap = (padded - kStreams * share) / 2;
    reinterpret_cast<uint32_t*>(held)[(i / gap * padded + kStreams * share) / 2 + i % gap] = 0u;
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();

  for (int item = threadIdx.x; item < count * pieces; item += kThreads) {
    const int t = item / pieces, piece = item % pieces;
    const int64_t token = first_token + t;
    const int channel = rank * share + piece * 8;
    float streams[kStreams][8];
    uint4* at[kStreams];
    uint4 packed[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      at[i] = reinterpret_cast<uint4*>(args.streams + (token * kStreams + i) * args.hidden + channel);
      packed[i] = *at[i];
    }
    const float4 pre =
        args.next ? *reinterpret_cast<const float4*>(args.carried + token * kStreams) : make_float4(0.f, 0.f, 0.f, 0.f);
    if (args.output) {
      const float4 post4 = *reinterpret_cast<const float4*>(args.post + token * kStreams);
      const float post[kStreams] = {post4.x, post4.y, post4.z, post4.w};
      float comb[kStreams][kStreams];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const float4 row = *reinterpret_cast<const float4*>(args.comb + (token * kStreams + i) * kStreams);
        comb[i][0] = row.x, comb[i][1] = row.y, comb[i][2] = row.z, comb[i][3] = row.w;
      }
      expand(packed, *reinterpret_cast<const uint4*>(args.output + token * args.hidden + channel), post, comb);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) *at[j] = packed[j];
    }
    float2 sums = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      *reinterpret_cast<uint4*>(held + t * padded + i * share + piece * 8) = packed[i];
      widen(packed[i], streams[i]);
#pragma unroll
      for (int c = 0; c < 8; ++c) sums.x = fmaf(streams[i][c], streams[i][c], sums.x);
    }
    float folded[8];
    collapse(streams, pre, folded);
#pragma unroll
    for (int c = 0; c < 8; ++c) sums.y = fmaf(folded[c], folded[c], sums.y);
    piece_squares[item] = sums;
  }
  __syncthreads();
  for (int t = warp; t < count; t += kWarps) {
    float2 sums = {0.f, 0.f};
    for (int piece = lane; piece < pieces; piece += 32) {
      sums.x += piece_squares[t * pieces + piece].x;
      sums.y += piece_squares[t * pieces + piece].y;
    }
    for (int step = 16; step; step /= 2) {
      sums.x += __shfl_xor_sync(~0u, sums.x, step);
      sums.y += __shfl_xor_sync(~0u, sums.y, step);
    }
    if (lane == 0) squares[t][0] = sums.x, squares[t][1] = sums.y;
  }
  __syncthreads();
  cluster_arrive();

  {  // projection: three columns a warp, over this block's share of the inputs
    float sum[kTokens][kWarpColumns] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int stage = chunk % args.stages;
      wait_barrier(shared_address(barriers + stage), chunk / args.stages & 1);
      const float4* const rows = reinterpret_cast<const float4*>(ring + stage * kChunkBytes) +
                                 warp * kWarpColumns * (kChunk / 4) + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 w[kWarpColumns];
#pragma unroll
        for (int c = 0; c < kWarpColumns; ++c) w[c] = rows[c * (kChunk / 4) + half * 32];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const uint2 x = *reinterpret_cast<const uint2*>(held + t * padded + chunk * kChunk + half * 128 + lane * 4);
          const float x0 = __uint_as_float(x.x << 16), x1 = __uint_as_float(x.x & 0xFFFF0000u);
          const float x2 = __uint_as_float(x.y << 16), x3 = __uint_as_float(x.y & 0xFFFF0000u);
#pragma unroll
          for (int c = 0; c < kWarpColumns; ++c)
            sum[t][c] = fmaf(x3, w[c].w, fmaf(x2, w[c].z, fmaf(x1, w[c].y, fmaf(x0, w[c].x, sum[t][c]))));
        }
      }
      __syncthreads();  // all have read the stage
      if (threadIdx.x == 0 && chunk + args.stages < chunks) load(chunk + args.stages);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
      for (int c = 0; c < kWarpColumns; ++c) {
        float part = sum[t][c];
        for (int step = 16; step; step /= 2) part += __shfl_xor_sync(~0u, part, step);
        if (lane == 0) columns[t][warp * kWarpColumns + c] = part;
      }
  }
  cluster_wait();
  if (threadIdx.x < count * 2) {
    const float sum = sum_of_ranks(&squares[threadIdx.x / 2][threadIdx.x % 2]);
    const float width = static_cast<float>(threadIdx.x % 2 ? args.hidden : kStreams * args.hidden);
    totals[threadIdx.x / 2][threadIdx.x % 2] = __fdiv_rn(1.f, sqrtf(__fdiv_rn(sum, width) + args.norm_eps));
  }
  __syncthreads();
  cluster_arrive();  // columns are there

  for (int item = threadIdx.x; args.next && item < count * pieces; item += kThreads) {
    const int t = item / pieces, piece = item % pieces;
    const int64_t token = first_token + t;
    const int channel = rank * share + piece * 8;
    const float4 pre = *reinterpret_cast<const float4*>(args.carried + token * kStreams);
    float streams[kStreams][8], folded[8], gain[8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i)
      widen(*reinterpret_cast<const uint4*>(held + t * padded + i * share + piece * 8), streams[i]);
    collapse(streams, pre, folded);
    *reinterpret_cast<float4*>(gain) = *reinterpret_cast<const float4*>(args.norm + channel);
    *reinterpret_cast<float4*>(gain + 4) = *reinterpret_cast<const float4*>(args.norm + channel + 4);
#pragma unroll
    for (int c = 0; c < 8; ++c) folded[c] = folded[c] * totals[t][1] * gain[c];
    *reinterpret_cast<uint4*>(args.next + token * args.hidden + channel) = narrow(folded);
  }
  cluster_wait();
  for (int t = rank + kRanks * warp; t < count; t += kRanks * kWarps)  // a token has one block and warp
    if (lane < kColumns) raw[t][lane] = sum_of_ranks(&columns[t][lane]) * totals[t][0];
  cluster_arrive();  // nobody reads this block any more, once all have arrived
  for (int t = rank + kRanks * warp; t < count; t += kRanks * kWarps) {
    const int64_t token = first_token + t;
    __syncwarp();
    if (lane < kStreams)
      args.next_pre[token * kStreams + lane] = sigmoid(fmaf(raw[t][lane], args.scale[0], args.base[lane])) + args.hc_eps;
    else if (lane < 2 * kStreams)
      args.next_post[token * kStreams + lane - kStreams] =
          sigmoid(fmaf(raw[t][lane], args.scale[1], args.base[lane])) * 2.f;
    else if (lane == 2 * kStreams) {
      float comb[kStreams][kStreams];
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          const int at = 2 * kStreams + i * kStreams + j;
          comb[i][j] = fmaf(raw[t][at], args.scale[2], args.base[at]);
        }
      sinkhorn(comb, args.iters, args.hc_eps);
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
        *reinterpret_cast<float4*>(args.next_comb + (token * kStreams + i) * kStreams) =
            make_float4(comb[i][0], comb[i][1], comb[i][2], comb[i][3]);
    }
    __syncwarp();
  }
  cluster_wait();
}

template <int kTokens>
cudaError_t run(Arguments arguments, int* clusters, cudaStream_t stream) {
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error =
        cudaFuncSetAttribute(seam_kernel<kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
    if (error != cudaSuccess) return error;
    const cudaError_t refused =
        cudaFuncSetAttribute(seam_kernel<kTokens>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (refused != cudaSuccess) return refused;
    allowed = true;
  }
  const int share = arguments.hidden / kRanks;
  const int chunks = (kStreams * share + kChunk - 1) / kChunk;
  const int held = kTokens * (chunks * kChunk * 2 + share / 8 * 8);
  arguments.stages = (kMaxShared - held) / kChunkBytes;
  if (arguments.stages > 8) arguments.stages = 8;
  if (arguments.stages > chunks) arguments.stages = chunks;
  if (arguments.stages < 1) return cudaErrorInvalidValue;
  if (clusters) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kRanks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kRanks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = held + arguments.stages * kChunkBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(clusters, seam_kernel<kTokens>, &config);
  }
  return launch_behind(seam_kernel<kTokens>, (arguments.tokens + kTokens - 1) / kTokens * kRanks, kThreads,
                       held + arguments.stages * kChunkBytes, stream, arguments);
}

// With `clusters`: only ask how many run at once.
cudaError_t launch(const Arguments& arguments, int64_t cluster_tokens, int* clusters, cudaStream_t stream) {
  if (cluster_tokens == 1) return run<1>(arguments, clusters, stream);
  if (cluster_tokens == 2) return run<2>(arguments, clusters, stream);
  if (cluster_tokens == 4) return run<4>(arguments, clusters, stream);
  if (cluster_tokens == 8) return run<8>(arguments, clusters, stream);
  if (cluster_tokens == 16) return run<16>(arguments, clusters, stream);
  return run<20>(arguments, clusters, stream);
}

}  // namespace

// All pointers are of the device. Both return a cudaError_t.
extern "C" int seam(void* streams, const void* output, const void* post, const void* comb, const void* carried,
                    const void* fn, const void* scale, const void* base, const void* norm, int64_t tokens,
                    int64_t hidden, int64_t iters, float hc_eps, float norm_eps, int64_t cluster_tokens, void* next,
                    void* next_pre, void* next_post, void* next_comb, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Arguments arguments{static_cast<__nv_bfloat16*>(streams),
                            static_cast<const __nv_bfloat16*>(output),
                            static_cast<const float*>(post),
                            static_cast<const float*>(comb),
                            static_cast<const float*>(carried),
                            static_cast<const float*>(fn),
                            static_cast<const float*>(scale),
                            static_cast<const float*>(base),
                            static_cast<const float*>(norm),
                            static_cast<__nv_bfloat16*>(next),
                            static_cast<float*>(next_pre),
                            static_cast<float*>(next_post),
                            static_cast<float*>(next_comb),
                            static_cast<int>(tokens),
                            static_cast<int>(hidden),
                            static_cast<int>(iters),
                            0,
                            hc_eps,
                            norm_eps};
  return launch(arguments, cluster_tokens, nullptr, stream);
}

// How many clusters run at once.
extern "C" int seam_clusters(int64_t hidden, int64_t cluster_tokens, int* clusters) {
  Arguments arguments{};
  arguments.hidden = static_cast<int>(hidden);
  return launch(arguments, cluster_tokens, clusters, nullptr);
}
