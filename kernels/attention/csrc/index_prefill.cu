// Scores of the indexer for many tokens over MXFP4 keys on sm_90. See kernels/attention/index_prefill_cuda.py.
//
// A block takes eight neighbouring tokens, whose 32 heads each are N. One warpgroup unpacks 64 keys at a time into
// shared memory, as bfloat16 times 2^-8; two multiply, in turn, and sum over heads while the other's products run.
// Heads are added by lanes first, then over lanes, in an order that the others do not share.

#include "bf16.cuh"
#include "tiles.cuh"

using namespace hopper;
using namespace tiles;

namespace {

constexpr int kTokens = 8, kHeads = 32, kColumns = kTokens * kHeads;
constexpr int kDim = 128, kKeyBytes = kDim / 2 + kDim / 32;
constexpr int kKeys = 64;  // of a tile
constexpr int kThreads = 3 * 128, kStages = 4;
constexpr int kQueryPartBytes = kColumns * kRowBytes, kKeyPartBytes = kKeys * kRowBytes;  // of 64 channels
constexpr uint32_t kPutBack = 0x43804380u;                                                // 256, twice

struct Arguments {
  const __nv_bfloat16* weights;  // [tokens, 32]
  const uint8_t* pool;           // [blocks, entries · 68]
  const int* table;              // [rows, max_blocks]
  const int* rows;               // [tokens]
  const int* visible;            // [tokens]
  float* scores;                 // [tokens, stride]
  int tokens, max_blocks, entries, skip;
  int64_t stride;
};

struct Shared {
  uint8_t queries[2 * kQueryPartBytes];
  uint8_t keys[kStages][2 * kKeyPartBytes];
  uint64_t queries_full, keys_full[kStages], keys_empty[kStages];
};

// Tokens of a block that belong to one row: they see the same keys, the last one most of them.
struct Run {
  int first, last, row, tiles;  // tokens from first to before last, of the block
};

struct Block {
  int rows, visible, count;  // of a lane's token, and how many tokens there are

  __device__ __forceinline__ Block(const Arguments& args, int first_token) {
    const int lane = threadIdx.x % 32;
    count = min(kTokens, args.tokens - first_token);
    rows = lane < count ? args.rows[first_token + lane] : -1;
    visible = lane < count ? args.visible[first_token + lane] : 0;
  }
  // The run that begins with a token.
  __device__ __forceinline__ Run run(const Arguments& args, int first) const {
    Run found;
    found.first = first;
    found.row = __shfl_sync(~0u, rows, first);
    const unsigned same = __ballot_sync(~0u, rows == found.row) >> first;
    found.last = first + __ffs(~same) - 1;
    const int seen = __shfl_sync(~0u, visible, found.last - 1);
    found.tiles = seen > args.skip ? (seen + kKeys - 1) / kKeys : 0;
    return found;
  }
};

// Sixteen keys of a warp, in two turns of eight; four lanes have 32 channels each.
struct Raw {
  uint4 codes[2];
  uint32_t scales[2];
};

__device__ __forceinline__ void read_keys(const Arguments& args, const Run& run, int tile, int last_block, Raw& to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = tile * kKeys + warp * 16;  // sixteen keys lie in one block
  const int* const blocks = args.table + static_cast<int64_t>(run.row) * args.max_blocks;
  const int block = max(0, __ldg(blocks + min(first / args.entries, last_block)));
  const uint8_t* const from = args.pool + static_cast<int64_t>(block) * args.entries * kKeyBytes;
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int entry = first % args.entries + turn * 8 + lane / 4;
    to.codes[turn] = __ldg(reinterpret_cast<const uint4*>(from + entry * (kDim / 2)) + lane % 4);
    to.scales[turn] = __ldg(from + args.entries * (kDim / 2) + entry * (kDim / 32) + lane % 4);
  }
}

__device__ __forceinline__ void put_keys(uint8_t* keys, const Raw& raw) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4;
  // Eight lanes write one of their four pieces each: in such orders that all banks are hit once.
  const int order = q / 2 ^ (lane / 4 & 1) * 2;
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int row = warp * 16 + turn * 8 + lane / 4;
    const uint32_t factor = bf16::factor_fp4_ue8m0(raw.scales[turn] * 0x00010001u);
    const uint4& codes = raw.codes[turn];
    const uint32_t a = order & 1 ? codes.y : codes.x, b = order & 1 ? codes.x : codes.y;
    const uint32_t c = order & 1 ? codes.w : codes.z, d = order & 1 ? codes.z : codes.w;
    const uint32_t words[4] = {order & 2 ? c : a, order & 2 ? d : b, order & 2 ? a : c, order & 2 ? b : d};
    uint8_t* const to = keys + q / 2 * kKeyPartBytes + row * kRowBytes;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[4];
      bf16::unpack_fp4(words[w], pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = bf16::multiply(pairs[i], factor);
      const int piece = q % 2 * 4 + (w ^ order);
      *reinterpret_cast<uint4*>(to + (piece ^ (row & 7)) * 16) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

__device__ __forceinline__ void unpack_keys(const Arguments& args, const Block& block, Shared& shared) {
  const int lane = threadIdx.x % 32;
  uint32_t count = 0;
  for (int first = 0; first < block.count;) {
    const Run run = block.run(args, first);
    first = run.last;
    if (!run.tiles) continue;
    const int last_block = (__shfl_sync(~0u, block.visible, run.last - 1) - 1) / args.entries;
    Raw next;
    read_keys(args, run, 0, last_block, next);
#pragma unroll 1
    for (int tile = 0; tile < run.tiles; ++tile, ++count) {
      const Raw raw = next;
      if (tile + 1 < run.tiles) read_keys(args, run, tile + 1, last_block, next);
      const int stage = count % kStages;
      wait_barrier(shared_address(&shared.keys_empty[stage]), (count / kStages & 1) ^ 1);
      put_keys(shared.keys[stage], raw);
      written_for_copies();
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.keys_full[stage]));
    }
  }
}

