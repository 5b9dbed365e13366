// What lies between the products of a decode step, in bfloat16, on sm_90. See kernels/step/rows_cuda.py.
//
// A block takes a row (a token, a stream of a token or a head of one); sums run over a row in an order
// that its width alone decides.

#include "prepared.cuh"

using namespace hopper;
using prepared::block_largest;
using prepared::Prepared;
using prepared::prepared_of;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStreams = 4;

__device__ __forceinline__ uint4 narrow(const float (&values)[8]) {
  uint4 packed;
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return packed;
}
__device__ __forceinline__ void read_floats(const float* from, float (&values)[8]) {
  *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(from);
  *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(from + 4);
}
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }

// Sums over the block, of kCount values a thread; all threads get them.
template <int kCount>
__device__ __forceinline__ void block_sums(float (&values)[kCount], float (*shared)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    for (int step = 16; step; step /= 2) values[i] += __shfl_xor_sync(~0u, values[i], step);
    if (lane == 0) shared[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = shared[i][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) values[i] += shared[i][w];
  }
}
__device__ __forceinline__ float inverse_root(float squares, int width, float eps) {
  return __fdiv_rn(1.f, sqrtf(__fdiv_rn(squares, static_cast<float>(width)) + eps));
}

// All streams begin as the token's embedding, and the first of them is the input.
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const int* ids, const uint4* table, int pieces, uint4* streams, float4* carried) {
  const int64_t token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const uint4* const row = table + static_cast<int64_t>(ids[token]) * pieces;
  for (int at = threadIdx.x; at < pieces; at += kThreads) {
    const uint4 piece = row[at];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) streams[(token * kStreams + i) * pieces + at] = piece;
  }
  if (threadIdx.x == 0) carried[token] = make_float4(1.f, 0.f, 0.f, 0.f);
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const __nv_bfloat16* x, int64_t stride, const float* weight, int width, float eps, uint4* out) {
  __shared__ float sums[1][kWarps];
  const int64_t row = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const uint4* const from = reinterpret_cast<const uint4*>(x + row * stride);
  float squares[1] = {0.f};
  for (int at = threadIdx.x; at < width / 8; at += kThreads) {
    float values[8];
    widen(from[at], values);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares[0] = fmaf(values[i], values[i], squares[0]);
  }
  block_sums<1>(squares, sums);
  const float scale = inverse_root(squares[0], width, eps);
  for (int at = threadIdx.x; at < width / 8; at += kThreads) {
    float values[8], gain[8];
    widen(from[at], values);
    read_floats(weight + at * 8, gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * gain[i];
    out[row * (width / 8) + at] = narrow(values);
  }
}

// The nearest of 0, ½, 1, 1½, 2, 3, 4, 6, ties to the even code.
__device__ __forceinline__ float round_e2m1(float x) {
  const float size = fminf(fabsf(x), 6.f);
  const float step = size < 2.f ? 0.5f : size < 4.f ? 1.f : 2.f;
  return copysignf(rintf(__fdiv_rn(size, step)) * step, x);
}

// Rotates the last channels of heads and rounds to MXFP4 in groups of 32. Eight channels a thread.
__global__ void __launch_bounds__(kThreads)
    index_query_kernel(const uint4* x, const float* cos, const float* sin, int64_t count, int heads, int dim,
                       int rotated, uint4* out) {
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  float values[8] = {};
  if (at < count) {
    widen(x[at], values);
    const int channel = static_cast<int>(at % (dim / 8)) * 8 - (dim - rotated);
    if (channel >= 0) {
      const int64_t angle = at / (dim / 8) / heads * (rotated / 2) + channel / 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float c = cos[angle + i], s = sin[angle + i], a = values[2 * i], b = values[2 * i + 1];
        values[2 * i] = round_bf16(__fadd_rn(__fmul_rn(a, c), -__fmul_rn(b, s)));
        values[2 * i + 1] = round_bf16(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
      }
    }
  }
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  if (at >= count) return;
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 6.f * __uint_as_float(1u << 23)), 6.f));
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = round_e2m1(__fdiv_rn(values[i], scale)) * scale;
  out[at] = narrow(values);
}

__device__ __forceinline__ float activate(float gate, float up, float limit) {
  const float g = gate == gate ? fminf(gate, limit) : gate;
  const float u = up == up ? fminf(fmaxf(up, -limit), limit) : up;
  return sigmoid(g) * g * u;
}

