// MXFP4 experts for many rows an expert, on sm_90: the tensor cores are the limit. See
// kernels/moe/experts_prefill_cuda.py for layouts.
//
// An item is 256 outputs of one expert for a tile of up to kMaxColumns of its rows. Weights are the M of
// wgmma: they are unpacked into registers as bfloat16, group scales as exponents, exact both; rows are its
// N, from shared memory. Two warpgroups have 128 outputs each, as two products in turn: while one runs, the
// codes of the other are unpacked. A third warpgroup loads, and takes items from a counter, expert by
// expert, so that weights come once and rows from the L2.
//
// The sum of a row runs over K in one order, whatever the tile's width (a test holds that): its bits depend
// on that row alone.

#include "combine.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

#include <type_traits>

using namespace hopper;
using namespace moe;

namespace {

constexpr int kMaxColumns = 160;    // of a tile; its sums fill the registers
constexpr int kColumnStep = 8;      // widths that there is code for
constexpr int kStages = 6;
constexpr int kAtOnce = 2;         // stages between two ends of all products
constexpr int kFragments = 4;      // of weights, whose products may be in flight
constexpr int kRowAlign = 8;              // where an expert's rows begin: a pattern of the swizzle
constexpr int kConsumers = 256;           // threads
constexpr int kThreads = kConsumers + 128;
constexpr int kUnitOut = 64;              // outputs of a unit of weights
constexpr int kUnits = 4;                 // of an item
constexpr int kChunkBytes = 2176;         // of a unit and 64 positions: 2,048 of codes, 128 of scales
constexpr int kRowBytes = kChunkPositions * 2;
constexpr int kStageRowBytes = kMaxColumns * kRowBytes;
constexpr int kStageBytes = (kStageRowBytes + kUnits * kChunkBytes + 1023) / 1024 * 1024;
constexpr int kSlice = 32;                // columns that leave the registers at once
constexpr int kSliceStride = 272;         // bytes of 128 outputs, and 16 so that all banks are hit once
constexpr int kSliceBytes = kSlice * kSliceStride;
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kSliceBytes + 2 * 16 + (2 * kStages + 4) * 8;
constexpr int kMaxExperts = 1024;
constexpr int kCountSlots = 512;          // that a block of count_kernel counts
constexpr int kCountWarps = kCountSlots / 32;
constexpr int kFillThreads = 128;

// A weight's code times 2^-126 is a bfloat16 as it stands; times 2^(scale - 127 + 94) it is the weight times
// 2^-32, within range for scales of 2^-127 to 2^33.
constexpr uint32_t kScaleOffsets = 94 * 0x01010101u;
constexpr float kSumUnit = 4294967296.0f;

// What count_kernel and plan_kernel find out, all on the device.
struct Plan {
  int* heads;        // [4]: tiles; counters of items of the first and the second product
  int* counts;       // [blocks, experts]: rows by block of slots; then rows of blocks before
  int* ranks;        // [slots]: within its block and expert
  int* first_row;    // [experts]
  int4* tiles;       // expert, first row, rows
  int* row_slot;     // [rows]
  float* row_share;  // [rows]
};

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The 128 threads of a consumer warpgroup.
__device__ __forceinline__ void sync_group(int group) {
  if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  else asm volatile("bar.sync 2, 128;" ::: "memory");
}

// Counts the rows of each expert among 512 slots, and each slot's rank.
__global__ void __launch_bounds__(kCountSlots) count_kernel(const int* ids, int slots, int first_expert,
                                                            int experts, Plan plan) {
  __shared__ uint16_t by_warp[kCountWarps][kMaxExperts];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, slot = blockIdx.x * kCountSlots + t;
  for (int i = lane; i < experts; i += 32) by_warp[warp][i] = 0;
  wait_for_previous();
  let_next_begin();
  __syncwarp();
  const int expert = slot < slots ? local_expert(ids, slot, first_expert, experts) : -1;
  const unsigned same = __match_any_sync(~0u, expert);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (expert >= 0 && rank == 0) by_warp[warp][expert] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  for (int e = t; e < experts; e += kCountSlots) {
    int sum = 0;
    for (int w = 0; w < kCountWarps; ++w) {
      const int count = by_warp[w][e];
      by_warp[w][e] = static_cast<uint16_t>(sum);
      sum += count;
    }
    plan.counts[blockIdx.x * experts + e] = sum;
  }
  __syncthreads();
  if (expert >= 0) plan.ranks[slot] = by_warp[warp][expert] + rank;
}

// Inclusive sum over the block of one value a thread.
__device__ __forceinline__ int block_sum(int value, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = warp_sums[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  return value + (warp ? warp_sums[warp - 1] : 0);
}

// One block, an expert a thread: where its rows begin, and its tiles, of about equal width.
__global__ void __launch_bounds__(kMaxExperts) plan_kernel(int blocks, int experts, Plan plan) {
  __shared__ int warp_sums[2][32];
  const int e = threadIdx.x;
  wait_for_previous();
  let_next_begin();
  int rows = 0;
  if (e < experts) {
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      const int count = plan.counts[b * experts + e];
      plan.counts[b * experts + e] = rows;
      rows += count;
    }
  }
  const int aligned = (rows + kRowAlign - 1) / kRowAlign * kRowAlign;
  const int tiles = (rows + kMaxColumns - 1) / kMaxColumns;
  const int first = block_sum(aligned, warp_sums[0]) - aligned;
  const int tiles_before = block_sum(tiles, warp_sums[1]) - tiles;
  if (e < experts) plan.first_row[e] = first;
  if (tiles) {
    const int width = (((rows + tiles - 1) / tiles) + kRowAlign - 1) / kRowAlign * kRowAlign;
    for (int i = 0; i < tiles; ++i)
      plan.tiles[tiles_before + i] = make_int4(e, first + i * width, min(width, rows - i * width), 0);
  }
  if (e == kMaxExperts - 1) {
    plan.heads[0] = tiles_before + tiles;
    plan.heads[1] = plan.heads[2] = 0;
  }
}

// FP8 rounding of eight values in the group of 32 that four neighbouring lanes share, to bfloat16 pairs.
__device__ __forceinline__ void round_eight(const float (&values)[8], uint32_t (&pairs)[4]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));  // exact
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_fp8x2_storage_t q = __nv_cvt_float2_to_fp8x2(
        make_float2(values[2 * i] * inverse, values[2 * i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
    const float2 back = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(q, __NV_E4M3)));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(back.x * scale, back.y * scale);
    pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Four lanes exchange: word i of lane q becomes what lane i had as word q. So a lane's eight positions go
// to the places where wgmma reads those that its four words of codes hold (see `_pack_codes`).
__device__ __forceinline__ void transpose_words(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = other; else w[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
    if (upper) w[i] = other; else w[i + 2] = other;
  }
}

// 16 bytes (eight positions) of a row among [K / 64, rows, 64], swizzled over eight rows.
__device__ __forceinline__ uint4* row_piece(uint8_t* inputs, int64_t rows, int step, int row, int piece) {
  return reinterpret_cast<uint4*>(inputs + (step * rows + row) * kRowBytes + ((piece ^ (row & 7)) * 16));
}

// A token a block: FP8 rounding, and to its rows.
__global__ void __launch_bounds__(kFillThreads)
    fill_kernel(const __nv_bfloat16* x, const int* ids, const float* shares, int top_k, int first_expert,
                int experts, int depth, int64_t rows, Plan plan, uint8_t* inputs) {
  __shared__ int places[kMaxTopK];
  const int t = threadIdx.x, token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  if (t < top_k) {
    const int slot = token * top_k + t, expert = local_expert(ids, slot, first_expert, experts);
    int row = -1;
    if (expert >= 0) {
      row = plan.first_row[expert] + plan.counts[slot / kCountSlots * experts + expert] + plan.ranks[slot];
      plan.row_slot[row] = slot;
      plan.row_share[row] = shares[slot];
    }
    places[t] = row;
  }
  __syncthreads();
  const uint4* const from = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(token) * depth);
  for (int base = 0; base < depth / 8; base += kFillThreads) {
    const int at = base + t;
    const bool there = at < depth / 8;
    float values[8];
    uint32_t words[4];
    widen(there ? from[at] : make_uint4(0, 0, 0, 0), values);
    round_eight(values, words);
    transpose_words(words);
    if (!there) continue;
    for (int k = 0; k < top_k; ++k)
      if (places[k] >= 0)
        *row_piece(inputs, rows, at / 8, places[k], at % 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

struct Arguments {
  Plan plan;
  const uint8_t* packed;  // [experts, units, steps, 2176]
  const uint8_t* inputs;  // [steps, rows, 64] bfloat16, see `row_piece`
  uint8_t* outputs;       // first: inputs of the second; second: bfloat16 [slots, hidden]
  int64_t rows;
  int units, steps;
  float limit;
};

// Eight codes to the four registers of a fragment (rows g, g + 8, g, g + 8), times their scales. A bfloat16
// takes its sign in bit 15 and the code's magnitude in 8..6; where the codes lie: `unpack` in experts_decode.cu.
__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t scale) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale));
  return product;
}
__device__ __forceinline__ void unpack(uint32_t w, uint32_t upper, uint32_t lower, uint32_t (&a)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x01C001C0u;
  a[0] = times(((w >> 3) & kMagnitude) | (w & kSign), upper);
  a[1] = times((w & kMagnitude) | ((w << 3) & kSign), lower);
  a[2] = times(((w << 3) & kMagnitude) | ((w << 1) & kSign), upper);
  a[3] = times(((w << 6) & kMagnitude) | ((w << 2) & kSign), lower);
}

