// MXFP4 experts for few rows an expert, on sm_90: the weights stream once, at the rate of the
// memory; tokens are the narrow operand (swap-AB). See kernels/moe/experts_cuda.py for layouts.
//
// A unit is 64 outputs of one expert for up to 8 of its rows. Four warps share a unit: each sums a
// fixed range of K (by K alone), and the four partial sums are added in warp order. So the bits of
// a row do not depend on its batch mates, on the number of units, or on the grid.
//
// Numbers: e2m1 and e4m3 values are exact in fp16, so products are exact; groups of 32 are summed by
// the tensor core in fp32 and scaled into an fp32 accumulator. Activations are FP8-rounded by the
// caller (groups of 32) and stored as fp16 times a power of two, which is exact, too.

#include "combine.cuh"
#include "experts_chunks.cuh"
#include "experts_one.cuh"

using namespace hopper;
using moe::activated;
using moe::kChunkBytes;
using moe::kCodeBytes;
using moe::kCodeScale;
using moe::kHiddenScale;
using moe::kMaxTopK;
using moe::unpack;

namespace {

constexpr int kWarps = 16;              // a block
constexpr int kUnitWarps = 4;           // share a unit
constexpr int kTeams = kWarps / kUnitWarps;
constexpr int kRowTiles = 1;            // 2 halves the passes of busy experts, but takes the registers
constexpr int kRows = 8 * kRowTiles;    // rows of a pass; 8 are the N of one mma
constexpr int kOut = 64;                // outputs of a unit
constexpr int kStep = kChunkPositions;
constexpr int kStages = 3;              // chunks in flight, by warp
constexpr int kRowBytes = kStep * 2;    // of a row's part of a chunk
constexpr int kRowsBytes = kRows * kRowBytes;
constexpr int kStageBytes = kChunkBytes + kRowsBytes;
constexpr int kPartStride = 68;         // floats of a row's partial sums
constexpr int kPartFloats = kRows * kPartStride;
constexpr int kMaxExperts = 1024;
constexpr int kListInts = kMaxExperts + 8;
constexpr int kSharedBytes = kWarps * (kStages * kStageBytes + kPartFloats * 4 + kStages * 8) +
                             3 * kListInts * 4;

// What the blocks walk through: experts with rows, in ascending order. Written by the first kernel,
// read from shared memory.
struct Work {
  const int* lists;  // [3, kListInts]: expert; where its rows begin; passes before it
  const int* rows;   // slots (token · top_k + k), by expert
};

// Where a team stands in its run of (expert, unit, pass). The lists are in shared memory.
struct Cursor {
  int at, expert, first, count, passes, before, unit, pass;

  __device__ void load(const int* lists) {
    expert = lists[at];
    first = lists[kListInts + at];
    count = lists[kListInts + at + 1] - first;
    before = lists[2 * kListInts + at];
    passes = lists[2 * kListInts + at + 1] - before;
  }

  __device__ void seek(const int* lists, int active, int item, int units) {
    int low = 0, high = active - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (lists[2 * kListInts + middle] * units <= item) low = middle; else high = middle - 1;
    }
    at = low;
    load(lists);
    const int left = item - before * units;
    unit = left / passes;
    pass = left % passes;
  }

  __device__ void advance(const int* lists, int units, bool more) {
    if (++pass < passes) return;
    pass = 0;
    if (++unit < units) return;
    unit = 0;
    ++at;
    if (more) load(lists);
  }

  __device__ int num_rows() const { return min(kRows, count - pass * kRows); }
};

// Adds a group's sums, times the scales of rows g and g + 8 of a tile.
__device__ __forceinline__ void scale_into(float (&sum)[kRowTiles][4][4],
                                           const float (&part)[kRowTiles][4], int tile,
                                           uint32_t upper_bits, uint32_t lower_bits) {
  const float upper = __uint_as_float(upper_bits), lower = __uint_as_float(lower_bits);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    sum[n][tile][0] = fmaf(upper, part[n][0], sum[n][tile][0]);
    sum[n][tile][1] = fmaf(upper, part[n][1], sum[n][tile][1]);
    sum[n][tile][2] = fmaf(lower, part[n][2], sum[n][tile][2]);
    sum[n][tile][3] = fmaf(lower, part[n][3], sum[n][tile][3]);
  }
}

struct Arguments {
  Work work;
  const uint8_t* packed;    // [experts, units, K / 64, 2176]
  const __half* inputs;     // [passes, K / 64, 8, 64], see `element`
  const float* input_unit;  // first: [tokens]: what 1.0 of `inputs` stands for
  const float* weights;     // first: [slots]
  void* outputs;            // first: inputs of the second; second: bfloat16 [slots, hidden]
  int experts, units, steps, top_k;
  float limit;
};

