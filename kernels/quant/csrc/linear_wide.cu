// FP8 linears with scales of 32 x 32 blocks for many rows, on sm_90: all warps of a block share each
// stage of weights and rows. See kernels/quant/linear_cuda.py.
//
// An item is 128 outputs times kRows rows times a slice of K. A warpgroup has the 64 outputs of a unit:
// its weights are unpacked into registers, as M, and rows, as N, come from shared memory; while one
// product runs, the one before is added. A third warpgroup loads. The sums are made
// in the order of the kernel for few rows (linear_decode.cu): range by range of a slice, each step of
// 32 positions scaled on its own. wgmma and mma.sync give a step the same bits on this hardware (a
// test holds that), so both kernels do.

#include "fp8_linear.cuh"

using namespace fp8_linear;

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;  // and a warpgroup that loads
constexpr int kUnits = 2;   // of an item
constexpr int kRanges = 4;  // of a slice, as kUnitWarps of the other kernel
constexpr int kTotalStride = kThreads + 4;  // so that a transposed read hits all banks once

template <int kRows>
struct Shape {
  static constexpr int kTiles = kRows / 8;
  static constexpr int kRowBytes = kRows * kChunkPositions * 2;
  static constexpr int kStageBytes = kRowBytes + (kUnits * kChunkBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = kRows >= 128 ? 6 : 10;
  static constexpr int kTotalBytes = kTiles * 4 * kTotalStride * 4;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kTotalBytes + 2 * kStages * 8;
};

struct Arguments {
  const uint8_t* packed;    // [units, steps, 4224]
  const __half* inputs;     // [passes, groups · steps, rows, 64], see `store_swizzled`
  const float* input_unit;  // [tokens]
  void* outputs;            // one slice: bfloat16 [tokens, width]; else float [slices, tokens, width]
  int tokens, units, group_units, steps, total_steps, slices, passes;
};

struct Item {
  int unit, slice, pass, first, last;
};

__device__ __forceinline__ Item item_at(const Arguments& args, int index) {
  Item item;
  item.pass = index % args.passes;
  item.slice = index / args.passes % args.slices;
  item.unit = index / args.passes / args.slices * kUnits;
  item.first = args.steps * item.slice / args.slices;
  item.last = args.steps * (item.slice + 1) / args.slices;
  return item;
}

// d = weights of a warp's 16 outputs and 16 positions times all rows, added to d or not. Four warps.
template <int kRows, bool kAdds>
__device__ __forceinline__ void multiply_rows(float (&d)[kRows / 8][4], const uint32_t (&a)[4], uint64_t rows);
template <>
__device__ __forceinline__ void multiply_rows<64, false>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t rows) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}\n"
      : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]),
        "=f"(d[1][2]), "=f"(d[1][3]), "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3]),
        "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3]), "=f"(d[4][0]), "=f"(d[4][1]),
        "=f"(d[4][2]), "=f"(d[4][3]), "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3]),
        "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3]), "=f"(d[7][0]), "=f"(d[7][1]),
        "=f"(d[7][2]), "=f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
template <>
__device__ __forceinline__ void multiply_rows<64, true>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t rows) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
template <>
__device__ __forceinline__ void multiply_rows<128, false>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t rows) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}\n"
      : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3]), "=f"(d[1][0]), "=f"(d[1][1]),
        "=f"(d[1][2]), "=f"(d[1][3]), "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3]),
        "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3]), "=f"(d[4][0]), "=f"(d[4][1]),
        "=f"(d[4][2]), "=f"(d[4][3]), "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3]),
        "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3]), "=f"(d[7][0]), "=f"(d[7][1]),
        "=f"(d[7][2]), "=f"(d[7][3]), "=f"(d[8][0]), "=f"(d[8][1]), "=f"(d[8][2]), "=f"(d[8][3]),
        "=f"(d[9][0]), "=f"(d[9][1]), "=f"(d[9][2]), "=f"(d[9][3]), "=f"(d[10][0]), "=f"(d[10][1]),
        "=f"(d[10][2]), "=f"(d[10][3]), "=f"(d[11][0]), "=f"(d[11][1]), "=f"(d[11][2]), "=f"(d[11][3]),
        "=f"(d[12][0]), "=f"(d[12][1]), "=f"(d[12][2]), "=f"(d[12][3]), "=f"(d[13][0]), "=f"(d[13][1]),
        "=f"(d[13][2]), "=f"(d[13][3]), "=f"(d[14][0]), "=f"(d[14][1]), "=f"(d[14][2]), "=f"(d[14][3]),
        "=f"(d[15][0]), "=f"(d[15][1]), "=f"(d[15][2]), "=f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
template <>
__device__ __forceinline__ void multiply_rows<128, true>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t rows) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
        "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}

