// What goes into the linears of many rows on sm_90: weights expanded, activations rounded. See
// kernels/quant/linear_prefill_cuda.py.

#include "bf16.cuh"
#include "fp8_linear.cuh"

using namespace fp8_linear;

namespace {

constexpr int kEightThreads = 256;
constexpr int kNormWarps = 8;

__device__ __forceinline__ uint4 narrow(const float (&values)[8]) {
  uint4 packed;
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return packed;
}

// Eight values of a group of 32 that four neighbouring lanes share: FP8 times a power of two.
__device__ __forceinline__ uint4 round_eight(const float (&values)[8]) {
  float most = 0.f, rounded[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(values[i]));
  const unsigned lanes = 15u << (threadIdx.x % 32 & ~3);
  most = fmaxf(most, __shfl_xor_sync(lanes, most, 1));
  most = fmaxf(most, __shfl_xor_sync(lanes, most, 2));
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
  const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(scale));  // of a power of two
#pragma unroll
  for (int i = 0; i < 8; ++i) rounded[i] = round_e4m3(values[i] * inverse) * scale;
  return narrow(rounded);
}

// Sixteen bytes of codes of a chunk: eight positions of output g of sixteen and of output g + 8. They
// go where kernels/quant/linear_bf16_cuda.py has them.
__global__ void __launch_bounds__(kEightThreads)
    expand_kernel(const uint8_t* packed, int64_t count, uint4* weights) {
  wait_for_previous();
  let_next_begin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kEightThreads + threadIdx.x;
  if (at >= count) return;
  const int piece = static_cast<int>(at % 256);  // tile, group of 32 positions, g, eight positions
  const int64_t chunk = at / 256;
  const int tile = piece / 64, group = piece / 32 % 2;
  const uint8_t* const from = packed + chunk * kChunkBytes;
  const uint4 raw = *reinterpret_cast<const uint4*>(from + piece * 16);
  const uint8_t exponent = from[4096 + tile / 2 * 2 + group];
  const float scale = __uint_as_float(exponent ? static_cast<uint32_t>(exponent) << 23 : 0x00400000u);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  float values[2][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t both[2];
    unpack(words[i], both[0], both[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&both[half]));
      values[half][2 * i] = pair.x * 256.f * scale;
      values[half][2 * i + 1] = pair.y * 256.f * scale;
    }
  }
  const int output = tile * 16 + piece / 4 % 8;  // and the one eight further
  uint4* const to = weights + chunk * (kOut * 8) + output * 8 + ((group * 4 + piece % 4) ^ (output & 7));
  to[0] = narrow(values[0]);
  to[8 * 8] = narrow(values[1]);
}

