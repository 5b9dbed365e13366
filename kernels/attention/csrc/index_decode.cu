// Scores of the indexer over MXFP4 keys on sm_90. See kernels/attention/index_scores_cuda.py.
//
// Keys are M (sixteen a product), the 32 heads are N: each warp keeps the queries of its token in
// shared memory as fragments while keys stream by. All units of 32 keys of all tokens are dealt to the
// warps in contiguous runs, so that a device full of short rows and one long row are equally
// balanced. The sum over heads follows the tree of the CPU kernel: where products are exact, so are
// the bits.

#include "bf16.cuh"
#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kWarps = 16;
constexpr int kHeads = 32, kTiles = kHeads / 8;
constexpr int kMaxTokens = 16384;
constexpr int kDim = 128, kKeyBytes = kDim / 2 + kDim / 32;
constexpr int kUnitKeys = 32, kUnitTiles = kUnitKeys / 16;
constexpr int kFragments = kTiles * 4 * 32;  // of 16 bytes: [two steps of K][tile][lane]

struct Arguments {
  const __nv_bfloat16* queries;  // [tokens, 32, 128], values of MXFP4
  const __nv_bfloat16* weights;  // [tokens, 32]
  const uint8_t* pool;           // [blocks, entries · 68]
  const int* table;              // [rows, max_blocks]
  const int* rows;               // [tokens]
  const int* visible;            // [tokens]
  float* scores;                 // [tokens, stride]
  int tokens, max_blocks, entries, skip;
  int64_t stride;
};

struct Raw {
  uint4 codes[kUnitTiles][2];
  uint32_t scales[kUnitTiles][2];
};

// relu(products) of two heads rounded to bfloat16, times their weights, rounded again.
__device__ __forceinline__ uint32_t weigh(float first, float second, uint32_t weights) {
  uint32_t both;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return bf16::multiply(both, weights);
}

