// Norm, rotation, rounding and packing of cache rows into their slots, on sm_90. A warp takes a row; see
// kernels/attention/store_rows_cuda.py and packed_rows.py.

#include "packed_store.cuh"

using namespace packed_store;

namespace {

constexpr int kWarps = 4;

struct Arguments {
  const __nv_bfloat16* x;  // [rows, dim], `stride` apart
  int64_t stride;
  const float* norm;        // [dim], or null: no norm
  const float *cos, *sin;   // [rows, 32]
  const int* slots;         // [rows], negative: skip
  uint8_t* pool;
  int rows, entries;
  float eps;
};

template <int kFormat>
__global__ void __launch_bounds__(kWarps * 32) store_kernel(const Arguments args) {
  constexpr int kOwn = kDim<kFormat> / 32;  // channels of a lane
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  let_next_begin();
  if (row >= args.rows) return;
  const int slot = args.slots[row];
  if (slot < 0) return;
  float v[kOwn];
  const __nv_bfloat16* const from = args.x + row * args.stride + lane * kOwn;
#pragma unroll
  for (int i = 0; i < kOwn; i += 2) {
    const float2 two = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + i));
    v[i] = two.x, v[i + 1] = two.y;
  }
  const int64_t angles = static_cast<int64_t>(row) * (kRotated / 2);
  store_row<kFormat>(v, lane, args.norm, args.eps, args.cos + angles, args.sin + angles, slot, args.entries, args.pool);
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int store_rows(const void* x, int64_t stride, int64_t rows, const void* norm, float eps, const void* cos,
                          const void* sin, const void* slots, int64_t format, int64_t entries, void* pool,
                          void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Arguments arguments{static_cast<const __nv_bfloat16*>(x),
                            stride,
                            static_cast<const float*>(norm),
                            static_cast<const float*>(cos),
                            static_cast<const float*>(sin),
                            static_cast<const int*>(slots),
                            static_cast<uint8_t*>(pool),
                            static_cast<int>(rows),
                            static_cast<int>(entries),
                            eps};
  const int blocks = static_cast<int>((rows + kWarps - 1) / kWarps);
  if (format == kWindow) return launch_behind(store_kernel<kWindow>, blocks, kWarps * 32, 0, stream, arguments);
  if (format == kCompressed) return launch_behind(store_kernel<kCompressed>, blocks, kWarps * 32, 0, stream, arguments);
  return launch_behind(store_kernel<kKey>, blocks, kWarps * 32, 0, stream, arguments);
}
