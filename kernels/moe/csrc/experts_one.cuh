// The experts of a single token. Such a step reads few experts, so what it takes beside the bytes
// counts: there is no kernel that sorts rows and rounds them in front (each block does it, while its
// weights are on their way), and more chunks are in flight, those of the second product before the
// first has ended.
//
// Sums are those of experts_decode.cu: the same ranges of K by warp, added in the same order.

#pragma once

#include "experts_chunks.cuh"

#ifndef EXPERTS_ONE_STAGES
#define EXPERTS_ONE_STAGES 2  // chunks in flight, by warp: measured with bench/gpu/experts_variants.py
#endif

namespace moe {
namespace {  // another library of these sources may be loaded beside this one

constexpr int kOneWarps = 16;
constexpr int kOneUnitWarps = 4;  // share a unit, as in experts_decode.cu
constexpr int kOneTeams = kOneWarps / kOneUnitWarps;
constexpr int kOneStages = EXPERTS_ONE_STAGES;
constexpr int kOneRowBytes = hopper::kChunkPositions * 2;
constexpr int kOnePassRows = 8;  // of which this token's row is the first
constexpr int kOnePart = 68;     // floats of a warp's partial sums
constexpr int kOneMaxExperts = 32;

struct OneArguments {
  const __nv_bfloat16* x;  // first: [hidden]
  const int* ids;          // [top_k]
  const float* shares;     // first: [top_k]
  const uint8_t* packed;   // [experts, units, K / 64, 2176]
  const __half* inputs;    // second: [experts of the token, K / 64, 8, 64], of which row 0 counts
  void* outputs;           // first: inputs of the second; second: bfloat16 [top_k, hidden]
  int first_expert, experts, units, steps, top_k;
  float limit;
#ifdef EXPERTS_ONE_TIMES
  uint32_t* times;  // [2, blocks, 8]: ns, see `note`
#endif
};

// For bench/gpu/experts_variants.py: when the last team of a block has come to a place.
__device__ __forceinline__ void note([[maybe_unused]] const OneArguments& args, [[maybe_unused]] bool first,
                                     [[maybe_unused]] int place) {
#ifdef EXPERTS_ONE_TIMES
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  if (threadIdx.x == (kOneTeams - 1) * kOneUnitWarps * 32)
    args.times[((first ? 0 : gridDim.x) + blockIdx.x) * 8 + place] = static_cast<uint32_t>(ns);
#endif
}

template <bool kFirst>
constexpr int kOneStageBytes = kChunkBytes + (kFirst ? 0 : kOneRowBytes);

template <bool kFirst>
int one_shared_bytes(int steps) {
  return kOneWarps * (kOneStages * (kOneStageBytes<kFirst> + 8) + kOnePart * 4) +
         (kFirst ? steps * kOneRowBytes : 0);
}

// The row, FP8-rounded, as fp16 times the factor that is returned.
__device__ __forceinline__ float round_row(const __nv_bfloat16* x, int depth, __half* to, float* most_by_warp) {
  const int t = threadIdx.x, lane = t % 32;
  const uint4* const row = reinterpret_cast<const uint4*>(x);
  float most = 0.f;
  for (int at = t; at < depth / 8; at += kOneWarps * 32) most = fmaxf(most, hopper::largest(row[at]));
  most = hopper::warp_largest(most);
  if (lane == 0) most_by_warp[t / 32] = most;
  __syncthreads();
  const float factor = hopper::storage_factor(hopper::warp_largest(most_by_warp[lane % kOneWarps]));
  for (int at = t; at < depth / 8; at += kOneWarps * 32)
    reinterpret_cast<uint4*>(to)[at] = hopper::rounded_positions(row[at], factor);
  __syncthreads();
  return factor;
}

template <bool kFirst>
__global__ void __launch_bounds__(kOneWarps * 32, 1) one_token_kernel(const OneArguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int expert_of[kOneMaxExperts], slot_of[kOneMaxExperts], num_held;
  __shared__ float most_by_warp[kOneWarps];
  constexpr int kStageBytes = kOneStageBytes<kFirst>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / kOneUnitWarps, member = warp % kOneUnitWarps;
  const int g = lane / 4, q = lane % 4;
  uint8_t* const ring = shared + warp * kOneStages * kStageBytes;
  uint8_t* const behind = shared + kOneWarps * kOneStages * kStageBytes;
  __half* const row = reinterpret_cast<__half*>(behind);  // first: the token's
  float* const parts =
      reinterpret_cast<float*>(behind + (kFirst ? args.steps * kOneRowBytes : 0)) + team * kOneUnitWarps * kOnePart;
  uint64_t* const barriers =
      reinterpret_cast<uint64_t*>(parts + (kOneTeams - team) * kOneUnitWarps * kOnePart) + warp * kOneStages;
  note(args, kFirst, 0);
  if (lane == 0) init_barriers(barriers, kOneStages);
  if (kFirst) hopper::wait_for_previous();  // ids are older than the second's predecessor
  note(args, kFirst, 1);
  hopper::let_next_begin();
  if (warp == 0) {
    const int local = lane < args.top_k ? args.ids[lane] - args.first_expert : -1;
    const bool here = local >= 0 && local < args.experts;
    const unsigned held = __ballot_sync(~0u, here);
    const int at = __popc(held & ((1u << lane) - 1));
    if (here) expert_of[at] = local, slot_of[at] = lane;
    if (lane == 0) num_held = __popc(held);
  }
  __syncthreads();

  const int units = args.units, steps = args.steps, items = num_held * units;
  // The first blocks have an item more. Those of the second product begin where blocks of the first have
  // ended, so they come to the multiprocessors that had one less.
  const int block = blockIdx.x, num_blocks = gridDim.x, even = items / num_blocks, more = items % num_blocks;
  const int from_item = block * even + min(block, more), own = even + (block < more);
  const int begin = from_item + own * team / kOneTeams, end = from_item + own * (team + 1) / kOneTeams;
  const int first_step = steps * member / kOneUnitWarps, last_step = steps * (member + 1) / kOneUnitWarps;
  const int mine = last_step - first_step;

  int to_load = (end - begin) * mine, load_item = begin, load_step = 0, load_stage = 0;
  auto load_row = [&](int stage, int item, int step) {  // of the second product's inputs
    const __half* const from = args.inputs + (static_cast<int64_t>(item / units) * steps + first_step + step) *
                                                 (kOnePassRows * hopper::kChunkPositions);
    hopper::bulk_copy(hopper::shared_address(ring + stage * kStageBytes) + kChunkBytes, from, kOneRowBytes,
                      hopper::shared_address(barriers + stage));
  };
  auto load = [&](bool with_row) {
    if (to_load == 0) return;
    --to_load;
    if (lane == 0) {
      const uint32_t barrier = hopper::shared_address(barriers + load_stage);
      const int expert = expert_of[load_item / units], unit = load_item % units;
      const uint8_t* const from =
          args.packed +
          ((static_cast<int64_t>(expert) * units + unit) * steps + first_step + load_step) * kChunkBytes;
      expect_bytes(barrier, kStageBytes);
      hopper::bulk_copy(hopper::shared_address(ring + load_stage * kStageBytes), from, kChunkBytes, barrier);
      if (!kFirst && with_row) load_row(load_stage, load_item, load_step);
    }
    load_stage = load_stage + 1 == kOneStages ? 0 : load_stage + 1;
    if (++load_step == mine) load_step = 0, ++load_item;
  };

  const int ahead = min(kOneStages, to_load);
  for (int s = 0; s < kOneStages; ++s) load(false);
  note(args, kFirst, 2);
  float unit_value = kCodeScale / kHiddenScale;
  if (kFirst) {
    unit_value = 1.f / round_row(args.x, steps * hopper::kChunkPositions, row, most_by_warp) * kCodeScale;
  } else {  // weights do not wait for the rows that the first kernel still makes
    hopper::wait_for_previous();
    if (lane == 0)
      for (int s = 0; s < ahead; ++s) load_row(s, begin + s / mine, s % mine);
  }

  note(args, kFirst, 3);
  int stage_at = 0;
  uint32_t parity = 0;
  for (int item = begin; item < end; ++item) {
    float sum[4][2] = {};
    for (int step = 0; step < mine; ++step) {
      uint8_t* const stage = ring + stage_at * kStageBytes;
      hopper::wait_barrier(hopper::shared_address(barriers + stage_at), parity);
      if (item == begin && step == 0) note(args, kFirst, 4);
      const uint4 scales = *reinterpret_cast<const uint4*>(stage + kCodeBytes + g * 16);
      const uint4* const codes = reinterpret_cast<const uint4*>(stage) + lane;
      const uint8_t* const values =
          kFirst ? reinterpret_cast<const uint8_t*>(row) + (first_step + step) * kOneRowBytes : stage + kChunkBytes;
      const uint4 low = *reinterpret_cast<const uint4*>(values + q * 16);  // every column is the same row
      const uint4 high = *reinterpret_cast<const uint4*>(values + q * 16 + 64);
      const uint32_t by_tile[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint4 words = codes[tile * 32];
        const uint32_t e = by_tile[tile];  // bytes: row g groups 0, 1; row g + 8 groups 0, 1
        const float zero[4] = {0.f, 0.f, 0.f, 0.f};
        uint32_t a[4], b[4];
        float part[4];
        unpack(words.x, a);
        unpack(words.y, b);
        hopper::mma(part, a, low.x, low.y, zero);
        hopper::mma(part, b, low.z, low.w, part);
        sum[tile][0] = fmaf(__uint_as_float((e << 23) & 0x7F800000u), part[0], sum[tile][0]);
        sum[tile][1] = fmaf(__uint_as_float((e << 7) & 0x7F800000u), part[2], sum[tile][1]);
        unpack(words.z, a);
        unpack(words.w, b);
        hopper::mma(part, a, high.x, high.y, zero);
        hopper::mma(part, b, high.z, high.w, part);
        sum[tile][0] = fmaf(__uint_as_float((e << 15) & 0x7F800000u), part[0], sum[tile][0]);
        sum[tile][1] = fmaf(__uint_as_float((e >> 1) & 0x7F800000u), part[2], sum[tile][1]);
      }
      __syncwarp();  // all lanes have read the stage
      load(true);
      if (++stage_at == kOneStages) stage_at = 0, parity ^= 1;
    }
    note(args, kFirst, 5);
    if (q == 0) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float* const to = parts + member * kOnePart + tile * 16 + g;
        to[0] = sum[tile][0];
        to[8] = sum[tile][1];
      }
    }
    sync_team(team, kOneUnitWarps * 32);
    if (member == 0) {
      const int upper_row = kFirst ? lane / 16 * 32 + lane % 16 : lane;
      const int lower_row = kFirst ? upper_row + 16 : lane + 32;
      float upper = 0.f, lower = 0.f;
#pragma unroll
      for (int w = 0; w < kOneUnitWarps; ++w) {
        upper += parts[w * kOnePart + upper_row];
        lower += parts[w * kOnePart + lower_row];
      }
      const int at = item / units, unit = item % units, slot = slot_of[at];
      if constexpr (kFirst) {
        const float h = activated(upper, lower, unit_value, args.limit, args.shares[slot]);
        static_cast<__half*>(
            args.outputs)[hopper::element<kOnePassRows>(at, 0, unit * 32 + lane, units / 2)] =
            __float2half_rn(h * kHiddenScale);
      } else {
        __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(args.outputs) +
                                   (static_cast<int64_t>(slot) * units + unit) * kChunkOutputs;
        out[lane] = __float2bfloat16_rn(upper * unit_value);
        out[lane + 32] = __float2bfloat16_rn(lower * unit_value);
      }
    }
    sync_team(team, kOneUnitWarps * 32);
  }
  note(args, kFirst, 6);
}

template <bool kFirst>
cudaError_t launch_one(const OneArguments& arguments, cudaStream_t stream) {
  const int bytes = one_shared_bytes<kFirst>(arguments.steps);
  static int allowed = 0;
  if (allowed < bytes) {
    const cudaError_t error = cudaFuncSetAttribute(one_token_kernel<kFirst>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    allowed = bytes;
  }
  return hopper::launch_behind(one_token_kernel<kFirst>, hopper::device_multiprocessors(), kOneWarps * 32, bytes,
                               stream, arguments);
}

// Whether rows of so many inputs fit beside the chunks in flight.
inline bool one_fits(int64_t hidden, int64_t top_k) {
  constexpr int kMost = 227 * 1024 - 512;  // of a block, less what is static
  return top_k <= kOneMaxExperts && one_shared_bytes<true>(static_cast<int>(hidden / hopper::kChunkPositions)) <= kMost;
}

}  // namespace
}  // namespace moe