__global__ void __launch_bounds__(kWarps * 32, 1) index_kernel(const Arguments args) {
  extern __shared__ __align__(128) uint4 fragments[];  // of each warp, then:
  int* const first_unit = reinterpret_cast<int*>(fragments + kWarps * kFragments);  // [tokens + 1]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  wait_for_previous();
  let_next_begin();

  if (warp == 0) {
    int before = 0;
    for (int start = 0; start < args.tokens; start += 32) {
      const int token = start + lane;
      const int seen = token < args.tokens ? args.visible[token] : 0;
      int sum = seen > args.skip ? (seen + kUnitKeys - 1) / kUnitKeys : 0;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (token < args.tokens) first_unit[token + 1] = before + sum;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) first_unit[0] = 0;
  }
  __syncthreads();

  const int units = first_unit[args.tokens];
  const int workers = gridDim.x * kWarps, me = warp * gridDim.x + blockIdx.x;
  const int begin = static_cast<int>(static_cast<int64_t>(units) * me / workers);
  const int end = static_cast<int>(static_cast<int64_t>(units) * (me + 1) / workers);
  if (begin == end) return;

  int token = 0;
  for (int low = 0, high = args.tokens; high - low > 1;) {  // the last token that begins at or before
    const int middle = (low + high) / 2;
    (first_unit[middle] <= begin ? low : high) = middle;
    token = low;
  }
  auto read = [&](int unit, int of_token, Raw& to) {
    const int key = (unit - first_unit[of_token]) * kUnitKeys;
    const int* const blocks = args.table + static_cast<int64_t>(args.rows[of_token]) * args.max_blocks;
    const int last = (args.visible[of_token] - 1) / args.entries;
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      const int at = key + tile * 16;
      const int block = max(0, blocks[min(at / args.entries, last)]);
      const uint8_t* const from =
          args.pool + static_cast<int64_t>(block) * (args.entries * kKeyBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int entry = at % args.entries + g + 8 * half;
        to.codes[tile][half] = __ldg(reinterpret_cast<const uint4*>(from + entry * (kDim / 2) + 16 * q));
        to.scales[tile][half] = __ldg(from + args.entries * (kDim / 2) + entry * (kDim / 32) + q);
      }
    }
  };

  Raw next;
  int next_token = token;
  while (first_unit[next_token + 1] <= begin) ++next_token;
  read(begin, next_token, next);
  int loaded = -1;
  uint4* const query = fragments + warp * kFragments + lane;
  uint32_t weights[kTiles];  // of heads 8n + 2q and the next, times 2^8
  for (int unit = begin; unit < end; ++unit) {
    const Raw raw = next;
    token = next_token;
    if (unit + 1 < end) {
      while (first_unit[next_token + 1] <= unit + 1) ++next_token;
      read(unit + 1, next_token, next);
    }
    if (token != loaded) {
      loaded = token;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4* const from = reinterpret_cast<const uint4*>(
            args.queries + ((static_cast<int64_t>(token) * kHeads + n * 8 + g) * kDim + 32 * q));
        uint4 some[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) some[i] = __ldg(from + i);
#pragma unroll
        for (int i = 0; i < 4; ++i) query[(i * kTiles + n) * 32] = some[i];
        constexpr uint32_t kPutBack = 0x43804380u;  // 256, twice
        weights[n] = bf16::multiply(
            __ldg(reinterpret_cast<const uint32_t*>(args.weights + static_cast<int64_t>(token) * kHeads) + n * 4 + q),
            kPutBack);
      }
    }
    const int key = (unit - first_unit[token]) * kUnitKeys;
    const int seen = args.visible[token];
    float* const to = args.scores + token * args.stride + key;
    float products[kUnitTiles][kTiles][4] = {};
    uint32_t factor[kUnitTiles][2];
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[tile][half] = bf16::factor_fp4_ue8m0(raw.scales[tile][half] * 0x00010001u);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t pairs[kUnitTiles][2][4];
#pragma unroll
      for (int tile = 0; tile < kUnitTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& codes = raw.codes[tile][half];
          bf16::unpack_fp4(word == 0 ? codes.x : word == 1 ? codes.y : word == 2 ? codes.z : codes.w,
                           pairs[tile][half]);
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[tile][half][i] = bf16::multiply(pairs[tile][half][i], factor[tile][half]);
        }
      uint4 b[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) b[n] = query[(word * kTiles + n) * 32];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile)
          bf16::mma(products[tile][n], pairs[tile][0][0], pairs[tile][1][0], pairs[tile][0][1], pairs[tile][1][1],
                    b[n].x, b[n].y);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile)
          bf16::mma(products[tile][n], pairs[tile][0][2], pairs[tile][1][2], pairs[tile][0][3], pairs[tile][1][3],
                    b[n].z, b[n].w);
    }
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) {
      const float(&product)[kTiles][4] = products[tile];
      float sum[2][2][2];  // row g or g + 8, sixteen heads, even or odd head
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t a = weigh(product[2 * half][2 * row], product[2 * half][2 * row + 1], weights[2 * half]);
          const uint32_t b =
              weigh(product[2 * half + 1][2 * row], product[2 * half + 1][2 * row + 1], weights[2 * half + 1]);
          sum[row][half][0] = bf16::low(a) + bf16::low(b);
          sum[row][half][1] = bf16::high(a) + bf16::high(b);
        }
      // Lanes 0, 1 of four keep row g, lanes 2, 3 row g + 8; then even lanes the first sixteen heads.
      const bool second_row = q & 2, second_half = q & 1;
      float kept[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float sent = second_row ? sum[0][half][odd] : sum[1][half][odd];
          kept[half][odd] =
              (second_row ? sum[1][half][odd] : sum[0][half][odd]) + __shfl_xor_sync(~0u, sent, 2);
        }
      float part[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float sent = second_half ? kept[0][odd] : kept[1][odd];
        part[odd] = (second_half ? kept[1][odd] : kept[0][odd]) + __shfl_xor_sync(~0u, sent, 1);
      }
      const float mine = part[0] + part[1];
      const float total = mine + __shfl_xor_sync(~0u, mine, 1);
      const int at = tile * 16 + g + (second_row ? 8 : 0);
      if (!second_half && key + at < seen) to[at] = total;
    }
  }
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int index_decode(const void* queries, const void* weights, int64_t tokens, const void* pool,
                            const void* table, int64_t max_blocks, int64_t entries, const void* rows,
                            const void* visible, int64_t skip, int64_t stride, void* scores,
                            void* stream_pointer) {
  const Arguments arguments{static_cast<const __nv_bfloat16*>(queries),
                            static_cast<const __nv_bfloat16*>(weights),
                            static_cast<const uint8_t*>(pool),
                            static_cast<const int*>(table),
                            static_cast<const int*>(rows),
                            static_cast<const int*>(visible),
                            static_cast<float*>(scores),
                            static_cast<int>(tokens),
                            static_cast<int>(max_blocks),
                            static_cast<int>(entries),
                            static_cast<int>(skip),
                            stride};
  constexpr int kQueryBytes = kWarps * kFragments * 16;
  constexpr int kMaxBytes = kQueryBytes + 4 * (kMaxTokens + 1);
  if (tokens > kMaxTokens) return cudaErrorInvalidValue;
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error =
        cudaFuncSetAttribute(index_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  return launch_behind(index_kernel, device_multiprocessors(), kWarps * 32,
                       kQueryBytes + static_cast<int>(4 * (tokens + 1)), static_cast<cudaStream_t>(stream_pointer),
                       arguments);
}
