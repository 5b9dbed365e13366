// Kernels of any shape: one thread, or on a host one turn of a loop, for each element of a result.
// No thread waits for another, so the same source runs on both, and with the arithmetic below (no
// contraction, one polynomial of e^x, sums as docs/decisions/0007-order-of-sums.md says) with the
// same bits. Scalar twins of lanes.h and cache_row.h.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define BOTH __host__ __device__ __forceinline__
#else
#define BOTH inline
#endif

#ifdef __CUDACC__
template <class Work>
__global__ void __launch_bounds__(128) each_kernel(Work work, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) work(i);
}
template <class Work>
int for_each(int64_t count, const Work& work, void* stream) {
  if (count > 0) each_kernel<<<(count + 127) / 128, 128, 0, static_cast<cudaStream_t>(stream)>>>(work, count);
  return cudaGetLastError();
}
#else
template <class Work>
int for_each(int64_t count, const Work& work, void*) {
  for (int64_t i = 0; i < count; ++i) work(i);
  return 0;
}
#endif

namespace each {

constexpr int kLanes = 16;  // of sums over a row: lane i adds elements i, i + 16, …
constexpr int kGroup = 32;

BOTH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
BOTH float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
BOTH int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
BOTH float vmax(float a, float b) { return a > b ? a : b; }
BOTH float vmin(float a, float b) { return a < b ? a : b; }
BOTH float keep_nan(float x, float result) { return x == x ? result : x; }

BOTH float sum_lanes(const float* lanes) {
  float v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = lanes[i];
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  return v[0];
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays.
BOTH float exp_of(float x) {
  const float n = fmaf(x, 1.44269504f, 12582912.0f) - 12582912.0f;
  float r = fmaf(n, -0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r) + 1.0f;
  const int power = static_cast<int>(vmin(vmax(n, -126.0f), 127.0f));
  float y = p * from_bits(static_cast<uint32_t>(power + 127) << 23);
  if (n > 127.5f) y = p * 2.0f * from_bits(254u << 23);
  if (x > 88.7228394f) y = INFINITY;
  if (x < -87.3f) y = 0.0f;
  return keep_nan(x, y);
}
BOTH float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
// log(1 + e^x) = max(x, 0) + log1p(t), t = e^-|x|; log1p(t) = 2 artanh(t / (2 + t)).
BOTH float softplus(float x) {
  const float t = exp_of(-fabsf(x)), s = t / (2.0f + t), q = s * s;
  float p = 1.0f / 17;
  for (int odd = 15; odd >= 3; odd -= 2) p = fmaf(p, q, 1.0f / odd);
  return keep_nan(x, 2.0f * fmaf(s * q, p, s) + vmax(x, 0.0f));
}

// ---------------------------------------------------------------- rounding

BOTH float round_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return keep_nan(x, from_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u));
}
BOTH float rounded(float x, bool bf16) { return bf16 ? round_bf16(x) : x; }
BOTH float power_of_two_above(float x) { return from_bits((bits_of(x) + 0x7fffffu) & 0x7f800000u); }
BOTH float binade(float x) { return from_bits(bits_of(x) & 0x7f800000u); }
BOTH float nearest_e4m3(float x) {  // |x| <= 448
  const float magic = vmax(binade(x), 0x1p-6f) * (1.5f * 0x1p20f);
  return keep_nan(x, (x + magic) - magic);
}
BOTH float nearest_e2m1(float x) {  // saturates at 6
  const float clamped = vmin(vmax(x, -6.0f), 6.0f);
  const float magic = vmin(vmax(binade(clamped), 1.0f), 4.0f) * (0.75f * 0x1p23f);
  return keep_nan(x, (clamped + magic) - magic);
}

enum Format : int64_t { kFloat = 0, kFp8 = 1, kFp4E4m3 = 2, kFp4Ue8m0 = 3 };