// gate | up of a row to silu(min(gate, limit)) · clamp(up).
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const uint4* both, int64_t count, int pieces, float limit, uint4* out) {
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  if (at >= count) return;
  const int64_t from = at / pieces * 2 * pieces + at % pieces;
  float gate[8], up[8];
  widen(both[from], gate);
  widen(both[from + pieces], up);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = activate(gate[i], up[i], limit);
  out[at] = narrow(gate);
}

// Values of a linear whose slices have not been added: see PartialSums in kernels/quant/linear_cuda.py.
struct Parts {
  const float* parts;  // [slices, rows, width]
  const float* unit;   // [rows], or null
  int slices, width;
  int64_t count;  // of a slice

  __device__ __forceinline__ void read(int64_t row, int column, float (&values)[8]) const {
    constexpr int kAhead = 4;  // slices that are loaded at once
    const float* const from = parts + row * width + column;
    const float factor = (unit ? unit[row] : 1.f) * 256.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.f;
    for (int first = 0; first < slices; first += kAhead) {
      float part[kAhead][8];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < slices) read_floats(from + (first + i) * count, part[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < slices)
#pragma unroll
          for (int e = 0; e < 8; ++e) values[e] = first + i ? values[e] + part[i][e] : part[i][e];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = round_bf16(values[i] * factor);
  }
};

constexpr int kRowThreads = 1024, kRowPieces = 2;  // of kernels with a block a row: eight channels each

__global__ void __launch_bounds__(kRowThreads)
    swiglu_parts_kernel(const Parts both, int inter, float limit, uint4* out, const Prepared prepared) {
  __shared__ float by_warp[32];
  const int token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  uint4 packed[kRowPieces];
  float most = 0.f;
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own) {
    const int at = (threadIdx.x + own * blockDim.x) * 8;
    packed[own] = make_uint4(0, 0, 0, 0);
    if (at >= inter) break;
    float gate[8], up[8];
    both.read(token, at, gate);
    both.read(token, at + inter, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = activate(gate[i], up[i], limit);
    packed[own] = narrow(gate);
    out[(static_cast<int64_t>(token) * inter + at) / 8] = packed[own];
    most = fmaxf(most, largest(packed[own]));
  }
  if (!prepared.inputs) return;
  most = block_largest(most, by_warp);
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own)
    prepared.store(token, (threadIdx.x + own * blockDim.x) * 8, inter, packed[own], most);
}

// A token's experts in ascending order, and the shared one; eight channels a thread.
__global__ void __launch_bounds__(kThreads)
    combine_shared_kernel(const uint4* slots, const int* ids, int top_k, int first_expert, int experts,
                          const Parts shared, int64_t count, int pieces, uint4* out) {
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  if (at >= count) return;
  constexpr int kAhead = 6;  // experts whose rows are read at once
  const int64_t row = at / pieces;
  float sum[8] = {}, own[8];
  for (int first = 0; first < top_k; first += kAhead) {
    uint4 raw[kAhead];
    bool here[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = min(first + i, top_k - 1), local = ids[row * top_k + k] - first_expert;
      here[i] = first + i < top_k && local >= 0 && local < experts;
      raw[i] = slots[(row * top_k + k) * pieces + at % pieces];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float values[8];
      widen(raw[i], values);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (here[i]) sum[e] += values[e];
    }
  }
  shared.read(row, static_cast<int>(at % pieces) * 8, own);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += own[i];
  out[at] = narrow(sum);
}

// Sums of experts and the shared one.
__global__ void __launch_bounds__(kThreads)
    add_shared_kernel(const float* sums, const uint4* shared, int64_t count, uint4* out) {
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  if (at >= count) return;
  float values[8], own[8];
  read_floats(sums + at * 8, values);
  widen(shared[at], own);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += own[i];
  out[at] = narrow(values);
}

// X_j = Σ_i comb[i][j] · X_i + post_j · output, in place.
__global__ void __launch_bounds__(kThreads)
    expand_kernel(uint4* streams, const uint4* output, const float* post, const float* comb, int pieces) {
  const int64_t token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  float p[kStreams], c[kStreams][kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    p[i] = post[token * kStreams + i];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) c[i][j] = comb[(token * kStreams + i) * kStreams + j];
  }
  for (int at = threadIdx.x; at < pieces; at += kThreads) {
    float before[kStreams][8], own[8];
    widen(output[token * pieces + at], own);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) widen(streams[(token * kStreams + i) * pieces + at], before[i]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      float mixed[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        mixed[e] = own[e] * p[j];
#pragma unroll
        for (int i = 0; i < kStreams; ++i) mixed[e] = fmaf(before[i][e], c[i][j], mixed[e]);
      }
      streams[(token * kStreams + j) * pieces + at] = narrow(mixed);
    }
  }
}