// What a lane reads of a stage for one of its two products.
struct Codes {
  uint32_t words[4];  // of 16 positions each
  uint32_t scales;    // bytes: of row g, groups 0 and 1; of row g + 8

  // Shared addresses.
  __device__ __forceinline__ void load(uint32_t words_at, uint32_t scales_at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(words_at));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(scales_at));
  }

  // The factor of a row and group, twice.
  __device__ __forceinline__ uint32_t factor(int half, int group) const {
    return ((scales + kScaleOffsets) >> (half * 16 + group * 8) & 255u) * 0x00800080u;
  }
};

using Sums = float[2][kMaxColumns / 2];

// Adds the positions of kCount stages to the first `columns` columns: by the least width between kLow and kHigh
// steps that has them. Products and unpacking take turns one by one, as a product waits at its issue while the
// one before runs. All end here: ptxas serialises products in flight across the back edge of a loop of several
// widths.
template <int kLow, int kHigh, int kCount>
__device__ __forceinline__ void multiply_stages(Sums& sums, const Codes (&codes)[kCount][2],
                                                const uint64_t (&rows)[kCount], int columns) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (columns <= kMiddle * kColumnStep) multiply_stages<kLow, kMiddle, kCount>(sums, codes, rows, columns);
    else multiply_stages<kMiddle + 1, kHigh, kCount>(sums, codes, rows, columns);
  } else {
    constexpr int kColumns = kHigh * kColumnStep;
    uint32_t fragments[kFragments][4];
#pragma unroll
    for (int turn = 0; turn < 8 * kCount; ++turn) {
      const int product = turn % 2, step = turn / 2 % 4, at = turn / 8;
      const Codes& own = codes[at][product];
      uint32_t(&a)[4] = fragments[turn % kFragments];
      unpack(own.words[step], own.factor(0, step / 2), own.factor(1, step / 2), a);
      wgmma::fence();
      wgmma::multiply<kColumns>(reinterpret_cast<float (&)[kColumns / 2]>(sums[product]), a, rows[at] + 2 * step);
      wgmma::commit();
      if (turn < 8 * kCount - 1) wgmma::wait<kFragments - 1>();  // so the next fragment is free
      else wgmma::wait<0>();
    }
  }
}

