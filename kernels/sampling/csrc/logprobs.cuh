// Log-probabilities of a row on sm_90, with the CPU's bits.

#pragma once

#include "selection.cuh"

namespace sampling {

struct Scan {  // of a row
  float best;
  const uint32_t* most;  // of each unit, as `ordered` has it
  const float* sums;     // of exponentials, of each kSummed ids
};

// A warp adds up kSummed exponentials in the order of the CPU's sixteen lanes: lane l + 16 works out
// what lane l adds next.
template <int kBlock>
__device__ void sum_exponentials(const Row& row, float best, float* sums, int part, int parts) {
  constexpr int kWarps = kBlock / 32, kRead = 8;  // numbers of a lane on their way at once
  const int64_t num = (row.n + kSummed - 1) / kSummed;
  const int lane = threadIdx.x % 32;
  for (int64_t sum = part * kWarps + threadIdx.x / 32; sum < num; sum += parts * kWarps) {
    float total = 0.0f;
#pragma unroll 1
    for (int64_t first = sum * kSummed; first < (sum + 1) * kSummed; first += 32 * kRead) {
      float x[kRead];
#pragma unroll
      for (int k = 0; k < kRead; ++k) {
        const int64_t i = first + 32 * k + lane;
        x[k] = row.x[i < row.n ? i : row.n - 1];
        if (i >= row.n) x[k] = -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < kRead; ++k) {
        const float own = each::exp_of(x[k] - best);
        total = (total + own) + __shfl_xor_sync(~0u, own, each::kLanes);
      }
    }
    for (int half = each::kLanes / 2; half; half /= 2) total = total + __shfl_xor_sync(~0u, total, half);
    if (lane == 0) sums[sum] = total;
  }
}

// log Σ e^x, from the sums.
__device__ inline double log_sum(Shared& s, const Row& row, const Scan& scan) {
  double total = 0.0;
  float* const sums = reinterpret_cast<float*>(s.keys);
  const int64_t num = (row.n + kSummed - 1) / kSummed;
  for (int64_t begin = 0; begin < num; begin += kThreads) {
    const int count = static_cast<int>(min(num - begin, static_cast<int64_t>(kThreads)));
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) sums[threadIdx.x] = scan.sums[begin + threadIdx.x];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < count; ++i) total += sums[i];
  }
  return static_cast<double>(scan.best) + log(total);
}

// Writes the places and ids of the best `num_top`. They lie in the `num_top` units with the best ones.
template <class Write>
__device__ void best_ids(Shared& s, const Row& row, const Scan& scan, int num_top, const Write& write) {
  const int units = static_cast<int>((row.n + kUnit - 1) / kUnit), lane = threadIdx.x % 32;
  const uint64_t bound = unit_bound(s, scan.most, units, num_top);
  __syncthreads();
  if (threadIdx.x == 0) s.digit_count = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < units; i += kThreads)
    if (s.keys[i] >= bound) s.weights[atomicAdd(&s.digit_count, 1u)] = key_id(s.keys[i]);
  __syncthreads();
  const int chosen = static_cast<int>(s.digit_count);
  uint64_t* const ids = s.weights + kMaxTop;  // behind the chosen units
  if (threadIdx.x == 0) s.num = 0, s.most = s.least = 0;
  __syncthreads();
  uint64_t most = 0, least = 0;
  for (int i = threadIdx.x / 32; i < chosen; i += kThreads / 32) {
    const int64_t first = static_cast<int64_t>(s.weights[i]) * kUnit + lane * kGroup;
    float v[kGroup];
    load_group(row, first, v);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint64_t key = order_key(v[j], first + j);
      if (first + j >= row.n || key >> 32 < bound >> 32) continue;
      s.keys[atomicAdd(&s.num, 1u)] = key;
      most = larger(most, key), least = larger(least, ~key);
    }
  }
  span(s, most, least);
  const auto visit = [&](const auto& seen) { visit_list(s, seen); };
  const uint64_t last = static_cast<int>(s.num) > num_top ? select(s, visit, false, num_top) : 0;
  __syncthreads();
  if (threadIdx.x == 0) s.digit_count = 0;
  __syncthreads();
  visit([&](uint64_t key, uint64_t) {
    if (key >= last) ids[atomicAdd(&s.digit_count, 1u)] = key;
  });
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= num_top) return;
  const uint64_t key = ids[threadIdx.x];
  int place = 0;
  for (int i = 0; i < num_top; ++i) place += ids[i] > key;
  write(place, static_cast<int32_t>(key_id(key)));
}

}  // namespace sampling