constexpr int kSpread = 4, kSpreadTokens = 33;  // blocks of a token, where so few tokens leave room

// All blocks of a cluster, or of one block all threads.
template <int kBlocks>
__device__ __forceinline__ void together() {
  if constexpr (kBlocks == 1)
    __syncthreads();
  else
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// What the warps of all blocks left in `shared`, in order of blocks and warps.
template <int kBlocks, class Use>
__device__ __forceinline__ void for_warps(const float* shared, const Use& use) {
  const int warps = blockDim.x / 32;
#pragma unroll
  for (int rank = 0; rank < kBlocks; ++rank) {
    uint32_t base = shared_address(shared);
    if (kBlocks > 1) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(base) : "r"(shared_address(shared)), "r"(rank));
    for (int w = 0; w < warps; ++w) {
      float value;
      if (kBlocks > 1)
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(base + 4 * w));
      else
        value = shared[w];
      use(value);
    }
  }
}

// `expand` of what the sublayer behind made, if there is one, in place, and `collapse_norm` for the next.
// A thread has at most kRowPieces pieces of eight channels of all streams.
template <int kBlocks>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kRowThreads / kBlocks)
    join_kernel(uint4* streams, const uint4* output, const float* post, const float* comb, const float* carried,
                const float* norm, int pieces, float eps, uint4* ahead, const Prepared prepared) {
  __shared__ float by_warp[32], most_by_warp[32];
  const int64_t token = blockIdx.x / kBlocks;
  const int rank = blockIdx.x % kBlocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int me = rank * blockDim.x + threadIdx.x, stride = kBlocks * blockDim.x;
  float gain[8];  // of the first piece: mostly the only one
  if (me < pieces) read_floats(norm + me * 8, gain);
  wait_for_previous();
  let_next_begin();
  float pre[kStreams], p[kStreams] = {}, c[kStreams][kStreams] = {};
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    pre[i] = carried[token * kStreams + i];
    if (!output) continue;
    p[i] = post[token * kStreams + i];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) c[i][j] = comb[(token * kStreams + i) * kStreams + j];
  }
  float folded[kRowPieces][8], squares = 0.f;
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own) {
    const int at = me + own * stride;
    if (at >= pieces) break;
    float before[kStreams][8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) widen(streams[(token * kStreams + i) * pieces + at], before[i]);
    if (output) {
      float made[8], mixed[kStreams][8];
      widen(output[token * pieces + at], made);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          mixed[j][e] = made[e] * p[j];
#pragma unroll
          for (int i = 0; i < kStreams; ++i) mixed[j][e] = fmaf(before[i][e], c[i][j], mixed[j][e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const uint4 packed = narrow(mixed[j]);
        streams[(token * kStreams + j) * pieces + at] = packed;
        widen(packed, before[j]);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float sum = before[0][e] * pre[0];
#pragma unroll
      for (int i = 1; i < kStreams; ++i) sum = fmaf(before[i][e], pre[i], sum);
      folded[own][e] = round_bf16(sum);
      squares = fmaf(folded[own][e], folded[own][e], squares);
    }
  }
  for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (lane == 0) by_warp[warp] = squares;
  together<kBlocks>();
  float total = 0.f;
  for_warps<kBlocks>(by_warp, [&](float sum) { total += sum; });
  const float scale = inverse_root(total, pieces * 8, eps);
  uint4 packed[kRowPieces];
  float most = 0.f;
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own) {
    const int at = me + own * stride;
    packed[own] = make_uint4(0, 0, 0, 0);
    if (at >= pieces) break;
    if (own) read_floats(norm + at * 8, gain);
#pragma unroll
    for (int e = 0; e < 8; ++e) folded[own][e] = folded[own][e] * scale * gain[e];
    packed[own] = narrow(folded[own]);
    ahead[token * pieces + at] = packed[own];
    most = fmaxf(most, largest(packed[own]));
  }
  most = warp_largest(most);
  if (lane == 0) most_by_warp[warp] = most;
  together<kBlocks>();
  for_warps<kBlocks>(most_by_warp, [&](float other) { most = fmaxf(most, other); });
  if (kBlocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  if (prepared.inputs) {
#pragma unroll
    for (int own = 0; own < kRowPieces; ++own)
      prepared.store(static_cast<int>(token), (me + own * stride) * 8, pieces * 8, packed[own], most);
  }
  if (kBlocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all have read this block
}

// Rows as they are, rounded for a linear: as `prepare_kernel` of fp8_linear.cuh, sooner where they are few.
template <int kBlocks>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kRowThreads / kBlocks)
    round_kernel(const uint4* x, int pieces, const Prepared prepared) {
  __shared__ float most_by_warp[32];
  const int64_t token = blockIdx.x / kBlocks;
  const int me = blockIdx.x % kBlocks * blockDim.x + threadIdx.x, stride = kBlocks * blockDim.x;
  wait_for_previous();
  let_next_begin();
  uint4 raw[kRowPieces];
  float most = 0.f;
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own) {
    const int at = me + own * stride;
    raw[own] = at < pieces ? x[token * pieces + at] : make_uint4(0, 0, 0, 0);
    most = fmaxf(most, largest(raw[own]));
  }
  most = warp_largest(most);
  if (threadIdx.x % 32 == 0) most_by_warp[threadIdx.x / 32] = most;
  together<kBlocks>();
  for_warps<kBlocks>(most_by_warp, [&](float other) { most = fmaxf(most, other); });
  if (kBlocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#pragma unroll
  for (int own = 0; own < kRowPieces; ++own)
    prepared.store(static_cast<int>(token), (me + own * stride) * 8, pieces * 8, raw[own], most);
  if (kBlocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The mean of the streams, into columns of a wider result.
__global__ void __launch_bounds__(kThreads)
    mean_kernel(const uint4* streams, int pieces, int64_t stride, uint4* out) {
  const int64_t token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  for (int at = threadIdx.x; at < pieces; at += kThreads) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      float values[8];
      widen(streams[(token * kStreams + i) * pieces + at], values);
#pragma unroll
      for (int e = 0; e < 8; ++e)
        sum[e] = i ? fmaf(values[e], 1.f / kStreams, sum[e]) : values[e] * (1.f / kStreams);
    }
    out[token * stride + at] = narrow(sum);
  }
}

// Values and gates of a token: an even position keeps them, an odd one is pooled with the even one before
// it, which was kept; then the norm. Thread i has channels i, i + 256, …
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const float* both, const int* positions, const int* blocks, float* kept, int64_t block_stride, int dim,
                const float* weight, float eps, __nv_bfloat16* out) {
  constexpr int kOwn = 4;
  __shared__ float sums[1][kWarps];
  const int64_t token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const int position = positions[token], block = blocks[token];
  const float* const own = both + token * 2 * dim;
  if (block < 0 || position < 0) return;
  float* const state = kept + block * block_stride;
  if (position % 2 == 0) {
    for (int at = threadIdx.x; at < 2 * dim; at += kThreads) state[at] = own[at];
    return;
  }
  const bool joins = token > 0 && blocks[token - 1] == block && positions[token - 1] == position - 1;
  const float* const even = joins ? own - 2 * dim : state;
  float values[kOwn], squares[1] = {0.f};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = threadIdx.x + i * kThreads;
    values[i] = 0.f;
    if (c >= dim) continue;
    const float first = sigmoid(even[dim + c] - own[dim + c]);
    values[i] = round_bf16(__fadd_rn(__fmul_rn(first, even[c]), __fmul_rn(1.f - first, own[c])));
    squares[0] = fmaf(values[i], values[i], squares[0]);
  }
  block_sums<1>(squares, sums);
  const float scale = inverse_root(squares[0], dim, eps);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c < dim) out[token * dim + c] = __float2bfloat16_rn(values[i] * scale * weight[c]);
  }
}

