// Multi-query attention of many tokens over packed rows on sm_90. See kernels/attention/sparse_prefill_cuda.py.
//
// A block takes one token after the other, all its 64 heads. One warpgroup unpacks 64 rows at a time into shared
// memory, as bfloat16 times 2^-8; two multiply. The scores of a tile of rows are made by one of the two, in turn,
// while both add the values of the tile before, each to half of the channels; the softmax runs beside those
// products. Weights are relative to a maximum that is raised only when it is exceeded by kSlack powers of two. A
// token's tiles come in one order, so its bits depend on that token alone. Rows that are missing are zeros and
// weigh nothing.

#include "bf16.cuh"
#include "tiles.cuh"

using namespace hopper;
using namespace tiles;

namespace {

constexpr int kHeads = 64, kChannels = 512, kRows = 64;  // rows of a tile
constexpr int kThreads = 3 * 128;
constexpr int kPartBytes = 64 * kRowBytes;  // 64 rows of 64 channels
constexpr int kParts = kChannels / 64;
constexpr int kTileBytes = kParts * kPartBytes;
constexpr int kWindowTiles = 2;
constexpr int kWindowBytes = kChannels + kChannels / 32;
constexpr int kCompressedBytes = kChannels / 2 + kChannels / 16;
constexpr int kRotated = 64;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8.f;

struct Arguments {
  const uint8_t* window;        // [*, 528]
  const int* window_slots;      // [tokens, window_width], negative: none
  const uint8_t* compressed;    // [*, 288]
  const int* compressed_slots;  // [tokens, compressed_width]
  const float* sinks;           // [64]
  const float *cos, *sin;       // [tokens, 32], or null: do not rotate back
  __nv_bfloat16* out;           // [tokens, 64, 512]
  int tokens, window_width, compressed_width, tiles;
  float scale;  // of scores as powers of two
};

struct Shared {
  uint8_t queries[kTileBytes];  // eight parts of [64 heads][64 channels]
  uint8_t rows[2][kTileBytes];
  uint8_t weights[2][kPartBytes];  // [64 heads][64 rows]
  float most[2][kHeads], sum[2][kHeads], factor[2][kHeads];
  uint16_t here[2][4];  // bits: rows that are not missing
  uint64_t queries_full, queries_empty, rows_full[2], rows_empty[2], weights_full[2];
};

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a warp's sixteen rows of a tile: four window rows or eight compressed ones, sixteen channels a lane.
struct Piece {
  uint4 codes[4];
  uint32_t scales[8];
};

__device__ __forceinline__ int slot_at(const Arguments& args, int token, int tile, int warp, int lane) {
  if (lane >= 16 || token >= args.tokens) return -1;
  const bool is_window = tile < kWindowTiles;
  const int at = (is_window ? tile : tile - kWindowTiles) * kRows + warp * 16 + lane;
  const int width = is_window ? args.window_width : args.compressed_width;
  if (at >= width) return -1;
  return __ldg((is_window ? args.window_slots : args.compressed_slots) + static_cast<int64_t>(token) * width + at);
}

__device__ __forceinline__ void read_window(const Arguments& args, int slot, int piece, int lane, Piece& to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int own = __shfl_sync(~0u, slot, piece * 4 + i);
    to.codes[i] = make_uint4(0u, 0u, 0u, 0u), to.scales[i] = 0u;
    if (own < 0) continue;
    const uint8_t* const row = args.window + static_cast<int64_t>(own) * kWindowBytes;
    const int group = lane / 2;
    to.codes[i] = __ldg(reinterpret_cast<const uint4*>(row) + lane);
    to.scales[i] = __ldg(row + kChannels + group % 4 * 4 + group / 4);
  }
}
__device__ __forceinline__ void read_compressed(const Arguments& args, int slot, int piece, int lane, Piece& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int own = __shfl_sync(~0u, slot, piece * 8 + i);
    uint2 codes = make_uint2(0u, 0u);
    to.scales[i] = 0u;
    if (own >= 0) {
      const uint8_t* const row = args.compressed + static_cast<int64_t>(own) * kCompressedBytes;
      codes = __ldg(reinterpret_cast<const uint2*>(row) + lane);
      to.scales[i] = __ldg(row + kChannels / 2 + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2);
    }
    if (i % 2) to.codes[i / 2].z = codes.x, to.codes[i / 2].w = codes.y;
    else to.codes[i / 2].x = codes.x, to.codes[i / 2].y = codes.y;
  }
}

