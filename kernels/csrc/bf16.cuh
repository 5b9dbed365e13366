// Packed cache rows as bfloat16 pairs, without a table or a conversion, and their products.
//
// Codes are moved into the bits of a bfloat16, where they are worth a fixed power of two less than
// they mean (subnormals included), and then multiplied by their scale and that power at once. All
// values come out times 2^-8, so that no factor leaves the range; whoever uses them puts 2^8 back.
// Layouts: kernels/attention/packed_rows.py.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace bf16 {

constexpr float kPutBack = 256.0f;  // all unpacked values are times 2^-8

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Low half a, high half b.
__device__ __forceinline__ uint32_t pair(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ float low(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(uint32_t both) { return __uint_as_float(both & 0xFFFF0000u); }

// Eight e2m1 codes: in each half of the word four, as (sign, magnitude) bits (15, 8-6), (12, 5-3),
// (14, 2-0), (13, 11-9). Times 2^-126.
__device__ __forceinline__ void unpack_fp4(uint32_t w, uint32_t (&to)[4]) {
  to[0] = w & 0x81C081C0u;
  to[1] = (w << 3) & 0x81C081C0u;
  to[2] = ((w << 6) & 0x01C001C0u) | ((w << 1) & 0x80008000u);
  to[3] = ((w >> 3) & 0x01C001C0u) | ((w << 2) & 0x80008000u);
}

// Four e4m3 codes: bytes 0 and 2, then 1 and 3. Times 2^-120. NaN becomes a number.
__device__ __forceinline__ void unpack_fp8(uint32_t w, uint32_t& even, uint32_t& odd) {
  even = ((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u);
  odd = ((w >> 4) & 0x07F007F0u) | (w & 0x80008000u);
}

// Factors of two groups, whose scales are bytes 0 and 2 of `scales`.
__device__ __forceinline__ uint32_t factor_fp4_e4m3(uint32_t scales) {  // 2^126 · 2^-8 · scale
  constexpr uint32_t kUnbias = 0x7B807B80u, kRest = 0x7A807A80u;        // 2^120, 2^118
  return multiply(multiply(scales << 4, kUnbias), kRest);
}
__device__ __forceinline__ uint32_t factor_fp4_ue8m0(uint32_t scales) {  // scale at most 2^9
  return (scales << 7) + 0x3B003B00u;                                    // (byte + 118) << 7
}
__device__ __forceinline__ uint32_t factor_fp8_ue8m0(uint32_t scales) {  // scale at most 2^15
  return (scales << 7) + 0x38003800u;                                    // (byte + 112) << 7
}

// Byte `index` of `word` in bytes 0 and 2.
__device__ __forceinline__ uint32_t splat_byte(uint32_t word, int index) {
  return (word >> (8 * index) & 255u) * 0x00010001u;
}

__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace bf16