// What Engram adds to a stream: its value, as far as stream and key agree. `both`: keys of the streams | value.
__global__ void __launch_bounds__(kThreads)
    engram_kernel(uint4* streams, const uint4* both, const float* q, const float* k, int hidden, float eps) {
  __shared__ float sums[3][kWarps];
  const int64_t token = blockIdx.x / kStreams;
  const int stream = blockIdx.x % kStreams, pieces = hidden / 8;
  wait_for_previous();
  let_next_begin();
  uint4* const own = streams + (token * kStreams + stream) * pieces;
  const uint4* const key = both + (token * (kStreams + 1) + stream) * pieces;
  const uint4* const value = both + (token * (kStreams + 1) + kStreams) * pieces;
  float parts[3] = {0.f, 0.f, 0.f};
  for (int at = threadIdx.x; at < pieces; at += kThreads) {
    float x[8], y[8], first[8], second[8];
    widen(own[at], x);
    widen(key[at], y);
    read_floats(q + stream * hidden + at * 8, first);
    read_floats(k + stream * hidden + at * 8, second);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      parts[0] = fmaf(x[i] * y[i], first[i] * second[i], parts[0]);
      parts[1] = fmaf(x[i], x[i], parts[1]);
      parts[2] = fmaf(y[i], y[i], parts[2]);
    }
  }
  block_sums<3>(parts, sums);
  const float g = parts[0] * inverse_root(parts[1], hidden, eps) * inverse_root(parts[2], hidden, eps) *
                  __fdiv_rn(1.f, sqrtf(static_cast<float>(hidden)));
  const float gate = sigmoid(copysignf(sqrtf(fmaxf(fabsf(g), 1e-6f)), g));
  for (int at = threadIdx.x; at < pieces; at += kThreads) {
    float x[8], added[8];
    widen(own[at], x);
    widen(value[at], added);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(gate, added[i], x[i]);
    own[at] = narrow(x);
  }
}

