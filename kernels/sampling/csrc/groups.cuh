// How warps read rows on sm_90, eight ids a lane, and draw from them.

#pragma once

#include "draws.cuh"

namespace sampling {

constexpr int kGroup = 8;  // ids that share a block of noise: a lane's
constexpr int kUnit = 32 * kGroup;

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint64_t warp_largest(uint64_t x) {
  for (int step = 16; step; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ void load_whole(const float* x, float (&v)[kGroup]) {
  const float4 a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_group(const Row& row, int64_t first, float (&v)[kGroup]) {
  const float* x = row.x + first;
  if (first + kGroup <= row.n && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
    load_whole(x, v);
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = first + j < row.n ? x[j] : -INFINITY;
  }
}

// Numbers beside the logits of a group.
template <class T>
__device__ __forceinline__ void load_beside(const T* all, int64_t first, int64_t n, T (&values)[kGroup]) {
  const T* x = all + first;
  if (first + kGroup <= n && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
    const uint4 a = *reinterpret_cast<const uint4*>(x), b = *reinterpret_cast<const uint4*>(x + 4);
    memcpy(values, &a, 16), memcpy(values + 4, &b, 16);
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = first + j < n ? x[j] : T{};
  }
}

__device__ __forceinline__ void adjust(const Row& row, int64_t first, uint32_t may, float (&v)[kGroup]) {
  if (may != 0xffu) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = may >> j & 1u ? v[j] : -INFINITY;
  }
  if (row.counts) {
    int32_t found[kGroup], any = 0;
    load_beside(row.counts, first, row.n, found);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) any |= found[j];
    if (any) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (found[j]) v[j] = row.penalised(v[j], found[j]);
    }
  }
  if (row.bias) {
    float bias[kGroup];
    load_beside(row.bias, first, row.n, bias);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] += bias[j];
  }
}

// Bits of the ids of a group that may be sampled.
__device__ __forceinline__ uint32_t may_of(const Row& row, int64_t first) {
  if (!row.bans() || first >= row.n) return 0xffu;
  uint32_t bits = row.may(first / 32) >> first % 32 & 0xffu;
  for (int32_t w = 0; w < row.num_words(); ++w) {
    const int64_t banned = row.banned_by(w) - first;
    if (banned >= 0 && banned < kGroup) bits &= ~(1u << banned);
  }
  return bits;
}

// argmax of logit + temperature · noise. Noise costs two logarithms, and hardly any id can win: since
// -log(1 - u) - (1 - u) <= -log(-log u) <= -log(1 - u), two cheap bounds leave a few ids to be tried. The
// largest word of a group bounds all of it.
struct Draw {
  float temperature, scale, reach, slack;
  float top;          // some id has this score, or more; the same in all lanes
  uint64_t key = 0;  // of the lane's best that has been tried
  float held = -INFINITY, held_logit = 0.0f;  // the lane's best bound that has not
  uint32_t held_word = 0;
  int64_t held_id = 0;

  __device__ Draw(float t, float known)
      : temperature(t), scale(1.442695f / t), reach((kMostGumbel + 1e-3f) * t), slack(1e-3f * t), top(known) {}

  __device__ __forceinline__ float loose(float v) const { return slack + 1e-6f * fabsf(v); }

  // All lanes at once, each with its group; `most` is the group's largest.
  __device__ __forceinline__ void unit(const Row& row, const float (&v)[kGroup], float most, int64_t first) {
    const bool is_live = most > -INFINITY && !(most + loose(most) < top - reach);
    if (!__any_sync(~0u, is_live)) return;
    uint32_t words[kGroup];
    bool is_near = false;
    if (is_live) {
      philox(row.own, row.position, first / kGroup + 1, words);
      uint32_t largest = words[0];
#pragma unroll
      for (int j = 1; j < kGroup; ++j) largest = max(largest, words[j]);
      const float gap = (top - most - loose(most)) * scale;
      is_near = !(gap > 0.0f) || static_cast<float>(~largest) <= exp2f(32.0f - gap) + 1.0f;
    }
    if (__any_sync(~0u, is_near)) hold_group(v, words, first, is_near);
  }

  // Of the warp's best.
  __device__ uint64_t finish() {
    settle();
    return warp_largest(key);
  }

 private:
  __device__ __noinline__ static float noise(uint32_t word) { return gumbel(word); }

  __device__ __forceinline__ void settle() {
    if (!(held > -INFINITY) || held < top) return;
    key = larger(key, order_key(held_logit + noise(held_word) * temperature, held_id));
  }

  __device__ __forceinline__ void hold_group(const float (&v)[kGroup], const uint32_t (&words)[kGroup], int64_t first,
                                             bool is_near) {
    float bounds[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float rest = __log2f(static_cast<float>(~words[j]) + 0.5f) - 32.0f;
      const float bound = v[j] + loose(v[j]) - temperature * 0.6931472f * rest;
      bounds[j] = is_near && v[j] > -INFINITY ? bound : -INFINITY;
    }
    for (;;) {
      float best = -INFINITY;
      int at = -1;
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (bounds[j] > best) best = bounds[j], at = j;
      const bool tries = at >= 0 && !(best < top);
      if (!__any_sync(~0u, tries)) return;
      float low = -INFINITY, value = 0.0f;
      uint32_t word = 0;
      if (tries) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
          if (j == at) value = v[j], word = words[j], bounds[j] = -INFINITY;
        const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;
        const float noise = rest < 0.5f ? (best - value - loose(value)) - rest * temperature : kLeastGumbel * temperature;
        low = value + noise - loose(value);
      }
      top = fmaxf(top, unordered(__reduce_max_sync(~0u, ordered(low))));
      if (!tries || best < top) continue;
      settle();
      held = best, held_logit = value, held_word = word, held_id = first + at;
    }
  }
};

}  // namespace sampling
