// Linears of any shape, and the rounding of their inputs. Contract: kernels/quant/linear_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

constexpr int kRows = 4;  // that a thread computes: one read of a weight for all of them

BOTH float value(float x) { return x; }
BOTH float value(uint16_t bfloat16) { return from_bits(static_cast<uint32_t>(bfloat16) << 16); }

// weights[group][position][output]
template <class W>
struct Linear {
  const float* x;
  const W* weights;
  float* out;
  int64_t tokens, groups, inner, outer;
  bool bf16;

  BOTH void operator()(int64_t i) const {
    const int64_t width = groups * outer, column = i % width, first = i / width * kRows;
    const int64_t group = column / outer, stride = groups * inner;
    const W* weight = weights + group * inner * outer + column % outer;
    const float* rows[kRows];
    float total[kRows];
    for (int r = 0; r < kRows; ++r) {
      rows[r] = x + least(first + r, tokens - 1) * stride + group * inner;
      total[r] = 0.0f;
    }
    for (int64_t k = 0; k < inner; k += kGroup) {
      const int count = static_cast<int>(least(kGroup, inner - k));
      float sum[2][kRows] = {};
      for (int p = 0; p + 1 < count; p += 2)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float w = value(weight[(k + p + odd) * outer]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[odd][r] = fmaf(rows[r][k + p + odd], w, sum[odd][r]);
        }
      if (count % 2) {
        const float w = value(weight[(k + count - 1) * outer]);
        for (int r = 0; r < kRows; ++r) sum[0][r] = fmaf(rows[r][k + count - 1], w, sum[0][r]);
      }
      for (int r = 0; r < kRows; ++r) total[r] += sum[0][r] + sum[1][r];
    }
    for (int r = 0; r < kRows && first + r < tokens; ++r) out[(first + r) * width + column] = rounded(total[r], bf16);
  }
};

struct RoundGroups {
  const float* x;
  float* out;
  int64_t format, count;

  BOTH void operator()(int64_t i) const {
    const int size = group_of(format);
    const float* from = x + i * size;
    const float scale = scale_of(largest(from, size), format);
    for (int c = 0; c < size; ++c) out[i * size + c] = in_units(from[c], scale, format) * scale;
  }
};

struct RoundBf16 {
  const float* x;
  float* out;
  BOTH void operator()(int64_t i) const { out[i] = round_bf16(x[i]); }
};

}  // namespace

extern "C" int linear(const float* x, const void* weights, int64_t is_bf16, int64_t tokens, int64_t groups,
                      int64_t inner, int64_t outer, int64_t bf16, float* out, void* stream) {
  const int64_t count = (tokens + kRows - 1) / kRows * groups * outer;
  if (is_bf16)
    return for_each(count,
                    Linear<uint16_t>{x, static_cast<const uint16_t*>(weights), out, tokens, groups, inner, outer, !!bf16},
                    stream);
  return for_each(count,
                  Linear<float>{x, static_cast<const float*>(weights), out, tokens, groups, inner, outer, !!bf16}, stream);
}

// Groups of the last dimension to `format`, back to floats.
extern "C" int round_groups(const float* x, int64_t format, int64_t count, float* out, void* stream) {
  return for_each(count / group_of(format), RoundGroups{x, out, format, count}, stream);
}

extern "C" int round_values(const float* x, int64_t count, float* out, void* stream) {
  return for_each(count, RoundBf16{x, out}, stream);
}