// Sixteen bytes of a tile of codes (linear_bf16_cuda.py): of output g of sixteen and of output g + 8 four pairs of
// positions, which are eight apart.
__global__ void __launch_bounds__(kEightThreads)
    expand_codes_kernel(const uint8_t* packed, int64_t count, uint32_t* weights) {
  wait_for_previous();
  let_next_begin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kEightThreads + threadIdx.x;
  if (at >= count) return;
  const int piece = static_cast<int>(at % 256);  // group of 32 positions, sixteen outputs, g, pair
  const int64_t tile = at / 256;
  const int group = piece / 128, sixteen = piece / 32 % 4, g = piece / 4 % 8, q = piece % 4;
  const uint8_t* const from = packed + tile * kChunkBytes;
  const uint4 raw = *reinterpret_cast<const uint4*>(from + piece * 16);
  const uint32_t factor = (from[4096 + sixteen / 2 * 2 + group] + 120u) * 0x00800080u;  // 2^120 times the scale, twice
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t* const to = weights + tile * (kOut * kChunkPositions / 2);
  const int output = sixteen * 16 + g;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t both[2];
    bf16::unpack_fp8(words[i], both[0], both[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      to[(output + 8 * half) * 32 + ((group * 4 + i) ^ g) * 4 + q] = bf16::multiply(both[half], factor);
  }
}

__global__ void __launch_bounds__(kEightThreads)
    round_kernel(const __nv_bfloat16* x, int64_t count, int row_eights, int64_t stride, uint4* out) {
  wait_for_previous();
  let_next_begin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kEightThreads + threadIdx.x;
  if (at >= count) return;
  float values[8];
  widen(*reinterpret_cast<const uint4*>(x + at / row_eights * stride + at % row_eights * 8), values);
  out[at] = round_eight(values);
}

// A warp a row: RMS norm, bfloat16, FP8.
__global__ void __launch_bounds__(kNormWarps * 32)
    norm_round_kernel(const __nv_bfloat16* x, int rows, int row_eights, int64_t stride, const float* weight, float eps,
                      uint4* out) {
  wait_for_previous();
  let_next_begin();
  const int row = blockIdx.x * kNormWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const uint4* const from = reinterpret_cast<const uint4*>(x + row * stride);
  float squares = 0.f, values[8];
  for (int at = lane; at < row_eights; at += 32) {
    widen(from[at], values);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
  }
  for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float factor = 1.f / sqrtf(squares / static_cast<float>(row_eights * 8) + eps);
  for (int at = lane; at < row_eights; at += 32) {
    widen(from[at], values);
    const float4 low = *reinterpret_cast<const float4*>(weight + at * 8);
    const float4 high = *reinterpret_cast<const float4*>(weight + at * 8 + 4);
    const float by[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = round_bf16(values[i] * factor * by[i]);
    out[static_cast<int64_t>(row) * row_eights + at] = round_eight(values);
  }
}

// silu(gate) · up of halves that stand side by side, both clamped, bfloat16, FP8.
__global__ void __launch_bounds__(kEightThreads)
    swiglu_round_kernel(const uint4* both, int64_t count, int row_eights, float limit, uint4* out) {
  wait_for_previous();
  let_next_begin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kEightThreads + threadIdx.x;
  if (at >= count) return;
  const uint4* const from = both + at / row_eights * 2 * row_eights + at % row_eights;
  float gates[8], values[8];
  widen(from[0], gates);
  widen(from[row_eights], values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float gate = fminf(gates[i], limit), up = fminf(fmaxf(values[i], -limit), limit);
    values[i] = round_bf16(__fdiv_rn(gate, 1.f + expf(-gate)) * up);
  }
  out[at] = round_eight(values);
}

unsigned blocks_of(int64_t count, int each) { return static_cast<unsigned>((count + each - 1) / each); }

}  // namespace

// All pointers are of the device; widths are multiples of 32. Each returns a cudaError_t.
extern "C" int expand_linear(const void* packed, int64_t chunks, void* weights, void* stream) {
  const int64_t count = chunks * 256;
  return launch_behind(expand_kernel, blocks_of(count, kEightThreads), kEightThreads, 0,
                       static_cast<cudaStream_t>(stream), static_cast<const uint8_t*>(packed), count,
                       static_cast<uint4*>(weights));
}

extern "C" int expand_codes(const void* packed, int64_t chunks, void* weights, void* stream) {
  const int64_t count = chunks * 256;
  return launch_behind(expand_codes_kernel, blocks_of(count, kEightThreads), kEightThreads, 0,
                       static_cast<cudaStream_t>(stream), static_cast<const uint8_t*>(packed), count,
                       static_cast<uint32_t*>(weights));
}

extern "C" int round_rows(const void* x, int64_t rows, int64_t width, int64_t stride, void* out, void* stream) {
  const int64_t count = rows * width / 8;
  return launch_behind(round_kernel, blocks_of(count, kEightThreads), kEightThreads, 0,
                       static_cast<cudaStream_t>(stream), static_cast<const __nv_bfloat16*>(x), count,
                       static_cast<int>(width / 8), stride, static_cast<uint4*>(out));
}

extern "C" int norm_round_rows(const void* x, int64_t rows, int64_t width, int64_t stride, const void* weight,
                               float eps, void* out, void* stream) {
  return launch_behind(norm_round_kernel, blocks_of(rows, kNormWarps), kNormWarps * 32, 0,
                       static_cast<cudaStream_t>(stream), static_cast<const __nv_bfloat16*>(x), static_cast<int>(rows),
                       static_cast<int>(width / 8), stride, static_cast<const float*>(weight), eps,
                       static_cast<uint4*>(out));
}

extern "C" int swiglu_round_rows(const void* both, int64_t rows, int64_t width, float limit, void* out, void* stream) {
  const int64_t count = rows * width / 8;
  return launch_behind(swiglu_round_kernel, blocks_of(count, kEightThreads), kEightThreads, 0,
                       static_cast<cudaStream_t>(stream), static_cast<const uint4*>(both), count,
                       static_cast<int>(width / 8), limit, static_cast<uint4*>(out));
}