template <bool kFirst>
__global__ void __launch_bounds__(kWarps * 32, 1) experts_kernel(const Arguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / kUnitWarps, member = warp % kUnitWarps;
  const int g = lane / 4, q = lane % 4;
  const int near = q * 16 + (g & 1) * 64;  // the exchange of `element`
  uint8_t* const ring = shared + warp * kStages * kStageBytes;
  float* const parts =
      reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes) + team * kUnitWarps * kPartFloats;
  uint8_t* const behind = shared + kWarps * (kStages * kStageBytes + kPartFloats * 4);
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(behind) + warp * kStages;
  int* const lists = reinterpret_cast<int*>(behind + kWarps * kStages * 8);
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + s)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (kFirst) wait_for_previous();  // the second's lists are older than its predecessor
  let_next_begin();
  const int active = args.work.lists[kListInts - 1];
  for (int i = threadIdx.x; i < 3 * kListInts; i += kWarps * 32)
    if (i % kListInts <= args.experts) lists[i] = args.work.lists[i];
  __syncthreads();

  const Work work = args.work;
  const int units = args.units, steps = args.steps;
  const int items = lists[2 * kListInts + active] * units;
  const int teams = gridDim.x * kTeams, me = blockIdx.x * kTeams + team;
  const int begin = static_cast<int>(static_cast<int64_t>(items) * me / teams);
  const int end = static_cast<int>(static_cast<int64_t>(items) * (me + 1) / teams);
  if (begin == end) {
    if (!kFirst) wait_for_previous();
    return;
  }
  const int first_step = steps * member / kUnitWarps, last_step = steps * (member + 1) / kUnitWarps;
  const int mine = last_step - first_step;

  Cursor source, sink;
  sink.seek(lists, active, begin, units);
  source = sink;
  int to_load = (end - begin) * mine, load_item = begin, load_step = first_step, load_stage = 0;
  const uint8_t* from = nullptr;
  const __half* from_rows = nullptr;
  uint32_t row_bytes = 0;

  auto open = [&] {  // a new unit or pass for the loader
    from = args.packed + ((static_cast<int64_t>(source.expert) * units + source.unit) * steps + first_step) *
                             kChunkBytes;
    from_rows = args.inputs + (static_cast<int64_t>(source.before + source.pass) * steps + first_step) *
                                  (kRows * kStep);
    row_bytes = source.num_rows() * kRowBytes;
  };
  auto load_rows = [&](int stage, const __half* rows, uint32_t bytes) {
    bulk_copy(shared_address(ring + stage * kStageBytes) + kChunkBytes, rows, bytes,
              shared_address(barriers + stage));
  };
  auto load = [&](bool with_rows) {
    if (to_load == 0) return;
    --to_load;
    if (lane == 0) {
      const uint32_t barrier = shared_address(barriers + load_stage);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(kChunkBytes + row_bytes)
                   : "memory");
      bulk_copy(shared_address(ring + load_stage * kStageBytes), from, kChunkBytes, barrier);
      if (with_rows) load_rows(load_stage, from_rows, row_bytes);
    }
    from += kChunkBytes;
    from_rows += kRows * kStep;
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
    if (++load_step == last_step) {
      load_step = first_step;
      ++load_item;
      source.advance(lists, units, load_item < end);
      if (load_item < end) open();
    }
  };

  if (mine) open();
  if (kFirst) {
    for (int s = 0; s < kStages; ++s) load(true);
  } else {  // weights do not wait for the rows that the first kernel still makes
    const __half* late_rows[kStages];
    uint32_t late_bytes[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      late_rows[s] = from_rows;
      late_bytes[s] = to_load ? row_bytes : 0;
      load(false);
    }
    wait_for_previous();
#pragma unroll
    for (int s = 0; s < kStages; ++s)
      if (lane == 0 && late_bytes[s]) load_rows(s, late_rows[s], late_bytes[s]);
  }

  int stage_at = 0;
  uint32_t parity = 0;
  for (int item = begin; item < end; ++item) {
    float sum[kRowTiles][4][4] = {};
    for (int step = 0; step < mine; ++step) {
      uint8_t* const stage = ring + stage_at * kStageBytes;
      wait_barrier(shared_address(barriers + stage_at), parity);
      const uint4 scales = *reinterpret_cast<const uint4*>(stage + kCodeBytes + g * 16);
      const uint4* const codes = reinterpret_cast<const uint4*>(stage) + lane;
      uint4 low[kRowTiles], high[kRowTiles];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const uint8_t* const row = stage + kChunkBytes + (n * 8 + g) * kRowBytes;
        low[n] = *reinterpret_cast<const uint4*>(row + near);
        high[n] = *reinterpret_cast<const uint4*>(row + (near ^ 64));
      }
      const uint32_t by_tile[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint4 words = codes[tile * 32];
        const uint32_t e = by_tile[tile];  // bytes: row g groups 0, 1; row g + 8 groups 0, 1
        const float zero[4] = {0.f, 0.f, 0.f, 0.f};
        uint32_t a[4], b[4];
        float part[kRowTiles][4];
        unpack(words.x, a);
        unpack(words.y, b);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          mma(part[n], a, low[n].x, low[n].y, zero);
          mma(part[n], b, low[n].z, low[n].w, part[n]);
        }
        scale_into(sum, part, tile, (e << 23) & 0x7F800000u, (e << 7) & 0x7F800000u);
        unpack(words.z, a);
        unpack(words.w, b);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          mma(part[n], a, high[n].x, high[n].y, zero);
          mma(part[n], b, high[n].z, high[n].w, part[n]);
        }
        scale_into(sum, part, tile, (e << 15) & 0x7F800000u, (e >> 1) & 0x7F800000u);
      }
      __syncwarp();  // all lanes have read the stage
      load(true);
      if (++stage_at == kStages) stage_at = 0, parity ^= 1;
    }
    float* const my_part = parts + member * kPartFloats;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float* const to = my_part + (n * 8 + 2 * q) * kPartStride + tile * 16 + g;
        to[0] = sum[n][tile][0];
        to[kPartStride] = sum[n][tile][1];
        to[8] = sum[n][tile][2];
        to[kPartStride + 8] = sum[n][tile][3];
      }
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kUnitWarps * 32) : "memory");
    for (int nth = member; nth < sink.num_rows(); nth += kUnitWarps) {
      const int slot = work.rows[sink.first + sink.pass * kRows + nth];
      const float* const mine_parts = parts + nth * kPartStride;
      const int upper_row = kFirst ? lane / 16 * 32 + lane % 16 : lane;
      const int lower_row = kFirst ? upper_row + 16 : lane + 32;
      float upper = 0.f, lower = 0.f;
#pragma unroll
      for (int w = 0; w < kUnitWarps; ++w) {
        upper += mine_parts[w * kPartFloats + upper_row];
        lower += mine_parts[w * kPartFloats + lower_row];
      }
      if constexpr (kFirst) {
        const float unit = args.input_unit[slot / args.top_k] * kCodeScale;
        const float h = activated(upper, lower, unit, args.limit, args.weights[slot]);
        static_cast<__half*>(args.outputs)[element<kRows>(sink.before + sink.pass, nth,
                                                   sink.unit * 32 + lane, units / 2)] =
            __float2half_rn(h * kHiddenScale);
      } else {
        __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(args.outputs) +
                                   static_cast<int64_t>(slot) * units * kOut + sink.unit * kOut;
        out[lane] = __float2bfloat16_rn(upper * (kCodeScale / kHiddenScale));
        out[lane + 32] = __float2bfloat16_rn(lower * (kCodeScale / kHiddenScale));
      }
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kUnitWarps * 32) : "memory");
    sink.advance(lists, units, item + 1 < end);
  }
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