// Sixteen channels of a row, in an order in which eight lanes hit all banks once.
__device__ __forceinline__ void put_row(uint8_t* tile, int row, int lane, const uint4& low, const uint4& high) {
  uint8_t* const to = tile + lane / 4 * kPartBytes + row * kRowBytes;
  const int first = lane / 4 & 1, piece = lane % 4 * 2;
  *reinterpret_cast<uint4*>(to + ((piece + first) ^ (row & 7)) * 16) = first ? high : low;
  *reinterpret_cast<uint4*>(to + ((piece + 1 - first) ^ (row & 7)) * 16) = first ? low : high;
}
__device__ __forceinline__ void put_window(uint8_t* tile, int row, int lane, const Piece& piece) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t factor = bf16::factor_fp8_ue8m0(piece.scales[i] * 0x00010001u);
    const uint32_t words[4] = {piece.codes[i].x, piece.codes[i].y, piece.codes[i].z, piece.codes[i].w};
    uint32_t pairs[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      bf16::unpack_fp8(words[w], pairs[2 * w], pairs[2 * w + 1]);
      pairs[2 * w] = bf16::multiply(pairs[2 * w], factor);
      pairs[2 * w + 1] = bf16::multiply(pairs[2 * w + 1], factor);
    }
    put_row(tile, row + i, lane, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]),
            make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
  }
}
__device__ __forceinline__ void put_compressed(uint8_t* tile, int row, int lane, const Piece& piece) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t factor = bf16::factor_fp4_e4m3(piece.scales[i] * 0x00010001u);
    const uint4& both = piece.codes[i / 2];
    uint32_t low[4], high[4];
    bf16::unpack_fp4(i % 2 ? both.z : both.x, low);
    bf16::unpack_fp4(i % 2 ? both.w : both.y, high);
#pragma unroll
    for (int w = 0; w < 4; ++w) low[w] = bf16::multiply(low[w], factor), high[w] = bf16::multiply(high[w], factor);
    put_row(tile, row + i, lane, make_uint4(low[0], low[1], low[2], low[3]),
            make_uint4(high[0], high[1], high[2], high[3]));
  }
}

// Four warps: every tile of every token of the block. What comes first of the next tile is read ahead.
__device__ __forceinline__ void unpack_tiles(const CUtensorMap& queries, const Arguments& args, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Piece a, b;
  int slot = slot_at(args, blockIdx.x, 0, warp, lane);
  read_window(args, slot, 0, lane, a);
  read_window(args, slot, 1, lane, b);
  uint32_t count = 0, turn = 0;
  for (int token = blockIdx.x; token < args.tokens; token += gridDim.x, ++turn) {
    if (threadIdx.x == 0) {
      wait_barrier(shared_address(&shared.queries_empty), (turn & 1) ^ 1);
      const uint32_t full = shared_address(&shared.queries_full);
      expect_bytes(full, kTileBytes);
      for (int part = 0; part < kParts; ++part)
        load_box(shared_address(shared.queries) + part * kPartBytes, queries, part * 64, token * kHeads, full);
    }
    __syncwarp();
#pragma unroll 1
    for (int tile = 0; tile < args.tiles; ++tile, ++count) {
      const int buffer = count & 1, row = warp * 16;
      const bool is_last = tile + 1 == args.tiles, is_window = tile < kWindowTiles;
      const int next_token = is_last ? token + gridDim.x : token, next_tile = is_last ? 0 : tile + 1;
      const int next = slot_at(args, next_token, next_tile, warp, lane);
      uint8_t* const to = shared.rows[buffer];
      wait_barrier(shared_address(&shared.rows_empty[buffer]), (count >> 1 & 1) ^ 1);
      const unsigned here = __ballot_sync(~0u, slot >= 0);
      if (lane == 0) shared.here[buffer][warp] = static_cast<uint16_t>(here);
      if (is_window) {
        put_window(to, row, lane, a);
        read_window(args, slot, 2, lane, a);
        put_window(to, row + 4, lane, b);
        read_window(args, slot, 3, lane, b);
        put_window(to, row + 8, lane, a);
        put_window(to, row + 12, lane, b);
      } else {
        put_compressed(to, row, lane, a);
        put_compressed(to, row + 8, lane, b);
      }
      written_for_copies();
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.rows_full[buffer]));
      slot = next;
      if (next_tile < kWindowTiles) {
        read_window(args, slot, 0, lane, a);
        read_window(args, slot, 1, lane, b);
      } else {
        read_compressed(args, slot, 0, lane, a);
        read_compressed(args, slot, 1, lane, b);
      }
    }
  }
}

