// Products of weights in registers and rows in shared memory by the tensor cores of sm_90a, four warps
// together: `multiply<columns>` adds 16 positions of K to 64 x columns sums. A lane's sums are laid out as by
// mma.m16n8k16, tile of 8 columns after tile: d[4 tile + i].

#pragma once

#include <cstdint>

namespace wgmma {

// Rows of 128 bytes at `address` (a multiple of 1,024), swizzled over 128 bytes; 16 positions further: + 2.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Before products that read registers written since; products since `commit` are one group.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kLeft groups run.
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// d += a · rows: bfloat16, sums in float. `a` must not change until the group is waited for.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t rows);

// clang-format off
#define WGMMA_D4 "%0, %1, %2, %3"
#define WGMMA_D8 WGMMA_D4 ", %4, %5, %6, %7"
#define WGMMA_D12 WGMMA_D8 ", %8, %9, %10, %11"
#define WGMMA_D16 WGMMA_D12 ", %12, %13, %14, %15"
#define WGMMA_D20 WGMMA_D16 ", %16, %17, %18, %19"
#define WGMMA_D24 WGMMA_D20 ", %20, %21, %22, %23"
#define WGMMA_D28 WGMMA_D24 ", %24, %25, %26, %27"
#define WGMMA_D32 WGMMA_D28 ", %28, %29, %30, %31"
#define WGMMA_D36 WGMMA_D32 ", %32, %33, %34, %35"
#define WGMMA_D40 WGMMA_D36 ", %36, %37, %38, %39"
#define WGMMA_D44 WGMMA_D40 ", %40, %41, %42, %43"
#define WGMMA_D48 WGMMA_D44 ", %44, %45, %46, %47"
#define WGMMA_D52 WGMMA_D48 ", %48, %49, %50, %51"
#define WGMMA_D56 WGMMA_D52 ", %52, %53, %54, %55"
#define WGMMA_D60 WGMMA_D56 ", %56, %57, %58, %59"
#define WGMMA_D64 WGMMA_D60 ", %60, %61, %62, %63"
#define WGMMA_D68 WGMMA_D64 ", %64, %65, %66, %67"
#define WGMMA_D72 WGMMA_D68 ", %68, %69, %70, %71"
#define WGMMA_D76 WGMMA_D72 ", %72, %73, %74, %75"
#define WGMMA_D80 WGMMA_D76 ", %76, %77, %78, %79"
#define WGMMA_O4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_O8 WGMMA_O4, \
    "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_O12 WGMMA_O8, \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_O16 WGMMA_O12, \
    "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_O20 WGMMA_O16, \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_O24 WGMMA_O20, \
    "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_O28 WGMMA_O24, \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_O32 WGMMA_O28, \
    "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_O36 WGMMA_O32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_O40 WGMMA_O36, \
    "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_O44 WGMMA_O40, \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_O48 WGMMA_O44, \
    "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_O52 WGMMA_O48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_O56 WGMMA_O52, \
    "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_O60 WGMMA_O56, \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_O64 WGMMA_O60, \
    "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_O68 WGMMA_O64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_O72 WGMMA_O68, \
    "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_O76 WGMMA_O72, \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_O80 WGMMA_O76, \
    "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_MULTIPLY(columns, sums, a0, a1, a2, a3, descriptor)                                            \
  template <>                                                                                               \
  __device__ __forceinline__ void multiply<columns>(float (&d)[sums], const uint32_t (&a)[4], uint64_t rows) { \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" WGMMA_D##sums "}, "         \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #descriptor ", adds, 1, 1, 0;\n}\n"             \
                 : WGMMA_O##sums                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));                                   \
  }
WGMMA_MULTIPLY(8, 4, 4, 5, 6, 7, 8)
WGMMA_MULTIPLY(16, 8, 8, 9, 10, 11, 12)
WGMMA_MULTIPLY(24, 12, 12, 13, 14, 15, 16)
WGMMA_MULTIPLY(32, 16, 16, 17, 18, 19, 20)
WGMMA_MULTIPLY(40, 20, 20, 21, 22, 23, 24)
WGMMA_MULTIPLY(48, 24, 24, 25, 26, 27, 28)
WGMMA_MULTIPLY(56, 28, 28, 29, 30, 31, 32)
WGMMA_MULTIPLY(64, 32, 32, 33, 34, 35, 36)
WGMMA_MULTIPLY(72, 36, 36, 37, 38, 39, 40)
WGMMA_MULTIPLY(80, 40, 40, 41, 42, 43, 44)
WGMMA_MULTIPLY(88, 44, 44, 45, 46, 47, 48)
WGMMA_MULTIPLY(96, 48, 48, 49, 50, 51, 52)
WGMMA_MULTIPLY(104, 52, 52, 53, 54, 55, 56)
WGMMA_MULTIPLY(112, 56, 56, 57, 58, 59, 60)
WGMMA_MULTIPLY(120, 60, 60, 61, 62, 63, 64)
WGMMA_MULTIPLY(128, 64, 64, 65, 66, 67, 68)
WGMMA_MULTIPLY(136, 68, 68, 69, 70, 71, 72)
WGMMA_MULTIPLY(144, 72, 72, 73, 74, 75, 76)
WGMMA_MULTIPLY(152, 76, 76, 77, 78, 79, 80)
WGMMA_MULTIPLY(160, 80, 80, 81, 82, 83, 84)
#undef WGMMA_MULTIPLY
#undef WGMMA_D4
#undef WGMMA_O4
#undef WGMMA_D8
#undef WGMMA_O8
#undef WGMMA_D12
#undef WGMMA_O12
#undef WGMMA_D16
#undef WGMMA_O16
#undef WGMMA_D20
#undef WGMMA_O20
#undef WGMMA_D24
#undef WGMMA_O24
#undef WGMMA_D28
#undef WGMMA_O28
#undef WGMMA_D32
#undef WGMMA_O32
#undef WGMMA_D36
#undef WGMMA_O36
#undef WGMMA_D40
#undef WGMMA_O40
#undef WGMMA_D44
#undef WGMMA_O44
#undef WGMMA_D48
#undef WGMMA_O48
#undef WGMMA_D52
#undef WGMMA_O52
#undef WGMMA_D56
#undef WGMMA_O56
#undef WGMMA_D60
#undef WGMMA_O60
#undef WGMMA_D64
#undef WGMMA_O64
#undef WGMMA_D68
#undef WGMMA_O68
#undef WGMMA_D72
#undef WGMMA_O72
#undef WGMMA_D76
#undef WGMMA_O76
#undef WGMMA_D80
#undef WGMMA_O80
// clang-format on

}  // namespace wgmma