__device__ __forceinline__ uint32_t pair_of(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a * kSumUnit, b * kSumUnit);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Where a consumer thread stands; `stage` goes round through all items.
struct Consumer {
  uint32_t ring, full, empty;  // shared addresses
  uint8_t* slice;              // of its warpgroup
  uint32_t codes[2], scales[2];  // offsets in a stage, by product
  int group, stage;
  uint32_t parity;
};

// Sums of up to 32 columns to shared memory, [column][128 outputs] as bfloat16.
__device__ __forceinline__ void store_slice(const Sums& sums, int first_tile, const Consumer& me) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t to = shared_address(me.slice) + (lane / 16 * 8 + lane % 8) * kSliceStride +
                      (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int product = 0; product < 2; ++product) {
#pragma unroll
    for (int n = 0; n < kSlice / 8; n += 2) {
      const int tile = first_tile + n;
      if (tile >= kMaxColumns / 8) break;
      const float* const d = sums[product] + tile * 4;
      const uint32_t at = to + n * 8 * kSliceStride + product * 128;
      if (tile + 1 < kMaxColumns / 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(pair_of(d[0], d[1])), "r"(pair_of(d[2], d[3])), "r"(pair_of(d[4], d[5])),
                     "r"(pair_of(d[6], d[7]))
                     : "memory");
      else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                     "r"(pair_of(d[0], d[1])), "r"(pair_of(d[2], d[3]))
                     : "memory");
    }
  }
}