// What one of the two multiplying warpgroups does.
struct Multiplier {
  const Arguments& args;
  Shared& shared;
  int group, warp, lane;  // warp of the group
  float sums[128];        // of its 256 channels
  float scores[32];       // of a tile
  float sinks[2];         // of heads row() and row() + 8

  __device__ __forceinline__ int row() const { return warp * 16 + lane / 4; }

  __device__ __forceinline__ void issue_scores(int buffer) {
    const uint32_t queries = shared_address(shared.queries), rows = shared_address(shared.rows[buffer]);
    begin_products();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t a = describe(queries + part * kPartBytes), b = describe(rows + part * kPartBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply(scores, a + 2 * k, b + 2 * k, part + k);
    }
    end_products();
  }

  __device__ __forceinline__ void issue_values(int tile, int buffer) {
    const uint64_t a = describe(shared_address(shared.weights[buffer]));
    const uint64_t b =
        describe_transposed(shared_address(shared.rows[buffer]) + group * (kTileBytes / 2), kPartBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_transposed(sums, a + 2 * k, b + 128 * k, tile + k);
    end_products();
  }

  // Weights of the tile whose scores are there, for both groups.
  __device__ __forceinline__ void weigh(int tile, int buffer) {
    uint64_t here = *reinterpret_cast<const uint64_t*>(shared.here[buffer]);
    if (here != ~uint64_t{0}) {
      here >>= lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(here >> (n * 8 + i) & 1)) scores[n * 4 + i] = scores[n * 4 + 2 + i] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = row() + 8 * half;
      float most = -INFINITY, before, total;
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, fmaxf(scores[n * 4 + 2 * half], scores[n * 4 + 2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * args.scale;
      if (tile == 0) {
        before = sinks[half], total = 1.f;
      } else {
        before = shared.most[buffer ^ 1][head], total = shared.sum[buffer ^ 1][head];
      }
      const float now = most > before + kSlack ? most : before, factor = power_of_two(before - now);
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + 2 * half + i];
          score = power_of_two(fmaf(score, args.scale, -now));
          sum += score;
        }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) {
        shared.most[buffer][head] = now;
        shared.sum[buffer][head] = fmaf(total, factor, sum);
        shared.factor[buffer][head] = factor;
      }
    }
    const int at = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;
    const uint32_t to = shared_address(shared.weights[buffer]) + at * kRowBytes;
#pragma unroll
    for (int two = 0; two < 4; ++two) {
      const float* const s = scores + two * 8;
      const uint32_t words[4] = {pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7])};
      store_matrices(to + (((two * 2 + lane / 16) ^ (at & 7)) * 16), words);
    }
    written_for_copies();
    arrive(shared_address(&shared.weights_full[buffer]));
  }

  __device__ __forceinline__ void wait_weights(uint32_t count, int tile) {
    const int buffer = count & 1;
    wait_barrier(shared_address(&shared.weights_full[buffer]), count >> 1 & 1);
    if (tile == 0) return;
    __syncwarp();  // lanes may read what others of their own warp wrote; racecheck does not count the barrier for these
    const float low = shared.factor[buffer][row()], high = shared.factor[buffer][row() + 8];
    if (!__any_sync(~0u, low != 1.f || high != 1.f)) return;
#pragma unroll
    for (int n = 0; n < 32; ++n) sums[n * 4] *= low, sums[n * 4 + 1] *= low, sums[n * 4 + 2] *= high, sums[n * 4 + 3] *= high;
  }
  __device__ __forceinline__ void wait_rows(uint32_t count) {
    wait_barrier(shared_address(&shared.rows_full[count & 1]), count >> 1 & 1);
  }
  __device__ __forceinline__ void leave(uint64_t& barrier) {
    if (lane == 0) arrive(shared_address(&barrier));
  }

  // Scores of a token's first tile, then its weights.
  __device__ __forceinline__ void begin(uint32_t count, uint32_t turn) {
    wait_barrier(shared_address(&shared.queries_full), turn & 1);
    wait_rows(count);
    issue_scores(count & 1);
  }
  __device__ __forceinline__ void begun(uint32_t count) {
    wait_products<0>();
    if (args.tiles == 2) leave(shared.queries_empty);
    weigh(0, count & 1);
  }
  // Values of a tile.
  __device__ __forceinline__ void add(uint32_t count, int tile) {
    wait_weights(count, tile);
    issue_values(tile, count & 1);
    wait_products<0>();
    leave(shared.rows_empty[count & 1]);
  }
  // The same, and scores and weights of the next one. Values come first: what they leave is filled again
  // while scores wait for the rows that are being unpacked.
  __device__ __forceinline__ void add_and_score(uint32_t count, int tile) {
    wait_weights(count, tile);
    issue_values(tile, count & 1);
    wait_rows(count + 1);
    issue_scores((count + 1) & 1);
    wait_products<1>();
    leave(shared.rows_empty[count & 1]);
    wait_products<0>();
    if (tile + 3 >= args.tiles) leave(shared.queries_empty);  // no more scores of this group
    weigh(tile + 1, (count + 1) & 1);
  }

  // The result of a token, rotated back: each lane eight channels at a time.
  __device__ __forceinline__ void finish(int token) {
    const int q = lane % 4;
    const float by[2] = {__fdiv_rn(bf16::kPutBack, shared.sum[1][row()]),
                         __fdiv_rn(bf16::kPutBack, shared.sum[1][row() + 8])};
    const bool rotates = args.cos && group == 1;
#pragma unroll
    for (int four = 0; four < 8; ++four) {  // of 32 channels
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float x = sums[(four * 4 + n) * 4 + 2 * half] * by[half], y = sums[(four * 4 + n) * 4 + 2 * half + 1] * by[half];
          if (four >= 6 && rotates) {
            const int at = token * (kRotated / 2) + ((four - 6) * 4 + n) * 4 + q;
            const float c = __ldg(args.cos + at), s = __ldg(args.sin + at), a = round_bf16(x), b = round_bf16(y);
            x = __fadd_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            y = __fsub_rn(__fmul_rn(b, c), __fmul_rn(a, s));
          }
          words[n] = pack(x, y);
        }
        // Lane q gets the four words of tile q.
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const bool upper = q & step;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (n & step) continue;
            const uint32_t sent = upper ? words[n] : words[n + step];
            const uint32_t got = __shfl_xor_sync(~0u, sent, step);
            (upper ? words[n] : words[n + step]) = got;
          }
        }
        const int64_t head = static_cast<int64_t>(token) * kHeads + row() + 8 * half;
        *reinterpret_cast<uint4*>(args.out + head * kChannels + group * 256 + four * 32 + q * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap queries, const Arguments args) {
  extern __shared__ uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes + (-shared_address(bytes) & 1023u));
  if (threadIdx.x == 0) {
    init_barrier(shared_address(&shared.queries_full), 1);
    init_barrier(shared_address(&shared.queries_empty), 8);
    for (int b = 0; b < 2; ++b) {
      init_barrier(shared_address(&shared.rows_full[b]), 4);
      init_barrier(shared_address(&shared.rows_empty[b]), 8);
      init_barrier(shared_address(&shared.weights_full[b]), 128);
    }
    init_done();
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x < 128) {
    // 88 and twice 208 are the 3 x 168 registers that the block has; more would never be granted
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    unpack_tiles(queries, args, shared);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    Multiplier own{args, shared, 0, static_cast<int>(threadIdx.x / 32 - 4), static_cast<int>(threadIdx.x % 32)};
    for (int half = 0; half < 2; ++half) own.sinks[half] = args.sinks[own.row() + 8 * half] * kLog2e;
    uint32_t count = 0, turn = 0;
    own.begin(count, turn);
    own.begun(count);
    for (int token = blockIdx.x; token < args.tokens; token += gridDim.x) {
#pragma unroll 1
      for (int tile = 0; tile < args.tiles - 2; tile += 2, count += 2) {
        own.add(count, tile);
        own.add_and_score(count + 1, tile + 1);
      }
      own.add(count, args.tiles - 2);
      own.add(count + 1, args.tiles - 1);
      count += 2;
      if (token + gridDim.x < args.tokens) {  // the next one's first scores meanwhile
        own.begin(count, ++turn);
        own.finish(token);
        own.begun(count);
      } else {
        own.finish(token);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    Multiplier own{args, shared, 1, static_cast<int>(threadIdx.x / 32 - 8), static_cast<int>(threadIdx.x % 32)};
    for (int half = 0; half < 2; ++half) own.sinks[half] = args.sinks[own.row() + 8 * half] * kLog2e;
    uint32_t count = 0, turn = 0;
    for (int token = blockIdx.x; token < args.tokens; token += gridDim.x, ++turn) {
      wait_barrier(shared_address(&shared.queries_full), turn & 1);
#pragma unroll 1
      for (int tile = 0; tile < args.tiles; tile += 2, count += 2) {
        own.add_and_score(count, tile);
        own.add(count + 1, tile + 1);
      }
      own.finish(token);
    }
  }
}

}  // namespace