// relu(products) of two heads rounded to bfloat16, times their weights, rounded again.
__device__ __forceinline__ uint32_t weigh(float first, float second, uint32_t weights) {
  uint32_t both;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return bf16::multiply(both, weights);
}

// A lane's share of the sum over heads of one token and key: d its columns of one row.
__device__ __forceinline__ float sum_own(const float* d, const uint32_t (&weights)[4]) {
  float parts[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t both = weigh(d[n * 4], d[n * 4 + 1], weights[n]);
    parts[n] = bf16::low(both) + bf16::high(both);
  }
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Every second tile of the block's keys.
__device__ __forceinline__ void score_keys(const Arguments& args, const Block& block, Shared& shared, int group,
                                           int first_token) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, q = lane % 4;
  uint32_t weights[kTokens][4];
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t* const own = reinterpret_cast<const uint32_t*>(
          args.weights + static_cast<int64_t>(min(first_token + t, args.tokens - 1)) * kHeads);
      weights[t][n] = bf16::multiply(__ldg(own + n * 4 + q), kPutBack);
    }
  const uint32_t queries = shared_address(shared.queries);
  wait_barrier(shared_address(&shared.queries_full), 0);
  float d[kColumns / 2];
  uint32_t count = 0;
  for (int first = 0; first < block.count;) {
    const Run run = block.run(args, first);
    first = run.last;
#pragma unroll 1
    for (int tile = 0; tile < run.tiles; ++tile, ++count) {
      if ((count & 1) != static_cast<uint32_t>(group)) continue;
      const int stage = count % kStages;
      wait_barrier(shared_address(&shared.keys_full[stage]), count / kStages & 1);
      const uint32_t keys = shared_address(shared.keys[stage]);
      begin_products();
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint64_t a = describe(keys + part * kKeyPartBytes), b = describe(queries + part * kQueryPartBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(d, a + 2 * k, b + 2 * k, part + k);
      }
      end_products();
      wait_products<0>();
      if (lane == 0) arrive(shared_address(&shared.keys_empty[stage]));
      // Lanes 0, 1 of four keep row g, lanes 2, 3 row g + 8; even ones the first four tokens.
      const bool second_row = q & 2, second_half = q & 1;
      const int key = tile * kKeys + warp * 16 + lane / 4 + (second_row ? 8 : 0), own = second_half ? kTokens / 2 : 0;
      float kept[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float first_sum = sum_own(d + t * 16, weights[t]), second_sum = sum_own(d + t * 16 + 2, weights[t]);
        kept[t] = (second_row ? second_sum : first_sum) +
                  __shfl_xor_sync(~0u, second_row ? first_sum : second_sum, 2);
      }
      float* const to = args.scores + static_cast<int64_t>(first_token + own) * args.stride + key;
#pragma unroll
      for (int t = 0; t < kTokens / 2; ++t) {
        const float total = (second_half ? kept[t + 4] : kept[t]) +
                            __shfl_xor_sync(~0u, second_half ? kept[t] : kept[t + 4], 1);
        const int seen = __shfl_sync(~0u, block.visible, own + t);
        if (run.first <= own + t && own + t < run.last && key < seen) to[t * args.stride] = total;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    index_kernel(const __grid_constant__ CUtensorMap queries, const Arguments args) {
  extern __shared__ uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes + (-shared_address(bytes) & 1023u));
  const int first_token = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTokens;  // those that see most come first
  if (threadIdx.x == 0) {
    init_barrier(shared_address(&shared.queries_full), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(&shared.keys_full[stage]), 4);
      init_barrier(shared_address(&shared.keys_empty[stage]), 4);
    }
    init_done();
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  const Block block(args, first_token);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (threadIdx.x == 0) {
      const uint32_t full = shared_address(&shared.queries_full);
      expect_bytes(full, 2 * kQueryPartBytes);
      for (int part = 0; part < 2; ++part)
        load_box(shared_address(shared.queries) + part * kQueryPartBytes, queries, part * 64, first_token * kHeads, full);
    }
    __syncwarp();
    unpack_keys(args, block, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    score_keys(args, block, shared, static_cast<int>(threadIdx.x / 128 - 1), first_token);
  }
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int index_prefill(const void* queries, const void* weights, int64_t tokens, const void* pool,
                             const void* table, int64_t max_blocks, int64_t entries, const void* rows,
                             const void* visible, int64_t skip, int64_t stride, void* scores,
                             void* stream_pointer) {
  static bool allowed = false;
  constexpr int kSharedBytes = sizeof(Shared) + 1024;
  cudaError_t error = cudaSuccess;
  if (!allowed) {
    error = cudaFuncSetAttribute(index_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  CUtensorMap map;
  if ((error = encode(map, queries, tokens * kHeads, kDim, kDim, kColumns)) != cudaSuccess) return error;
  const Arguments args{static_cast<const __nv_bfloat16*>(weights),
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
  return launch_behind(index_kernel, static_cast<unsigned>((tokens + kTokens - 1) / kTokens), kThreads, kSharedBytes,
                       static_cast<cudaStream_t>(stream_pointer), map, args);
}