// A token a block. Each block counts the rows of all experts and so knows where its own go; block 0
// writes the lists. Then FP8 rounding in groups of 32, and fp16 times a power of two to all places of
// the token; four lanes share a group, eight positions each.
__global__ void __launch_bounds__(kMaxExperts, 1)
    route_kernel(const __nv_bfloat16* x, const int* ids, int slots, int top_k, int first_expert,
                 int experts, int depth, int* lists, int* rows, __half* inputs, float* input_unit) {
  __shared__ int counts[kMaxExperts], starts[kMaxExperts], passes[kMaxExperts], warp_sums[3][32];
  __shared__ int nth[kMaxTopK], places[kMaxTopK];
  __shared__ float most_by_warp[32];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, token = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  counts[t] = 0;
  if (t < top_k) nth[t] = 0;
  const uint4* const row = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(token) * depth);
  float most = 0.f;
  for (int at = t; at < depth / 8; at += kMaxExperts) most = fmaxf(most, largest(row[at]));
  most = warp_largest(most);
  if (lane == 0) most_by_warp[warp] = most;
  __syncthreads();
  for (int slot = t; slot < slots; slot += kMaxExperts) {
    const int id = ids[slot], local = id - first_expert;
    if (local < 0 || local >= experts) continue;
    atomicAdd(&counts[local], 1);
    if (slot >= token * top_k) continue;
    for (int k = 0; k < top_k; ++k)  // rows of an expert are in the order of their tokens
      if (ids[token * top_k + k] == id) atomicAdd(&nth[k], 1);
  }
  __syncthreads();
  const int count = counts[t], needed = (count + kRows - 1) / kRows;
  const int before = block_sum(count, warp_sums[0]) - count;
  const int passes_before = block_sum(needed, warp_sums[1]) - needed;
  starts[t] = before;
  passes[t] = passes_before;
  if (token == 0) {
    const int at = block_sum(count > 0, warp_sums[2]) - (count > 0);
    if (count) {
      lists[at] = t;
      lists[kListInts + at] = before;
      lists[2 * kListInts + at] = passes_before;
    }
    if (t == kMaxExperts - 1) {
      const int active = at + (count > 0);
      lists[kListInts - 1] = active;
      lists[kListInts + active] = before + count;
      lists[2 * kListInts + active] = passes_before + needed;
    }
  }
  __syncthreads();
  if (t < top_k) {
    const int slot = token * top_k + t, local = ids[slot] - first_expert;
    const bool here = local >= 0 && local < experts;
    places[t] = here ? passes[local] * kRows + nth[t] : -1;
    if (here) rows[starts[local] + nth[t]] = slot;
  }
  __syncthreads();
  const float factor = storage_factor(warp_largest(most_by_warp[lane]));
  for (int at = t; at < depth / 8; at += kMaxExperts) {
    const uint4 packed = rounded_positions(row[at], factor);
    for (int k = 0; k < top_k; ++k) {
      const int to = places[k];
      if (to >= 0)
        *reinterpret_cast<uint4*>(inputs + element<kRows>(to / kRows, to % kRows, at * 8, depth / kStep)) = packed;
    }
  }
  if (t == 0) input_unit[token] = 1.f / factor;
}

