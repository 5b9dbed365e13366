// Sampling on sm_90 with the bits of sample_portable.cu. Contract: kernels/sampling/sample_cuda.py.
//
// Three passes, of which rows take what they need: `scan` reads every row once and ends the greedy
// ones and those without filters; `weigh` adds up, for filters, how many ids lie how far below the
// best and what they weigh, and exponentials for log-probabilities; `finish` has a block a row for
// the rest. Largest keys and whole units have no order, so it does not matter who adds them when.

#include "hopper.cuh"
#include "finish.cuh"

namespace {

using namespace sampling;

constexpr int kScanWarps = 4;
constexpr int kScanBlocks = 5;  // on a multiprocessor
constexpr int kWeighThreads = 256;
constexpr int kSlice = 8192;  // ids that a block of `weigh` adds up at once

// ---------------------------------------------------------------- scan

// Logits of kUnits units from `unit` on; true if all of them are there.
template <int kUnits>
__device__ __forceinline__ bool load_units(const float* x, int64_t n, int64_t unit, float (&v)[kUnits][kGroup]) {
  const int64_t first = unit * kUnit + threadIdx.x % 32 * kGroup;
  const bool is_whole = (unit + kUnits) * kUnit <= n;
  if (is_whole && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_whole(x + first + u * kUnit, v[u]);
  } else {
    Row row{};
    row.x = x, row.n = n;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_group(row, first + u * kUnit, v[u]);
  }
  return is_whole;
}

// A warp reads `steps` times kUnits units of a row, the next ones while it looks at the ones it has.
template <int kUnits>
__global__ void __launch_bounds__(kScanWarps * 32, kScanBlocks) scan_kernel(const Arguments a, const int steps) {
  const int lane = threadIdx.x % 32;
  const int64_t r = blockIdx.x, units = (a.num_ids + kUnit - 1) / kUnit;
  const int64_t begin = (blockIdx.y * kScanWarps + threadIdx.x / 32) * static_cast<int64_t>(kUnits) * steps;
  const int64_t end = min(begin + kUnits * steps, units);
  hopper::let_next_begin();
  hopper::wait_for_previous();
  if (begin >= end) return;
  float next[kUnits][kGroup];
  bool next_is_whole = load_units(a.logits + r * a.stride, a.num_ids, begin, next);
  const Row row = row_of(a, r);
  if (!row.draws) return;
  const Space space(a, r);
  const bool is_changed = row.counts || row.bias || row.bans(), filters = row.filters();
  const bool draws = row.own.temperature > 0 && !filters;

  float odd = 0.0f;      // becomes NaN by any number that is not finite
  uint32_t largest = 0;  // logit
  float best = -INFINITY;
  int64_t best_id = 0;
  Draw draw(row.own.temperature, -INFINITY);
  uint64_t known = 0;
#pragma unroll 1
  for (int64_t unit = begin; unit < end; unit += kUnits) {
    float v[kUnits][kGroup], most[kUnits];
    const bool is_whole = next_is_whole;
    const int64_t first = unit * kUnit + lane * kGroup;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int j = 0; j < kGroup; ++j) v[u][j] = next[u][j];
    if (unit + kUnits < end) next_is_whole = load_units(row.x, row.n, unit + kUnits, next);
    if (draws) known = *static_cast<volatile unsigned long long*>(&space.own->score);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      most[u] = v[u][0];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        most[u] = fmaxf(most[u], v[u][j]);
        if (is_whole || first + u * kUnit + j < row.n) odd = fmaf(v[u][j], 0.0f, odd);
      }
      if (!row.wants_logprobs() || unit + u >= units) continue;
      const uint32_t all = __reduce_max_sync(~0u, ordered(most[u]));
      if (lane == 0) space.most[unit + u] = all;
      largest = max(largest, all);
    }
    if (is_changed) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int64_t at = first + u * kUnit;
        const uint32_t may = may_of(row, at);
        if (filters && row.bans() && at < row.n) space.may[at / kGroup] = static_cast<uint8_t>(may);
        adjust(row, at, may, v[u]);
        most[u] = v[u][0];
#pragma unroll
        for (int j = 1; j < kGroup; ++j) most[u] = fmaxf(most[u], v[u][j]);
      }
    }
    if (draws) {
      float here = most[0];
#pragma unroll
      for (int u = 1; u < kUnits; ++u) here = fmaxf(here, most[u]);
      if (unit == begin)  // no id's noise is below the least
        draw.top = unordered(__reduce_max_sync(~0u, ordered(here))) + kLeastGumbel * row.own.temperature;
      const uint64_t other = __shfl_sync(~0u, known, 0);  // what another warp has found
      if (other) draw.top = fmaxf(draw.top, key_logit(other));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) draw.unit(row, v[u], most[u], first + u * kUnit);
      continue;
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (filters && unit + u < units) {
        const uint32_t all = __reduce_max_sync(~0u, ordered(most[u]));
        if (lane == 0) space.tops[unit + u] = all;
      }
      if (most[u] > best) {
        best = most[u];
#pragma unroll
        for (int j = kGroup - 1; j >= 0; --j)
          if (v[u][j] == best) best_id = first + u * kUnit + j;
      }
    }
  }
  if (__any_sync(~0u, odd != odd)) {
    if (lane == 0) space.own->is_bad = 1;
    return;
  }
  if (row.wants_logprobs() && lane == 0) atomicMax(&space.own->largest, largest);
  uint64_t key;
  if (draws) {
    key = draw.finish();
  } else {
    key = warp_largest(best > -INFINITY ? order_key(best, best_id) : 0);
  }
  unsigned long long* const to = draws ? &space.own->score : &space.own->best;
  if (lane == 0 && key > known) atomicMax(to, static_cast<unsigned long long>(key));
}