// SwiGLU, the share and FP8 rounding of a slice: 64 channels, gates before ups.
struct FirstEnd {
  static constexpr int kTurns = kSlice / 16;
  float shares[kTurns];  // of this thread's columns

  __device__ __forceinline__ void prepare(const Arguments& args, int first_row, int columns) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int column = threadIdx.x % 128 / 8 + i * 16;
      shares[i] = column < columns ? args.plan.row_share[first_row + column] : 0.f;
    }
  }

  __device__ __forceinline__ void run(const Arguments& args, const uint8_t* slice, int block, int first_row,
                                      int columns) const {
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int column = threadIdx.x % 128 / 8 + i * 16;
      const uint8_t* const from = slice + column * kSliceStride + piece * 16;
      float gate[8], up[8];
      widen(*reinterpret_cast<const uint4*>(from), gate);
      widen(*reinterpret_cast<const uint4*>(from + 128), up);
#pragma unroll
      for (int at = 0; at < 8; ++at) {
        const float g = fminf(gate[at], args.limit), u = fminf(fmaxf(up[at], -args.limit), args.limit);
        up[at] = round_bf16(__fdividef(1.0f, 1.0f + __expf(-g)) * g * u * shares[i]);
      }
      uint32_t words[4];
      round_eight(up, words);
      transpose_words(words);
      if (column < columns)
        *row_piece(args.outputs, args.rows, block, first_row + column, piece) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// A slice's 128 outputs to their slots.
struct SecondEnd {
  static constexpr int kTurns = kSlice / 8;
  int slots[kTurns];  // of this thread's columns

  __device__ __forceinline__ void prepare(const Arguments& args, int first_row, int columns) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int column = threadIdx.x % 128 / 16 + i * 8;
      slots[i] = column < columns ? args.plan.row_slot[first_row + column] : -1;
    }
  }

  __device__ __forceinline__ void run(const Arguments& args, const uint8_t* slice, int block, int, int) const {
    const int piece = threadIdx.x % 16, output = block * 128 + piece * 8, hidden = args.units * kUnitOut;
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      if (slots[i] >= 0 && output < hidden)
        *reinterpret_cast<uint4*>(args.outputs + (static_cast<int64_t>(slots[i]) * hidden + output) * 2) =
            *reinterpret_cast<const uint4*>(slice + (threadIdx.x % 128 / 16 + i * 8) * kSliceStride + piece * 16);
  }
};

template <int kCount>
__device__ __forceinline__ void multiply_next(Sums& sums, Consumer& me, int columns) {
  Codes codes[kCount][2];
  uint64_t rows[kCount];
  int stages[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t stage = me.ring + me.stage * kStageBytes;
    wait_barrier(me.full + me.stage * 8, me.parity);
    codes[i][0].load(stage + me.codes[0], stage + me.scales[0]);
    codes[i][1].load(stage + me.codes[1], stage + me.scales[1]);
    rows[i] = wgmma::describe(stage);
    stages[i] = me.stage;
    if (++me.stage == kStages) me.stage = 0, me.parity ^= 1;
  }
  multiply_stages<1, kMaxColumns / kColumnStep, kCount>(sums, codes, rows, columns);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (threadIdx.x % 32 == 0) arrive(me.empty + stages[i] * 8);
}