template <bool kFirst>
cudaError_t launch_experts(const Arguments& arguments, cudaStream_t stream) {
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(
        experts_kernel<kFirst>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  return launch_behind(experts_kernel<kFirst>, device_multiprocessors(), kWarps * 32, kSharedBytes,
                       stream, arguments);
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int experts_decode(const void* x, const void* ids, const void* weights, int64_t tokens,
                              int64_t top_k, const void* w13, const void* w2, int64_t first_expert,
                              int64_t experts, int64_t hidden, int64_t inter, float limit,
                              void* scratch_ints, void* inputs, void* input_unit, void* hidden_rows,
                              void* slots, void* out, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  int* const lists = static_cast<int*>(scratch_ints);
  int* const rows = lists + 3 * kListInts;
  const int width = static_cast<int>(hidden), k = static_cast<int>(top_k);
  const int from = static_cast<int>(first_expert), held = static_cast<int>(experts);
  const int* const expert_ids = static_cast<const int*>(ids);
  if (tokens == 1 && moe::one_fits(hidden, top_k)) {
    moe::OneArguments one{static_cast<const __nv_bfloat16*>(x),
                          expert_ids,
                          static_cast<const float*>(weights),
                          static_cast<const uint8_t*>(w13),
                          static_cast<const __half*>(hidden_rows),
                          hidden_rows,
                          from,
                          held,
                          static_cast<int>(inter / 32),
                          width / kStep,
                          k,
                          limit};
#ifdef EXPERTS_ONE_TIMES
    one.times = static_cast<uint32_t*>(scratch_ints);
#endif
    cudaError_t error = moe::launch_one<true>(one, stream);
    if (error != cudaSuccess) return error;
    one.packed = static_cast<const uint8_t*>(w2);
    one.outputs = slots;
    one.units = width / kOut;
    one.steps = static_cast<int>(inter / kStep);
    error = moe::launch_one<false>(one, stream);
    if (error != cudaSuccess || !out) return error;  // slots are the result
    return moe::combine(slots, expert_ids, tokens, k, width, from, held, nullptr, out, stream);
  }
  cudaError_t error = launch_behind(
      route_kernel, static_cast<int>(tokens), kMaxExperts, 0, stream,
      static_cast<const __nv_bfloat16*>(x), static_cast<const int*>(ids),
      static_cast<int>(tokens) * k, k, from, held, width, lists, rows, static_cast<__half*>(inputs),
      static_cast<float*>(input_unit));
  if (error != cudaSuccess) return error;
  Arguments arguments{{lists, rows},
                      static_cast<const uint8_t*>(w13),
                      static_cast<const __half*>(inputs),
                      static_cast<const float*>(input_unit),
                      static_cast<const float*>(weights),
                      hidden_rows,
                      held,
                      static_cast<int>(inter / 32),
                      width / kStep,
                      k,
                      limit};
  error = launch_experts<true>(arguments, stream);
  if (error != cudaSuccess) return error;
  arguments.packed = static_cast<const uint8_t*>(w2);
  arguments.inputs = static_cast<const __half*>(hidden_rows);
  arguments.outputs = slots;
  arguments.units = width / kOut;
  arguments.steps = static_cast<int>(inter / kStep);
  error = launch_experts<false>(arguments, stream);
  if (error != cudaSuccess || !out) return error;  // slots are the result
  return moe::combine(slots, expert_ids, tokens, k, width, from, held, nullptr, out, stream);
}