// ---------------------------------------------------------------- weigh

__device__ void weigh_slices(const Row& row, const Space& space, double unit) {
  __shared__ uint32_t counts[kBuckets], low[kBuckets], high[kBuckets];
  for (int b = threadIdx.x; b < kBuckets; b += kWeighThreads) counts[b] = low[b] = high[b] = 0;
  __syncthreads();
  const float best = key_logit(space.own->best);
  const Weights weights(row, best, unit);
  const Bucket bucket(row, best);
  const bool weighs = row.own.top_p < 1.0f, counts_too = row.own.top_k > 0;
  bool is_empty = true;
  for (int64_t slice = blockIdx.x * static_cast<int64_t>(kSlice); slice < row.n;
       slice += gridDim.x * static_cast<int64_t>(kSlice)) {
    const int64_t end = min(slice + kSlice, row.n);
    is_empty = false;
    for (int64_t first = slice + threadIdx.x * kGroup; first < end; first += kWeighThreads * kGroup) {
      if (!counts_too && best - unordered(space.tops[first / kUnit]) > weights.reach) continue;
      float v[kGroup];
      load_adjusted(row, space, first, v);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (!(v[j] > -INFINITY)) continue;
        const int b = bucket(v[j]);
        if (counts_too) atomicAdd(&counts[b], 1u);
        if (const uint64_t weight = weighs ? weights(v[j]) : 0) add_shared(&low[b], &high[b], weight);
      }
    }
  }
  if (is_empty) return;
  __syncthreads();
  for (int b = threadIdx.x; b < kBuckets; b += kWeighThreads) {
    if (counts[b]) atomicAdd(&space.own->counts[b], counts[b]);
    const uint64_t units = static_cast<uint64_t>(high[b]) << 32 | low[b];
    if (units) atomicAdd(&space.own->weights[b], static_cast<unsigned long long>(units));
  }
}

__global__ void __launch_bounds__(kWeighThreads) weigh_kernel(const Arguments a) {
  const int64_t r = blockIdx.y;
  hopper::let_next_begin();
  hopper::wait_for_previous();
  const Row row = row_of(a, r);
  if (!row.draws) return;
  const Space space(a, r);
  if (space.own->is_bad) return;
  if (row.wants_logprobs()) sum_exponentials<kWeighThreads>(row, unordered(space.own->largest), space.sums, blockIdx.x, gridDim.x);
  if (is_filtered(row, *space.own) && !leaves_few(row)) weigh_slices(row, space, a.unit);
}

// ---------------------------------------------------------------- finish

__global__ void __launch_bounds__(kThreads, 1) finish_kernel(const Arguments a) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int64_t r = blockIdx.x;
  hopper::wait_for_previous();
  const Row row = row_of(a, r);
  if (!row.draws) {
    if (threadIdx.x == 0) write_nothing(a, r);
    return;
  }
  const Space space(a, r);
  Finish finish(a, r, row, space, s);
  const int64_t token = finish.token();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (token < 0) {
      write_nothing(a, r);
    } else {
      write_token(a, r, token);
    }
  }
  if (token >= 0 && row.wants_logprobs()) finish.logprobs(token);
  __syncthreads();
  if (threadIdx.x == 0 && token >= 0) row.remember(static_cast<int32_t>(token));
  const bool is_counted = row.filters() && space.own->best;
  __syncthreads();
  if (is_counted) space.own->counts[threadIdx.x] = 0, space.own->weights[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    space.own->best = space.own->score = 0;
    space.own->largest = space.own->is_bad = 0;
  }
}

template <int kUnits>
int scan(const Arguments& a, int64_t steps, cudaStream_t stream) {
  const int64_t ids = kScanWarps * kUnits * steps * kUnit;
  const dim3 grid(a.num_rows, (a.num_ids + ids - 1) / ids);
  return hopper::launch_behind(scan_kernel<kUnits>, grid, kScanWarps * 32, 0, stream, a, static_cast<int>(steps));
}

// So that blocks fill the device in whole rounds, of which each costs a step more than it reads.
int launch_scan(const Arguments& a, int64_t places, cudaStream_t stream) {
  const int64_t units = (a.num_ids + kUnit - 1) / kUnit;
  if (a.num_rows * units <= places * kScanWarps) return scan<1>(a, 1, stream);
  int64_t best = 0, least = 0;
  for (int64_t steps = 1; steps <= 16; ++steps) {
    const int64_t block = kScanWarps * 2 * steps, blocks = a.num_rows * ((units + block - 1) / block);
    const int64_t cost = (blocks + places - 1) / places * (steps + 1);
    if (!best || cost < least) best = steps, least = cost;
  }
  return scan<2>(a, best, stream);
}

}  // namespace

// `arguments`: sampling::Arguments, in host memory. Returns a cudaError_t.
extern "C" int sample(const void* logits, const Arguments* arguments, void* stream_pointer) {
  (void)logits;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Arguments& a = *arguments;
  const int multiprocessors = hopper::device_multiprocessors();
  int error = launch_scan(a, static_cast<int64_t>(multiprocessors) * kScanBlocks, stream);
  if (error != cudaSuccess) return error;
  const int64_t slices = (a.num_ids + kSlice - 1) / kSlice, parts = (8 * multiprocessors + a.num_rows - 1) / a.num_rows;
  const dim3 weigh_grid(slices < parts ? slices : parts, a.num_rows);
  error = hopper::launch_behind(weigh_kernel, weigh_grid, kWeighThreads, 0, stream, a);
  if (error != cudaSuccess) return error;
  static const int set = cudaFuncSetAttribute(finish_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (set != cudaSuccess) return set;
  return hopper::launch_behind(finish_kernel, dim3(a.num_rows), kThreads, sizeof(Shared), stream, a);
}