// Of rows of 128 bytes at `address`, eight rows after another, swizzled over 128 bytes.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All stages of all items, by one thread.
template <int kRows>
__device__ __forceinline__ void load_items(const Arguments& args, uint32_t ring, uint32_t full, uint32_t empty,
                                           int begin, int end) {
  using S = Shape<kRows>;
  int stage = 0, round = 0;
  bool waited = false;
  for (int index = begin; index < end; ++index) {
    const Item item = item_at(args, index);
    const uint32_t row_bytes = min(kRows, args.tokens - item.pass * kRows) * kChunkPositions * 2;
    const uint8_t* weights = args.packed + (static_cast<int64_t>(item.unit) * args.steps + item.first) * kChunkBytes;
    const __half* rows = args.inputs + (static_cast<int64_t>(item.pass) * args.total_steps +
                                        item.unit / args.group_units * args.steps + item.first) *
                                           (kRows * kChunkPositions);
    for (int step = item.first; step < item.last; ++step) {
      if (round) wait_barrier(empty + stage * 8, (round - 1) & 1);
      const uint32_t barrier = full + stage * 8, to = ring + stage * S::kStageBytes;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(kUnits * kChunkBytes + row_bytes)
                   : "memory");
      for (int u = 0; u < kUnits; ++u)
        bulk_copy(to + S::kRowBytes + u * kChunkBytes, weights + static_cast<int64_t>(u) * args.steps * kChunkBytes,
                  kChunkBytes, barrier);
      if (!waited) wait_for_previous();  // which makes the rows
      waited = true;
      bulk_copy(to, rows, row_bytes, barrier);
      weights += kChunkBytes;
      rows += kRows * kChunkPositions;
      if (++stage == S::kStages) stage = 0, ++round;
    }
  }
  if (!waited) wait_for_previous();
}

// Nothing that reads or makes these moves across.
template <int kTiles>
__device__ __forceinline__ void pin(float (&values)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(values[n][i])::"memory");
}

// `part` is a product that has been waited for.
template <int kTiles>
__device__ __forceinline__ void add_scaled(float (&sum)[kTiles][4], float (&part)[kTiles][4], float scale) {
  pin(part);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(scale, part[n][i], sum[n][i]);
  pin(sum);
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Products of 32 positions; `words` are a lane's codes of them.
template <int kRows>
__device__ __forceinline__ void issue(float (&part)[kRows / 8][4], const uint4& words, uint64_t rows) {
  uint32_t a[4], c[4];
  unpack(words.x, a[0], a[1]);
  unpack(words.y, a[2], a[3]);
  unpack(words.z, c[0], c[1]);
  unpack(words.w, c[2], c[3]);
  begin_products();
  multiply_rows<kRows, false>(part, a, rows);
  multiply_rows<kRows, true>(part, c, rows + 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kRows>
__global__ void __launch_bounds__(kThreads + 128, 1) wide_kernel(const Arguments args) {
  using S = Shape<kRows>;
  constexpr int kTiles = S::kTiles;
  extern __shared__ uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const ring = shared + (-shared_address(shared) & 1023u);
  float* const totals = reinterpret_cast<float*>(ring + S::kStages * S::kStageBytes) + threadIdx.x;
  const uint32_t full = shared_address(ring + S::kStages * S::kStageBytes + S::kTotalBytes);
  const uint32_t empty = full + S::kStages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + s * 8));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + s * 8), "n"(kWarps));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  const int items = args.units / kUnits * args.slices * args.passes;
  const int begin = static_cast<int>(static_cast<int64_t>(items) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(items) * (blockIdx.x + 1) / gridDim.x);
  if (warp >= kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kThreads) load_items<kRows>(args, shared_address(ring), full, empty, begin, end);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous();
    const int unit = warp / 4, tile = warp % 4;  // 16 outputs of a unit
    int stage_at = 0;
    uint32_t parity = 0;
    float even[kTiles][4], odd[kTiles][4];  // products of positions 0-31 and 32-63 of a step
    float sum[kTiles][4] = {};
    for (int index = begin; index < end; ++index) {
      const Item item = item_at(args, index);
      const int length = item.last - item.first;
      bool is_first = true;
      // Steps of the slice behind which the range that has so many steps or more ends.
      auto end_of_range = [&](int steps) { return length * ((kRanges * steps + length - 1) / length) / kRanges; };
      int range_end = end_of_range(1);
      // Behind the last step of a range its sum joins the total, which starts from zero.
      auto end_range = [&](int steps) {
        if (steps != range_end) return;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float* const at = totals + (n * 4 + i) * kTotalStride;
            *at = (is_first ? 0.f : *at) + sum[n][i];
            sum[n][i] = 0.f;
          }
        is_first = false;
        range_end = end_of_range(steps + 1);
      };