BOTH int group_of(int64_t format) { return format == kFp4E4m3 ? 16 : 32; }
// The scale of a group whose largest magnitude is `most`.
BOTH float scale_of(float most, int64_t format) {
  if (format == kFp8) return power_of_two_above(vmax(most, 1e-4f) / 448.0f);
  if (format == kFp4Ue8m0) return power_of_two_above(vmax(most, 6 * 0x1p-126f) / 6.0f);
  return nearest_e4m3(vmin(vmax(most, 6 * 0x1p-9f) / 6.0f, 448.0f));
}
// A value in units of its scale, as its code says it.
BOTH float in_units(float x, float scale, int64_t format) {
  const float scaled = x / scale;
  return format == kFp8 ? keep_nan(x, nearest_e4m3(vmin(vmax(scaled, -448.0f), 448.0f))) : nearest_e2m1(scaled);
}
BOTH float largest(const float* x, int count) {
  float most = fabsf(x[0]);
  for (int i = 1; i < count; ++i) most = vmax(most, fabsf(x[i]));
  return most;
}

// ---------------------------------------------------------------- codes

BOTH uint8_t e4m3_code(float x) {  // of values that e4m3 holds exactly, and of NaN
  const float size = fabsf(x);
  if (!(x == x)) return 0x7f;
  const uint32_t code = size < 0x1p-6f ? static_cast<uint32_t>(size * 512.0f) : (bits_of(size) >> 20) - (120u << 3);
  return static_cast<uint8_t>(code | (bits_of(x) >> 24 & 0x80u));
}
BOTH float from_e4m3(uint32_t code) {
  const uint32_t size = code & 0x7fu;
  if (size == 0x7fu) return NAN;
  const float value =
      size < 8 ? from_bits((size << 20) + (121u << 23)) - 0x1p-6f : from_bits((size << 20) + (120u << 23));
  return from_bits(bits_of(value) | (code & 0x80u) << 24);
}
BOTH uint32_t e2m1_code(float x) {  // of values that e2m1 holds exactly
  const float size = fabsf(x);
  const uint32_t code = size < 1.0f ? static_cast<uint32_t>(size * 2.0f) : (bits_of(size) >> 22) - 252u;
  return (code & 7u) | (bits_of(x) >> 28 & 8u);
}
BOTH float from_e2m1(uint32_t code) {
  const uint32_t size = code & 7u;
  const float value = size < 2 ? 0.5f * size : from_bits((size + 252u) << 22);
  return code & 8u ? -value : value;
}
BOTH float from_ue8m0(uint32_t code) { return from_bits(code == 255u ? 0x7fc00000u : code << 23); }

BOTH int64_t row_bytes(int64_t format, int64_t dim) {
  switch (format) {
    case kFp8: return dim + dim / 32;
    case kFp4E4m3: return dim / 2 + dim / 16;
    case kFp4Ue8m0: return dim / 2 + dim / 32;
    default: return 4 * dim;
  }
}
// Channel c of a stored row.
BOTH float stored(const uint8_t* row, int64_t format, int64_t dim, int64_t c) {
  switch (format) {
    case kFp8: return from_e4m3(row[c]) * from_ue8m0(row[dim + c / 32]);
    case kFp4E4m3: return from_e2m1(row[c / 2] >> (c % 2 * 4)) * from_e4m3(row[dim / 2 + c / 16]);
    case kFp4Ue8m0: return from_e2m1(row[c / 2] >> (c % 2 * 4)) * from_ue8m0(row[dim / 2 + c / 32]);
    default: return reinterpret_cast<const float*>(row)[c];
  }
}

// Σ of products a(i) · b(i), i in [0, count), in the order of all products of the model.
template <class A, class B>
BOTH float dot(int64_t count, const A& a, const B& b) {
  float total = 0.0f;
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t end = least(count, first + kGroup);
    float even = 0.0f, odd = 0.0f;
    for (int64_t i = first; i < end; i += 2) {
      even = fmaf(a(i), b(i), even);
      if (i + 1 < end) odd = fmaf(a(i + 1), b(i + 1), odd);
    }
    total += even + odd;
  }
  return total;
}

}  // namespace each