// Of a block for a row of so many channels.
int threads_for(int64_t width) {
  const int64_t pieces = width / 8;
  return static_cast<int>(pieces < kRowThreads ? (pieces + 31) / 32 * 32 : kRowThreads);
}
int blocks_for(int64_t count) { return static_cast<int>((count + kThreads - 1) / kThreads); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

// All pointers are of the device. All return a cudaError_t.
extern "C" int embed(const void* ids, int64_t tokens, const void* table, int64_t hidden, void* streams, void* carried,
                     void* stream) {
  return launch_behind(embed_kernel, static_cast<int>(tokens), kThreads, 0, stream_of(stream),
                       static_cast<const int*>(ids), static_cast<const uint4*>(table), static_cast<int>(hidden / 8),
                       static_cast<uint4*>(streams), static_cast<float4*>(carried));
}
extern "C" int rms_norm(const void* x, int64_t stride, int64_t rows, const void* weight, int64_t width, float eps,
                        void* out, void* stream) {
  return launch_behind(rms_norm_kernel, static_cast<int>(rows), kThreads, 0, stream_of(stream),
                       static_cast<const __nv_bfloat16*>(x), stride, static_cast<const float*>(weight),
                       static_cast<int>(width), eps, static_cast<uint4*>(out));
}
extern "C" int index_query(const void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t dim,
                           int64_t rotated, void* out, void* stream) {
  const int64_t count = tokens * heads * dim / 8;
  return launch_behind(index_query_kernel, blocks_for(count), kThreads, 0, stream_of(stream),
                       static_cast<const uint4*>(x), static_cast<const float*>(cos), static_cast<const float*>(sin),
                       count, static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(rotated),
                       static_cast<uint4*>(out));
}
extern "C" int swiglu(const void* both, int64_t rows, int64_t inter, float limit, void* out, void* stream) {
  const int64_t count = rows * inter / 8;
  return launch_behind(swiglu_kernel, blocks_for(count), kThreads, 0, stream_of(stream),
                       static_cast<const uint4*>(both), count, static_cast<int>(inter / 8), limit,
                       static_cast<uint4*>(out));
}
extern "C" int swiglu_parts(const void* parts, const void* unit, int64_t slices, int64_t rows, int64_t inter,
                            float limit, void* out, void* inputs, void* input_unit, int64_t pass, int64_t swizzled,
                            void* stream) {
  if (inter > 8 * kRowPieces * kRowThreads) return cudaErrorInvalidValue;
  const Parts both{static_cast<const float*>(parts), static_cast<const float*>(unit), static_cast<int>(slices),
                   static_cast<int>(2 * inter), rows * 2 * inter};
  return launch_behind(swiglu_parts_kernel, static_cast<int>(rows), threads_for(inter), 0, stream_of(stream), both,
                       static_cast<int>(inter), limit, static_cast<uint4*>(out),
                       prepared_of(inputs, input_unit, pass, swizzled));
}
extern "C" int combine_shared(const void* slots, const void* ids, int64_t top_k, int64_t first_expert, int64_t experts,
                              const void* parts, const void* unit, int64_t slices, int64_t tokens, int64_t hidden,
                              void* out, void* stream) {
  const int64_t count = tokens * hidden / 8;
  const Parts shared{static_cast<const float*>(parts), static_cast<const float*>(unit), static_cast<int>(slices),
                     static_cast<int>(hidden), tokens * hidden};
  return launch_behind(combine_shared_kernel, blocks_for(count), kThreads, 0, stream_of(stream),
                       static_cast<const uint4*>(slots), static_cast<const int*>(ids), static_cast<int>(top_k),
                       static_cast<int>(first_expert), static_cast<int>(experts), shared, count,
                       static_cast<int>(hidden / 8), static_cast<uint4*>(out));
}
extern "C" int add_shared(const void* sums, const void* shared, int64_t elements, void* out, void* stream) {
  return launch_behind(add_shared_kernel, blocks_for(elements / 8), kThreads, 0, stream_of(stream),
                       static_cast<const float*>(sums), static_cast<const uint4*>(shared), elements / 8,
                       static_cast<uint4*>(out));
}
extern "C" int expand(void* streams, const void* output, const void* post, const void* comb, int64_t tokens,
                      int64_t hidden, void* stream) {
  return launch_behind(expand_kernel, static_cast<int>(tokens), kThreads, 0, stream_of(stream),
                       static_cast<uint4*>(streams), static_cast<const uint4*>(output),
                       static_cast<const float*>(post), static_cast<const float*>(comb), static_cast<int>(hidden / 8));
}
extern "C" int join(void* streams, const void* output, const void* post, const void* comb, const void* carried,
                    const void* norm, int64_t tokens, int64_t hidden, float eps, void* ahead, void* inputs,
                    void* input_unit, int64_t pass, int64_t swizzled, void* stream) {
  if (hidden > 8 * kRowPieces * kRowThreads) return cudaErrorInvalidValue;
  // Few tokens are spread over clusters, which changes no bit.
  const int threads = threads_for(hidden), count = static_cast<int>(tokens);
  const bool spread = tokens <= kSpreadTokens && threads % (32 * kSpread) == 0;
  return launch_behind(spread ? join_kernel<kSpread> : join_kernel<1>, spread ? count * kSpread : count,
                       spread ? threads / kSpread : threads, 0, stream_of(stream), static_cast<uint4*>(streams), static_cast<const uint4*>(output),
                       static_cast<const float*>(post), static_cast<const float*>(comb),
                       static_cast<const float*>(carried), static_cast<const float*>(norm),
                       static_cast<int>(hidden / 8), eps, static_cast<uint4*>(ahead),
                       prepared_of(inputs, input_unit, pass, swizzled));
}
extern "C" int round_rows(const void* x, int64_t tokens, int64_t width, void* inputs, void* input_unit, int64_t pass,
                          int64_t swizzled, void* stream) {
  if (width > 8 * kRowPieces * kRowThreads) return cudaErrorInvalidValue;
  const int threads = threads_for(width), count = static_cast<int>(tokens);
  const bool spread = tokens <= kSpreadTokens && threads % (32 * kSpread) == 0;
  return launch_behind(spread ? round_kernel<kSpread> : round_kernel<1>, spread ? count * kSpread : count,
                       spread ? threads / kSpread : threads, 0, stream_of(stream), static_cast<const uint4*>(x),
                       static_cast<int>(width / 8), prepared_of(inputs, input_unit, pass, swizzled));
}
extern "C" int mean(const void* streams, int64_t tokens, int64_t hidden, int64_t stride, void* out, void* stream) {
  return launch_behind(mean_kernel, static_cast<int>(tokens), kThreads, 0, stream_of(stream),
                       static_cast<const uint4*>(streams), static_cast<int>(hidden / 8), stride / 8,
                       static_cast<uint4*>(out));
}
extern "C" int pool(const void* both, int64_t tokens, const void* positions, const void* blocks, void* kept,
                    int64_t block_stride, int64_t dim, const void* weight, float eps, void* out, void* stream) {
  if (dim > 4 * kThreads) return cudaErrorInvalidValue;
  return launch_behind(pool_kernel, static_cast<int>(tokens), kThreads, 0, stream_of(stream),
                       static_cast<const float*>(both), static_cast<const int*>(positions),
                       static_cast<const int*>(blocks), static_cast<float*>(kept), block_stride, static_cast<int>(dim),
                       static_cast<const float*>(weight), eps, static_cast<__nv_bfloat16*>(out));
}
extern "C" int engram(void* streams, const void* both, const void* q, const void* k, int64_t tokens, int64_t hidden,
                      float eps, void* stream) {
  return launch_behind(engram_kernel, static_cast<int>(tokens * kStreams), kThreads, 0, stream_of(stream),
                       static_cast<uint4*>(streams), static_cast<const uint4*>(both), static_cast<const float*>(q),
                       static_cast<const float*>(k), static_cast<int>(hidden), eps);
}