template <bool kFirst>
__device__ __forceinline__ void multiply_item(const Arguments& args, Consumer& me, const int4& item) {
  Sums sums;
#pragma unroll
  for (int i = 0; i < kMaxColumns / 2; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll 1
  for (int step = kAtOnce; step <= args.steps; step += kAtOnce) multiply_next<kAtOnce>(sums, me, item.z);
#pragma unroll 1
  for (int step = args.steps % kAtOnce; step > 0; --step) multiply_next<1>(sums, me, item.z);
#pragma unroll
  for (int i = 0; i < kMaxColumns / 2; ++i)  // nothing that reads these moves up across the last wait
    asm volatile("" : "+f"(sums[0][i]), "+f"(sums[1][i])::"memory");

  const int block = item.x * 2 + me.group;  // of 128 outputs
#pragma unroll
  for (int slice = 0; slice < (kMaxColumns + kSlice - 1) / kSlice; ++slice) {
    if (slice * kSlice >= item.z) break;
    const int first_row = item.y + slice * kSlice, columns = min(kSlice, item.z - slice * kSlice);
    std::conditional_t<kFirst, FirstEnd, SecondEnd> end;
    end.prepare(args, first_row, columns);
    store_slice(sums, slice * (kSlice / 8), me);
    sync_group(me.group);
    if (block * 2 < args.units) end.run(args, me.slice, block, first_row, columns);
    sync_group(me.group);
  }
}

// All stages of all items, by one warp: lane 0 copies rows, the next lanes a unit's codes each. An item for the
// others: its place among the blocks of 256 outputs, first row, rows; no rows: the end.
__device__ __forceinline__ void load_items(const Arguments& args, int* counter, uint32_t ring, uint32_t full,
                                           uint32_t empty, int4* items, uint32_t items_full,
                                           uint32_t items_empty) {
  const int lane = threadIdx.x % 32, blocks = (args.units + kUnits - 1) / kUnits;
  const int count = args.plan.heads[0] * blocks;
  const int64_t stride = lane == 0 ? args.rows * kRowBytes : kChunkBytes;
  int stage = 0, next = lane == 0 ? atomicAdd(counter, 1) : 0;
  uint32_t parity = 1;  // the stages are empty
  for (int nth = 0;; ++nth) {
    const int at = __shfl_sync(~0u, next, 0), mail = nth % 2, block = at % blocks;
    const bool more = at < count;
    if (lane == 0 && more) next = atomicAdd(counter, 1);
    const int4 tile = more ? args.plan.tiles[at / blocks] : make_int4(0, 0, 0, 0);
    wait_barrier(items_empty + mail * 8, (nth / 2 & 1) ^ 1);
    if (lane == 0) {
      items[mail] = make_int4(block, tile.y, tile.z, 0);
      arrive(items_full + mail * 8);
    }
    if (!more) return;
    const int units = min(kUnits, args.units - block * kUnits);
    const int bytes = lane == 0 ? tile.z * kRowBytes : kChunkBytes;
    const uint32_t offset = lane == 0 ? 0 : kStageRowBytes + (lane - 1) * kChunkBytes;
    const uint8_t* from =
        lane == 0 ? args.inputs + static_cast<int64_t>(tile.y) * kRowBytes
                  : args.packed + (static_cast<int64_t>(tile.x) * args.units + block * kUnits + lane - 1) *
                                      args.steps * kChunkBytes;
    for (int step = 0; step < args.steps; ++step) {
      wait_barrier(empty + stage * 8, parity);
      const uint32_t barrier = full + stage * 8;
      if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(units * kChunkBytes + bytes)
                     : "memory");
      __syncwarp();
      if (lane <= units) bulk_copy(ring + stage * kStageBytes + offset, from, bytes, barrier);
      from += stride;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

template <bool kFirst>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const Arguments args) {
  extern __shared__ uint8_t shared[];
  uint8_t* const ring = shared + (-shared_address(shared) & 1023u);
  uint8_t* const slices = ring + kStages * kStageBytes;
  int4* const items = reinterpret_cast<int4*>(slices + 2 * kSliceBytes);
  const uint32_t full = shared_address(items + 2), empty = full + kStages * 8;
  const uint32_t items_full = empty + kStages * 8, items_empty = items_full + 16;
  if (threadIdx.x == 0) {
    auto init = [](uint32_t barrier, int arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
    };
    for (int s = 0; s < kStages; ++s) init(full + s * 8, 1), init(empty + s * 8, kConsumers / 32);
    for (int s = 0; s < 2; ++s) init(items_full + s * 8, 1), init(items_empty + s * 8, kConsumers / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < kConsumers + 32)
      load_items(args, args.plan.heads + (kFirst ? 1 : 2), shared_address(ring), full, empty, items, items_full,
                 items_empty);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Consumer me;
    me.ring = shared_address(ring), me.full = full, me.empty = empty;
    me.group = threadIdx.x / 128, me.slice = slices + me.group * kSliceBytes;
    me.stage = 0, me.parity = 0;
    for (int product = 0; product < 2; ++product) {  // first: gates, then ups of 16 channels; second: two units
      const int unit = me.group * 2 + (kFirst ? warp / 2 : product), tile = kFirst ? warp % 2 * 2 + product : warp;
      me.codes[product] = kStageRowBytes + unit * kChunkBytes + tile * 512 + lane * 16;
      me.scales[product] = kStageRowBytes + unit * kChunkBytes + 2048 + lane / 4 * 16 + tile * 4;
    }
    for (int nth = 0;; ++nth) {
      wait_barrier(items_full + nth % 2 * 8, nth / 2 & 1);
      const int4 item = items[nth % 2];
      __syncwarp();
      if (lane == 0) arrive(items_empty + nth % 2 * 8);
      if (item.z == 0) break;
      multiply_item<kFirst>(args, me, item);
    }
  }
}

template <bool kFirst>
cudaError_t launch_product(const Arguments& arguments, cudaStream_t stream) {
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(product_kernel<kFirst>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  return launch_behind(product_kernel<kFirst>, device_multiprocessors(), kThreads, kSharedBytes, stream, arguments);
}

}  // namespace

// All pointers are of the device; `inputs` and `slots` may be one: see `Arguments`. `out` is float, or with
// `shared` bfloat16; null: slots are all that is wanted. Returns a cudaError_t.
extern "C" int experts_prefill(const void* x, const void* ids, const void* shares, int64_t tokens, int64_t top_k,
                               const void* w13, const void* w2, int64_t first_expert, int64_t experts,
                               int64_t hidden, int64_t inter, float limit, void* ints, void* tiles, void* row_share,
                               int64_t rows, void* inputs, void* hidden_rows, void* slots,
                               const void* shared, void* out, void* stream_pointer) {
  if (top_k > kMaxTopK || experts > kMaxExperts) return cudaErrorInvalidValue;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int k = static_cast<int>(top_k), from = static_cast<int>(first_expert), held = static_cast<int>(experts);
  const int count = static_cast<int>(tokens) * k, blocks = (count + kCountSlots - 1) / kCountSlots;
  const int width = static_cast<int>(hidden);
  const int* const expert_ids = static_cast<const int*>(ids);
  Plan plan;
  plan.heads = static_cast<int*>(ints);
  plan.first_row = plan.heads + 4;
  plan.counts = plan.first_row + held;
  plan.ranks = plan.counts + static_cast<int64_t>(blocks) * held;
  plan.row_slot = plan.ranks + count;
  plan.tiles = static_cast<int4*>(tiles);
  plan.row_share = static_cast<float*>(row_share);
  cudaError_t error = launch_behind(count_kernel, blocks, kCountSlots, 0, stream, expert_ids, count, from, held, plan);
  if (error != cudaSuccess) return error;
  error = launch_behind(plan_kernel, 1, kMaxExperts, 0, stream, blocks, held, plan);
  if (error != cudaSuccess) return error;
  error = launch_behind(fill_kernel, static_cast<int>(tokens), kFillThreads, 0, stream,
                        static_cast<const __nv_bfloat16*>(x), expert_ids, static_cast<const float*>(shares), k, from,
                        held, width, rows, plan, static_cast<uint8_t*>(inputs));
  if (error != cudaSuccess) return error;
  Arguments arguments{plan,
                      static_cast<const uint8_t*>(w13),
                      static_cast<const uint8_t*>(inputs),
                      static_cast<uint8_t*>(hidden_rows),
                      rows,
                      static_cast<int>(inter / 32),
                      width / kChunkPositions,
                      limit};
  error = launch_product<true>(arguments, stream);
  if (error != cudaSuccess) return error;
  arguments.packed = static_cast<const uint8_t*>(w2);
  arguments.inputs = static_cast<const uint8_t*>(hidden_rows);
  arguments.outputs = static_cast<uint8_t*>(slots);
  arguments.units = width / kUnitOut;
  arguments.steps = static_cast<int>(inter / kChunkPositions);
  error = launch_product<false>(arguments, stream);
  if (error != cudaSuccess || !out) return error;
  return combine(slots, expert_ids, tokens, k, width, from, held, shared, out, stream);
}
