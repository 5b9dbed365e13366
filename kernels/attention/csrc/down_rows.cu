// What the first linear of attention made, on sm_90: its slices of K added, the query's part normed, the
// row of keys and values stored. See kernels/attention/down_rows_cuda.py.

#include "../../step/csrc/prepared.cuh"
#include "packed_store.cuh"

using namespace packed_store;

namespace {

constexpr int kThreads = 1024, kOwn = 2;  // pieces of four columns of a thread
constexpr int kRow = 512, kMaxRank = kOwn * kThreads * 4 - kRow;

struct Arguments {
  const float* parts;        // [slices, tokens, rank + 512]
  const float* unit;         // [tokens], or null: 1
  const float *q_norm, *kv_norm;  // [rank], [512]
  const float *cos, *sin;    // [tokens, 32]
  const int* slots;          // [tokens], negative: skip
  uint8_t* pool;
  __nv_bfloat16* low;        // [tokens, rank]
  prepared::Prepared room;   // gets it for the next linear
  int slices, tokens, rank;
  float eps;
};

// A block a token; the first warp packs the row that is stored.
__global__ void __launch_bounds__(kThreads) down_kernel(const Arguments args) {
  constexpr int kAhead = 4;  // slices that are loaded at once
  __shared__ float row[kRow], sums[32], most_by_warp[32];
  __shared__ __align__(16) __nv_bfloat16 query[kMaxRank];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x;
  const int width = args.rank + kRow;
  const int64_t count = static_cast<int64_t>(args.tokens) * width;
  wait_for_previous();
  let_next_begin();
  const int slot = args.slots[token];
  const float unit = (args.unit ? args.unit[token] : 1.f) * 256.0f;
  float values[kOwn][4], squares = 0.f;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int column = (threadIdx.x + own * blockDim.x) * 4;
    if (column >= width) break;
    const float* const from = args.parts + token * width + column;
    float(&sum)[4] = values[own];
    for (int first = 0; first < args.slices; first += kAhead) {
      float4 part[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i < args.slices) part[i] = *reinterpret_cast<const float4*>(from + (first + i) * count);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= args.slices) break;
        const float4 p = part[i];
        if (first + i) {
          sum[0] += p.x, sum[1] += p.y, sum[2] += p.z, sum[3] += p.w;
        } else {
          sum[0] = p.x, sum[1] = p.y, sum[2] = p.z, sum[3] = p.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = round_bf16(sum[i] * unit);
    if (column >= args.rank) {
      *reinterpret_cast<float4*>(row + column - args.rank) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) squares = fmaf(sum[i], sum[i], squares);
    }
  }
  squares = warp_sum(squares);
  if (lane == 0) sums[warp] = squares;
  __syncthreads();
  float total = sums[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) total += sums[w];
  const float scale = __fdiv_rn(1.f, sqrtf(__fdiv_rn(total, static_cast<float>(args.rank)) + args.eps));
  float most = 0.f;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int column = (threadIdx.x + own * blockDim.x) * 4;
    if (column >= args.rank) break;
    const float4 gain = *reinterpret_cast<const float4*>(args.q_norm + column);
    const float(&v)[4] = values[own];
    const __nv_bfloat162 low = __floats2bfloat162_rn(v[0] * scale * gain.x, v[1] * scale * gain.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v[2] * scale * gain.z, v[3] * scale * gain.w);
    const uint2 packed = make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
    *reinterpret_cast<uint2*>(args.low + token * args.rank + column) = packed;
    *reinterpret_cast<uint2*>(query + column) = packed;
    most = fmaxf(most, fmaxf(fmaxf(fabsf(__low2float(low)), fabsf(__high2float(low))),
                             fmaxf(fabsf(__low2float(high)), fabsf(__high2float(high)))));
  }
  if (args.room.inputs) {
    most = prepared::block_largest(most, most_by_warp);
    for (int first = warp * 256; first < args.rank; first += static_cast<int>(blockDim.x) * 8) {
      const int column = first + lane * 8;
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (column < args.rank) raw = *reinterpret_cast<const uint4*>(query + column);
      args.room.store(static_cast<int>(token), column, args.rank, raw, most);
    }
  }
  if (warp || slot < 0) return;
  float v[kRow / 32];
#pragma unroll
  for (int i = 0; i < kRow / 32; i += 4)
    *reinterpret_cast<float4*>(v + i) = *reinterpret_cast<const float4*>(row + lane * (kRow / 32) + i);
  const int64_t angles = token * (kRotated / 2);
  store_row<kWindow>(v, lane, args.kv_norm, args.eps, args.cos + angles, args.sin + angles, slot, 1, args.pool);
}

}  // namespace

// All pointers are of the device; rank is a multiple of 8, at most 7,680. Returns a cudaError_t.
extern "C" int down_rows(const void* parts, const void* unit, int64_t slices, int64_t tokens, int64_t rank,
                         const void* q_norm, const void* kv_norm, float eps, const void* cos, const void* sin,
                         const void* slots, void* pool, void* low, void* inputs, void* input_unit, int64_t pass, int64_t swizzled,
                         void* stream_pointer) {
  const Arguments arguments{static_cast<const float*>(parts),
                            static_cast<const float*>(unit),
                            static_cast<const float*>(q_norm),
                            static_cast<const float*>(kv_norm),
                            static_cast<const float*>(cos),
                            static_cast<const float*>(sin),
                            static_cast<const int*>(slots),
                            static_cast<uint8_t*>(pool),
                            static_cast<__nv_bfloat16*>(low),
                            prepared::prepared_of(inputs, input_unit, pass, swizzled),
                            static_cast<int>(slices),
                            static_cast<int>(tokens),
                            static_cast<int>(rank),
                            eps};
  const int64_t pieces = (rank + kRow) / 4;
  if (pieces > kOwn * kThreads) return cudaErrorInvalidValue;
  const int threads = pieces < kThreads ? static_cast<int>((pieces + 31) / 32 * 32) : kThreads;
  return launch_behind(down_kernel, static_cast<int>(tokens), threads, 0, static_cast<cudaStream_t>(stream_pointer),
                       arguments);
}
