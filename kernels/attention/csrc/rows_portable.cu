// Rotation, pooling and storing of cache rows of any shape. Contract: kernels/attention/rows_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

// Pairs of the last `turned` channels; a row is one head of one token.
struct Rotate {
  const float *x, *cos, *sin;
  int64_t heads, channels, turned;
  bool inverse, bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t pairs = channels / 2, row = i / pairs, c = i % pairs * 2, kept = channels - turned;
    const float a = rounded(x[row * channels + c], bf16), b = rounded(x[row * channels + c + 1], bf16);
    float* to = out + row * channels + c;
    if (c < kept) {
      to[0] = a, to[1] = b;
      return;
    }
    const int64_t at = row / heads * (turned / 2) + (c - kept) / 2;
    const float s = inverse ? -sin[at] : sin[at];
    to[0] = rounded(a * cos[at] + b * -s, bf16);
    to[1] = rounded(b * cos[at] + a * s, bf16);
  }
};

// A group of 32 channels of a row, into its slot.
struct Store {
  const float* x;
  const int64_t* slots;
  int64_t dim, format;
  uint8_t* pool;

  BOTH void operator()(int64_t i) const {
    const int64_t groups = (dim + kGroup - 1) / kGroup, row = i / groups, c = i % groups * kGroup;
    const float* from = x + row * dim + c;
    if (slots[row] < 0) return;
    uint8_t* to = pool + slots[row] * row_bytes(format, dim);
    if (format == kFloat) {
      for (int64_t k = 0; k < least(kGroup, dim - c); ++k) reinterpret_cast<float*>(to)[c + k] = from[k];
      return;
    }
    const int size = group_of(format);
    uint8_t* scales = to + (format == kFp8 ? dim : dim / 2);
    for (int k = 0; k < kGroup; k += size) {
      const float scale = scale_of(largest(from + k, size), format);
      bool wrong = false;
      for (int at = k; at < k + size; at += 2) {
        wrong |= !(from[at] == from[at]) || !(from[at + 1] == from[at + 1]);
        const float low = in_units(from[at], scale, format), high = in_units(from[at + 1], scale, format);
        if (format == kFp8)
          to[c + at] = e4m3_code(low), to[c + at + 1] = e4m3_code(high);
        else
          to[(c + at) / 2] = static_cast<uint8_t>(e2m1_code(low) | e2m1_code(high) << 4);
      }
      const uint8_t code = format == kFp4E4m3 ? e4m3_code(scale) : static_cast<uint8_t>(bits_of(scale) >> 23);
      scales[(c + k) / size] = wrong && format != kFp8 ? (format == kFp4E4m3 ? 0x7f : 0xff) : code;
    }
  }
};

struct PoolPairs {
  const float *even, *odd;  // [groups, 2 · dim]: values | gates
  int64_t dim;
  bool bf16;
  float* out;

  BOTH void operator()(int64_t i) const {
    const int64_t at = i / dim * 2 * dim + i % dim;
    const float first = sigmoid(even[at + dim] - odd[at + dim]);
    out[i] = rounded(first * even[at] + (1.0f - first) * odd[at], bf16);
  }
};

}  // namespace

extern "C" int rotate(const float* x, const float* cos, const float* sin, int64_t tokens, int64_t heads,
                      int64_t channels, int64_t turned, int64_t inverse, int64_t bf16, float* out, void* stream) {
  return for_each(tokens * heads * (channels / 2),
                  Rotate{x, cos, sin, heads, channels, turned, !!inverse, !!bf16, out}, stream);
}

extern "C" int store(const float* x, const int64_t* slots, int64_t rows, int64_t dim, int64_t format, uint8_t* pool,
                     void* stream) {
  return for_each(rows * ((dim + kGroup - 1) / kGroup), Store{x, slots, dim, format, pool}, stream);
}

extern "C" int pool_pairs(const float* even, const float* odd, int64_t groups, int64_t dim, int64_t bf16, float* out,
                          void* stream) {
  return for_each(groups * dim, PoolPairs{even, odd, dim, !!bf16, out}, stream);
}
