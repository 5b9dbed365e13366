// What a block of threads finds among keys on sm_90 without sorting them.

#pragma once

#include "groups.cuh"

namespace sampling {

constexpr int kThreads = 512;  // of a block
constexpr int kList = 5120;    // candidates in shared memory
constexpr int kDigits = 256;

// Units of 64 bits in two halves, each added by itself: whoever makes the low one overflow carries.
__device__ __forceinline__ void add_shared(uint32_t* low, uint32_t* high, uint64_t units) {
  const uint32_t part = static_cast<uint32_t>(units), before = atomicAdd(low, part);
  const uint32_t rest = static_cast<uint32_t>(units >> 32) + (before + part < before ? 1u : 0u);
  if (rest) atomicAdd(high, rest);
}

struct Shared {
  uint64_t keys[kList], weights[kList];
  uint32_t counts[kDigits], low[kDigits], high[kDigits];
  uint64_t warps[kThreads / 32];
  unsigned long long most, least;  // key of the list, the latter inverted
  uint64_t found, before;
  uint32_t num, digit, digit_count, top;
};

// Inclusive sum over the block's threads.
__device__ inline uint64_t running_sum(Shared& s, uint64_t x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  __syncthreads();
  if (lane == 31) s.warps[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x += s.warps[w];
  return x;
}

// The one thread whose running sum is the first to reach `need`; what was before it comes along.
__device__ inline int first_to_reach(Shared& s, uint64_t held, uint64_t need, uint64_t& before) {
  const uint64_t sum = running_sum(s, held);
  if (threadIdx.x == 0) s.digit = kThreads;
  __syncthreads();
  if (sum >= need && sum - held < need) s.digit = threadIdx.x, s.before = sum - held;
  __syncthreads();
  before = s.before;
  return static_cast<int>(s.digit);
}

__device__ inline uint64_t block_sum(Shared& s, uint64_t x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < kThreads / 32; ++w) x += s.warps[w];
  return x;
}

// Bounds of the keys that the threads list.
__device__ inline void span(Shared& s, uint64_t most, uint64_t least) {
  most = warp_largest(most), least = warp_largest(least);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&s.most, static_cast<unsigned long long>(most));
    atomicMax(&s.least, static_cast<unsigned long long>(least));
  }
  __syncthreads();
}

// The last of the best keys that together are, or weigh, `need`; `visit` calls back with the keys,
// and their weights, that a thread sees. Keys lie in [s.least, s.most].
template <class Visit>
__device__ uint64_t select(Shared& s, const Visit& visit, bool by_weight, uint64_t need) {
  const uint64_t most = s.most, least = ~s.least;
  int bits = 64 - __clzll(static_cast<long long>(most ^ least));
  uint64_t prefix = bits == 64 ? 0 : most >> bits;
  while (bits > 0) {
    const int width = min(8, bits), shift = bits - width, digits = 1 << width;
    const auto is_in = [&](uint64_t key) { return bits == 64 || key >> bits == prefix; };
    __syncthreads();
    if (threadIdx.x < kDigits) s.counts[threadIdx.x] = s.low[threadIdx.x] = s.high[threadIdx.x] = 0;
    __syncthreads();
    visit([&](uint64_t key, uint64_t weight) {
      if (!is_in(key)) return;
      const int digit = static_cast<int>(key >> shift) & (digits - 1);
      atomicAdd(&s.counts[digit], 1u);
      if (by_weight) add_shared(&s.low[digit], &s.high[digit], weight);
    });
    __syncthreads();
    uint64_t held = 0, before;
    const int own = digits - 1 - static_cast<int>(threadIdx.x);
    if (own >= 0) held = by_weight ? static_cast<uint64_t>(s.high[own]) << 32 | s.low[own] : s.counts[own];
    const int digit = digits - 1 - first_to_reach(s, held, need, before);
    const bool is_last = digit < 0 || s.counts[max(digit, 0)] == 1;
    need -= before, prefix = prefix << width | static_cast<uint64_t>(max(digit, 0)), bits = shift;
    if (is_last && bits > 0) {
      visit([&](uint64_t key, uint64_t) {
        if (is_in(key)) s.found = key;
      });
      __syncthreads();
      return s.found;
    }
  }
  return prefix;
}

// Calls back with the listed keys and weights, of which each thread sees some.
template <class Seen>
__device__ __forceinline__ void visit_list(const Shared& s, const Seen& seen) {
  for (int i = threadIdx.x; i < static_cast<int>(s.num); i += kThreads) seen(s.keys[i], s.weights[i]);
}

// Lists a key for each unit, from its best logit and its number; comes back with the last of the best
// `count`, 0 if there are no more. The best `count` ids lie in these units, and none is below its logit.
__device__ inline uint64_t unit_bound(Shared& s, const uint32_t* most, int units, int count) {
  __syncthreads();
  if (threadIdx.x == 0) s.num = units, s.most = s.least = 0;
  __syncthreads();
  uint64_t best = 0, least = 0;
  for (int unit = threadIdx.x; unit < units; unit += kThreads) {
    const uint64_t key = static_cast<uint64_t>(most[unit]) << 32 | (0xffffffffu - unit);
    s.keys[unit] = key, s.weights[unit] = 0;
    best = larger(best, key), least = larger(least, ~key);
  }
  span(s, best, least);
  if (units <= count) return 0;
  return select(s, [&](const auto& seen) { visit_list(s, seen); }, false, count);
}

}  // namespace sampling