#pragma unroll 1
      for (int step = item.first; step < item.last; ++step) {
        const uint8_t* const stage = ring + stage_at * S::kStageBytes;
        wait_barrier(full + stage_at * 8, parity);
        const uint8_t* const chunk = stage + S::kRowBytes + unit * kChunkBytes;
        // bytes: outputs 0-31 of positions 0-31, 32-63; outputs 32-63 of both
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(chunk + 4096) >> (16 * (tile / 2));
        const uint4* const codes = reinterpret_cast<const uint4*>(chunk) + tile * 64 + lane;
        const uint64_t rows = describe(shared_address(stage));
        const uint4 first = codes[0], second = codes[32];
        issue<kRows>(even, first, rows);
        issue<kRows>(odd, second, rows + 4);
        wait_products<1>();
        add_scaled(sum, even, __uint_as_float((scales & 255u) << 23));
        wait_products<0>();
        if (lane == 0) arrive(empty + stage_at * 8);  // the stage has been read
        add_scaled(sum, odd, __uint_as_float((scales >> 8 & 255u) << 23));
        end_range(step + 1 - item.first);
        if (++stage_at == S::kStages) stage_at = 0, parity ^= 1;
      }

      // Transposed: a lane stores four outputs of one row of eight.
      __syncwarp();
      const int width = args.units * kOut, piece = lane % 4, row = lane / 4;
      const int output = (item.unit + unit) * kOut + tile * 16 + piece * 4;
      const float* const from = totals - lane + (piece / 2 * 2 + row % 2) * kTotalStride + piece % 2 * 16 + row / 2;
      float by[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        by[n] = args.input_unit[min(item.pass * kRows + n * 8 + row, args.tokens - 1)] * 256.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int token = item.pass * kRows + n * 8 + row;
        if (token >= args.tokens) break;
        const float* const values = from + n * 4 * kTotalStride;
        const int64_t at = static_cast<int64_t>(token) * width + output;
        if (args.slices == 1) {
          const __nv_bfloat162 low = __floats2bfloat162_rn(values[0] * by[n], values[4] * by[n]);
          const __nv_bfloat162 high = __floats2bfloat162_rn(values[8] * by[n], values[12] * by[n]);
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.outputs) + at) =
              make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
        } else {
          *reinterpret_cast<float4*>(static_cast<float*>(args.outputs) +
                                     static_cast<int64_t>(item.slice) * args.tokens * width + at) =
              make_float4(values[0], values[4], values[8], values[12]);
        }
      }
      __syncwarp();
    }
  }
}

template <int kRows>
cudaError_t run(const void* x, int depth, Arguments arguments, void* inputs, void* input_unit, void* partial,
                void* out, cudaStream_t stream) {
  using S = Shape<kRows>;
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(wide_kernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   S::kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  cudaError_t error = cudaSuccess;
  if (x)
    error = launch_behind(prepare_kernel<kRows, true>, arguments.tokens, kPrepareThreads, 0, stream,
                          static_cast<const __nv_bfloat16*>(x), depth, static_cast<__half*>(inputs),
                          static_cast<float*>(input_unit));
  if (error != cudaSuccess) return error;
  arguments.passes = (arguments.tokens + kRows - 1) / kRows;
  arguments.outputs = arguments.slices == 1 ? out : partial;
  error = launch_behind(wide_kernel<kRows>, device_multiprocessors(), kThreads + 128, S::kSharedBytes, stream, arguments);
  if (error != cudaSuccess || arguments.slices == 1 || !out) return error;  // parts are the result
  return launch_behind(add_slices_kernel, 2 * device_multiprocessors(), 256, 0, stream,
                       static_cast<const float4*>(partial), static_cast<const float*>(input_unit), arguments.slices,
                       arguments.tokens, arguments.units * kOut, static_cast<uint2*>(out));
}

}  // namespace

// All pointers are of the device; group_outputs is a multiple of 128. Returns a cudaError_t.
extern "C" int linear_wide(const void* x, int64_t tokens, const void* packed, int64_t groups, int64_t group_outputs,
                           int64_t depth, int64_t slices, void* inputs, void* input_unit, void* partial, void* out,
                           void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int steps = static_cast<int>(depth / kChunkPositions), count = static_cast<int>(groups);
  const int group_units = static_cast<int>(group_outputs / kOut);
  const Arguments arguments{static_cast<const uint8_t*>(packed),
                            static_cast<const __half*>(inputs),
                            static_cast<const float*>(input_unit),
                            nullptr,
                            static_cast<int>(tokens),
                            count * group_units,
                            group_units,
                            steps,
                            count * steps,
                            static_cast<int>(slices),
                            0};
  const int row = static_cast<int>(groups * depth);
  if (tokens <= 64) return run<64>(x, row, arguments, inputs, input_unit, partial, out, stream);
  return run<128>(x, row, arguments, inputs, input_unit, partial, out, stream);
}
