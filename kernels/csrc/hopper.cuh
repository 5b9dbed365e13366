// What the streaming kernels for sm_90 share: bulk copies on barriers, fp16 tensor core products,
// rounding as the model does it, the layout of activations, launches that overlap.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace hopper {

constexpr int kChunkPositions = 64;  // of K

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Programmatic dependent launch: the next kernel may begin where blocks of this one have ended, and
// waits for its end before it touches what it made.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float power_of_two_above(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0x7F800000u);
}

__device__ __forceinline__ float round_e4m3(float x) {
  const __nv_fp8_storage_t q = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(q, __NV_E4M3)));
}

__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// The largest |x| of a group of 32, one value a lane, decides the scale of all.
__device__ __forceinline__ float round_fp8_group(float x) {
  float most = fabsf(x);
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
  return round_e4m3(__fdiv_rn(x, scale)) * scale;
}

__device__ __forceinline__ void widen(const uint4& raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// Index of row `row` of a pass, position `k`, in [passes, K / 64, kRows, 64]. Groups of 8 positions of odd
// rows are exchanged with those 32 further, so that the reads of a fragment hit all banks once.
template <int kRows>
__device__ __forceinline__ int64_t element(int pass, int row, int k, int steps) {
  const int group = (k % kChunkPositions / 8) ^ ((row & 1) << 2);
  return (static_cast<int64_t>(pass) * steps + k / kChunkPositions) * (kRows * kChunkPositions) + row * kChunkPositions +
         group * 8 + k % 8;
}

// Factor by which a row is stored as fp16: 2^7 puts the least quantum of FP8 groups on fp16's least;
// larger rows need a smaller one.
__device__ __forceinline__ float storage_factor(float most) {
  return most < 500.f ? 128.f : 128.f / power_of_two_above(most * (1.f / 256.f));
}

// Eight positions of a row, FP8-rounded in the group of 32 that four neighbouring lanes share, times
// `factor`, as fp16.
__device__ __forceinline__ uint4 rounded_positions(const uint4& raw, float factor) {
  float values[8];
  widen(raw, values);
  float group = 0.f;
  for (int i = 0; i < 8; ++i) group = fmaxf(group, fabsf(values[i]));
  const unsigned mask = 15u << (threadIdx.x % 32 & ~3);
  group = fmaxf(group, __shfl_xor_sync(mask, group, 1));
  group = fmaxf(group, __shfl_xor_sync(mask, group, 2));
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(group, 1e-4f), 448.0f));
  uint4 packed;
  __half2* const pairs = reinterpret_cast<__half2*>(&packed);
  for (int i = 0; i < 4; ++i)
    pairs[i] = __floats2half2_rn(round_e4m3(__fdiv_rn(values[2 * i], scale)) * scale * factor,
                                 round_e4m3(__fdiv_rn(values[2 * i + 1], scale)) * scale * factor);
  return packed;
}

__device__ __forceinline__ float largest(const uint4& raw) {
  float values[8], most = 0.f;
  widen(raw, values);
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  return most;
}

__device__ __forceinline__ float warp_largest(float most) {
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  return most;
}

inline int device_multiprocessors() {
  static int count = 0;
  if (!count) {
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  return count;
}

// As `kernel<<<grid, threads, bytes, stream>>>(…)`, but it may begin while its predecessor ends.
template <typename... Parameters, typename... Values>
cudaError_t launch_behind(void (*kernel)(Parameters...), dim3 grid, int threads, int bytes,
                          cudaStream_t stream, Values... values) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(values)...);
}

}  // namespace hopper