// All pointers are of the device; 64 heads of 512 channels. Returns a cudaError_t.
extern "C" int sparse_prefill(const void* queries, int64_t tokens, const void* window, const void* window_slots,
                              int64_t window_width, const void* compressed, const void* compressed_slots,
                              int64_t compressed_width, const void* sinks, const void* cos, const void* sin,
                              float scale, void* out, void* stream_pointer) {
  static bool allowed = false;
  constexpr int kSharedBytes = sizeof(Shared) + 1024;
  cudaError_t error = cudaSuccess;
  if (!allowed) {
    error = cudaFuncSetAttribute(attention_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  CUtensorMap map;
  if ((error = encode(map, queries, tokens * kHeads, kChannels, kChannels, kHeads)) != cudaSuccess) return error;
  const int tiles = static_cast<int>((compressed_width + 2 * kRows - 1) / (2 * kRows) * 2) + kWindowTiles;
  const Arguments args{static_cast<const uint8_t*>(window),
                       static_cast<const int*>(window_slots),
                       static_cast<const uint8_t*>(compressed),
                       static_cast<const int*>(compressed_slots),
                       static_cast<const float*>(sinks),
                       static_cast<const float*>(cos),
                       static_cast<const float*>(sin),
                       static_cast<__nv_bfloat16*>(out),
                       static_cast<int>(tokens),
                       static_cast<int>(window_width),
                       static_cast<int>(compressed_width),
                       tiles,
                       scale * kLog2e * bf16::kPutBack};
  const int blocks = tokens < device_multiprocessors() ? static_cast<int>(tokens) : device_multiprocessors();
  return launch_behind(attention_kernel, blocks, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream_pointer), map,
                       args);
}
