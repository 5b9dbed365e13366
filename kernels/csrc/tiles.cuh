// Products of two tiles in shared memory by the tensor cores of sm_90, bfloat16 with sums in float, four
// warps together; boxes of tensor maps, with which the tiles come and go. A tile has rows of 128 bytes,
// swizzled over eight of them. A lane's sums are laid out as by mma.m16n8k16: d[4 tile of 8 columns + i].

#pragma once

#include <cuda.h>

#include "hopper.cuh"

namespace tiles {

constexpr int kRowBytes = 128;

// Rows along M or N, 16 positions of K further: + 2.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
// Rows along K, 64 columns of N each, `stride` bytes from one 64 to the next; 16 rows further: + 128.
__device__ __forceinline__ uint64_t describe_transposed(uint32_t address, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(stride >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// clang-format off
#define TILES_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TILES_D64 TILES_D32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TILES_D128 TILES_D64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TILES_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TILES_SIXTEEN(i) TILES_FOUR(i), TILES_FOUR(i + 4), TILES_FOUR(i + 8), TILES_FOUR(i + 12)
#define TILES_O32 TILES_SIXTEEN(0), TILES_SIXTEEN(16)
#define TILES_O64 TILES_O32, TILES_SIXTEEN(32), TILES_SIXTEEN(48)
#define TILES_O128 TILES_O64, TILES_SIXTEEN(64), TILES_SIXTEEN(80), TILES_SIXTEEN(96), TILES_SIXTEEN(112)
// d = 64 rows of `a` times the columns of `b` over 16 positions, added to d or not.
#define TILES_MULTIPLY(name, columns, sums, a_at, b_at, adds_at, transposed)                           \
  __device__ __forceinline__ void name(float (&d)[sums], uint64_t a, uint64_t b, int adds) {            \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #adds_at ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" TILES_D##sums "}, "  \
                 "%" #a_at ", %" #b_at ", adds, 1, 1, 0, " #transposed ";\n}\n"                          \
                 : TILES_O##sums                                                                       \
                 : "l"(a), "l"(b), "r"(adds));                                                         \
  }
TILES_MULTIPLY(multiply, 64, 32, 32, 33, 34, 0)
TILES_MULTIPLY(multiply, 128, 64, 64, 65, 66, 0)
TILES_MULTIPLY(multiply, 256, 128, 128, 129, 130, 0)
TILES_MULTIPLY(multiply_transposed, 256, 128, 128, 129, 130, 1)
#undef TILES_MULTIPLY
#undef TILES_D32
#undef TILES_D64
#undef TILES_D128
#undef TILES_FOUR
#undef TILES_SIXTEEN
#undef TILES_O32
#undef TILES_O64
#undef TILES_O128
// clang-format on

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void written_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// 128 threads; 0 is the barrier of the block.
__device__ __forceinline__ void sync_group(int name) { asm volatile("bar.sync %0, 128;" ::"r"(name) : "memory"); }

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// Four matrices of 8 x 8: rows of the first from lanes 0 to 7, and so on.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// bfloat16 [rows, width], rows `stride` elements apart, in boxes of `box_rows` times 64.
inline cudaError_t encode(CUtensorMap& map, const void* at, int64_t rows, int64_t width, int64_t stride, int box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode function = nullptr;
  if (!function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    function = reinterpret_cast<Encode>(found);
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, element_strides[2] = {1, 1};
  const CUresult result = function(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(at), sizes, strides,
                                   box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace tiles
