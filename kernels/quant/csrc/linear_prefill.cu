// Linears of many rows on sm_90: bfloat16 times bfloat16, sums in fp32. See
// kernels/quant/linear_prefill_cuda.py.
//
// A tile is 128 rows times kWidth outputs. One thread loads 64 positions of K a stage, rows by a
// tensor map and weights as they lie in memory (kernels/quant/linear_bf16_cuda.py); each of two
// warpgroups multiplies 64 rows, with one stage of products in flight. Nothing is split over K and all
// tiles have one order of K, so the bits of a row depend on that row alone. A block takes tiles until
// none is left; while it stores one, the next is loaded.

#include "tiles.cuh"

using namespace hopper;
using namespace tiles;

namespace {

constexpr int kRows = 128, kGroupRows = 64;  // of a tile, of a warpgroup
constexpr int kStep = 64;                    // positions of K: rows of 128 bytes, swizzled
constexpr int kThreads = 3 * 128;            // a warpgroup that loads and two that multiply
constexpr int kUnit = 64;                    // outputs whose weights lie together
constexpr int kUnitBytes = kUnit * kStep * 2;
constexpr int kTileRows = 16;                // tiles that share outputs run beside each other
constexpr int kBoxBytes = kGroupRows * 128;  // of results on their way out

template <int kWidth>
struct Shape {
  static constexpr int kStages = kWidth == 256 ? 3 : 6;
  static constexpr int kRowBytes = kRows * kStep * 2;
  static constexpr int kUnits = kWidth / kUnit;
  static constexpr int kStageBytes = kRowBytes + kUnits * kUnitBytes;
  static constexpr int kBuffers = kWidth / 64;  // for the boxes of a warpgroup
  static constexpr int kBoxes = kStages * kStageBytes;              // where they begin
  static constexpr int kBarriers = kBoxes + 2 * kBuffers * kBoxBytes;
  static constexpr int kSharedBytes = 1024 + kBarriers + 2 * kStages * 8;
};

struct Arguments {
  const uint8_t* weights;  // [groups · units, steps, 8192]
  float* floats;           // [tokens, outputs], or null: bfloat16 by the tensor map
  const float *cos, *sin;  // [tokens, 32] of the last 64 outputs of each head, or null
  int tokens, outputs;     // of all groups
  int steps, group_outputs, group_units, group_tiles;
  int row_tiles, tiles, head, rounds;
};

struct Tile {
  int row, output, unit, units, depth;  // where they begin; how many units there are
};

template <int kWidth>
__device__ __forceinline__ Tile tile_at(const Arguments& args, int index) {
  const int across = args.tiles / args.row_tiles, stripe = index / (kTileRows * across);
  const int left = index - stripe * kTileRows * across;
  const int rows = min(kTileRows, args.row_tiles - stripe * kTileRows);
  const int group = left / rows / args.group_tiles, column = left / rows % args.group_tiles;
  const int unit = column * Shape<kWidth>::kUnits;
  return {(stripe * kTileRows + left % rows) * kRows, group * args.group_outputs + column * kWidth,
          group * args.group_units + unit, min(Shape<kWidth>::kUnits, args.group_units - unit),
          group * args.steps * kStep};
}

template <int kWidth>
__device__ __forceinline__ void load_tiles(const CUtensorMap& x, const Arguments& args, uint32_t ring, uint32_t full,
                                           uint32_t empty) {
  using S = Shape<kWidth>;
  int stage = 0;
  uint32_t parity = 1;
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    const Tile tile = tile_at<kWidth>(args, index);
    const int64_t unit_bytes = static_cast<int64_t>(args.steps) * kUnitBytes;
    const uint8_t* const weights = args.weights + tile.unit * unit_bytes;
#pragma unroll 1
    for (int step = 0; step < args.steps; ++step) {
      wait_barrier(empty + stage * 8, parity);
      const uint32_t to = ring + stage * S::kStageBytes, barrier = full + stage * 8;
      expect_bytes(barrier, S::kRowBytes + tile.units * kUnitBytes);
      load_box(to, x, tile.depth + step * kStep, tile.row, barrier);
#pragma unroll
      for (int unit = 0; unit < S::kUnits; ++unit)  // results of units that are missing are not stored
        if (unit < tile.units)
          bulk_copy(to + S::kRowBytes + unit * kUnitBytes, weights + unit * unit_bytes + step * kUnitBytes, kUnitBytes,
                    barrier);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
}

// Whether a tile has outputs at the end of a head.
template <int kWidth>
__device__ __forceinline__ bool has_rotated(const Arguments& args, const Tile& tile) {
  if (!args.cos) return false;
  const int into_head = tile.output % args.head;
  return into_head + kWidth > args.head - 64;  // a tile begins with a box, as the end of a head does
}

// Of a lane's two rows, for its pairs of the eight columns of each part of a box.
struct Angles {
  float cos[8][2], sin[8][2];
};
__device__ __forceinline__ void read_angles(const Arguments& args, int token, Angles& to) {
#pragma unroll
  for (int part = 0; part < 8; ++part)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = min(token + 8 * half, args.tokens - 1) * 32 + part * 4 + threadIdx.x % 4;
      to.cos[part][half] = __ldg(args.cos + at);
      to.sin[part][half] = __ldg(args.sin + at);
    }
}
// Pairs of neighbouring outputs, each pair by its angle; what goes in was rounded, as what comes out.
__device__ __forceinline__ void rotate(float (&d)[4], const Angles& angles, int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float c = angles.cos[part][half], s = angles.sin[part][half];
    const float a = round_bf16(d[2 * half]), b = round_bf16(d[2 * half + 1]);
    d[2 * half] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    d[2 * half + 1] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
  }
}

// FP8 in groups of 32 outputs, of what is rounded to bfloat16 before.
template <int kCount>
__device__ __forceinline__ void round_groups(float (&d)[kCount]) {
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = 0.f, values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = round_bf16(d[group * 16 + i / 2 * 4 + 2 * half + i % 2]);
        most = fmaxf(most, fabsf(values[i]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float scale = power_of_two_above(__fdiv_rn(fmaxf(most, 1e-4f), 448.0f));
      const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(scale));  // of a power of two
#pragma unroll
      for (int i = 0; i < 8; ++i)
        d[group * 16 + i / 2 * 4 + 2 * half + i % 2] = round_e4m3(values[i] * inverse) * scale;
    }
}

// Results of a warpgroup, 64 outputs at a time: registers, shared memory, then all as one copy.
template <int kWidth>
__device__ __forceinline__ void store_rounded(float (&d)[kWidth / 2], const CUtensorMap& out, const Arguments& args,
                                              const Tile& tile, const Angles& angles, int group, uint32_t boxes) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;  // of which a lane tells the address
  if (threadIdx.x % 128 == 0) wait_stores_read<0>();
  sync_group(group + 1);
#pragma unroll
  for (int box = 0; box < kWidth / 64; ++box) {
    const uint32_t to = boxes + box * kBoxBytes;
    const bool rotates = args.cos && (tile.output + box * 64) % args.head == args.head - 64;
#pragma unroll
    for (int two = 0; two < 4; ++two) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float(&part)[4] = *reinterpret_cast<float(*)[4]>(d + (box * 8 + two * 2 + i) * 4);
        if (rotates) rotate(part, angles, two * 2 + i);
        words[2 * i] = pack(part[0], part[1]);
        words[2 * i + 1] = pack(part[2], part[3]);
      }
      store_matrices(to + row * 128 + (((two * 2 + lane / 16) ^ (row & 7)) * 16), words);
    }
  }
  written_for_copies();
  sync_group(group + 1);
  if (threadIdx.x % 128 == 0)
    for (int box = 0; box < kWidth / 64; ++box)
      store_box(out, tile.output + box * 64, tile.row + group * 64, boxes + box * kBoxBytes);
}

template <int kWidth>
__device__ __forceinline__ void store_floats(const float (&d)[kWidth / 2], const Arguments& args, const Tile& tile,
                                             int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = tile.row + group * 64 + warp * 16 + lane / 4 + 8 * half;
    if (token >= args.tokens) continue;
    float* const to = args.floats + static_cast<int64_t>(token) * args.outputs;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const int output = tile.output + n * 8 + lane % 4 * 2;
      if (output < args.outputs)
        *reinterpret_cast<float2*>(to + output) = make_float2(d[n * 4 + 2 * half], d[n * 4 + 2 * half + 1]);
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    linear_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out,
                  const Arguments args) {
  using S = Shape<kWidth>;
  extern __shared__ uint8_t shared[];
  uint8_t* const ring = shared + (-shared_address(shared) & 1023u);
  const uint32_t ring_at = shared_address(ring), full = ring_at + S::kBarriers, empty = full + S::kStages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      init_barrier(full + s * 8, 1);
      init_barrier(empty + s * 8, 8);  // warps that multiply
    }
    init_done();
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) load_tiles<kWidth>(x, args, ring_at, full, empty);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    const uint32_t boxes = ring_at + S::kBoxes + group * S::kBuffers * kBoxBytes;
    int stage = 0;
    uint32_t parity = 0;
    float d[kWidth / 2];
    Angles angles = {};
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
      const Tile tile = tile_at<kWidth>(args, index);
      if (has_rotated<kWidth>(args, tile))
        read_angles(args, tile.row + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4, angles);
      int previous = -1;
#pragma unroll 1
      for (int step = 0; step < args.steps; ++step) {
        wait_barrier(full + stage * 8, parity);
        const uint32_t at = ring_at + stage * S::kStageBytes;
        const uint64_t rows = describe(at + group * kGroupRows * 128), outputs = describe(at + S::kRowBytes);
        begin_products();
        multiply(d, rows, outputs, step);
#pragma unroll
        for (int k = 1; k < kStep / 16; ++k) multiply(d, rows + 2 * k, outputs + 2 * k, 1);
        end_products();
        wait_products<1>();
        if (previous >= 0 && lane == 0) arrive(empty + previous * 8);
        previous = stage;
        if (++stage == S::kStages) stage = 0, parity ^= 1;
      }
      wait_products<0>();
      if (lane == 0) arrive(empty + previous * 8);
      if (args.rounds) round_groups(d);
      if (args.floats)
        store_floats<kWidth>(d, args, tile, group);
      else
        store_rounded<kWidth>(d, out, args, tile, angles, group, boxes);
    }
    wait_stores();
  }
}

template <int kWidth>
cudaError_t run(const void* x, int64_t x_stride, int64_t groups, void* out, Arguments args, cudaStream_t stream) {
  using S = Shape<kWidth>;
  static bool allowed = false;
  cudaError_t error = cudaSuccess;
  if (!allowed) {
    error = cudaFuncSetAttribute(linear_kernel<kWidth>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  CUtensorMap rows, results;
  if ((error = encode(rows, x, args.tokens, groups * args.steps * kStep, x_stride, kRows)) != cudaSuccess) return error;
  results = rows;  // not read where floats are stored
  if (!args.floats && (error = encode(results, out, args.tokens, args.outputs, args.outputs, kGroupRows)) != cudaSuccess)
    return error;
  args.group_tiles = (args.group_outputs + kWidth - 1) / kWidth;
  args.row_tiles = (args.tokens + kRows - 1) / kRows;
  args.tiles = args.row_tiles * args.group_tiles * static_cast<int>(groups);
  const int blocks = args.tiles < device_multiprocessors() ? args.tiles : device_multiprocessors();
  return launch_behind(linear_kernel<kWidth>, blocks, kThreads, S::kSharedBytes, stream, rows, results, args);
}

}  // namespace

// All pointers are of the device; `width` is 128 or 256 outputs a tile. Returns a cudaError_t.
extern "C" int linear_prefill(const void* x, int64_t tokens, int64_t x_stride, const void* weights, int64_t groups,
                              int64_t group_outputs, int64_t depth, void* out, int64_t floats, const void* cos,
                              const void* sin, int64_t head, int64_t rounds, int64_t width, void* stream_pointer) {
  const Arguments args{static_cast<const uint8_t*>(weights),
                       floats ? static_cast<float*>(out) : nullptr,
                       static_cast<const float*>(cos),
                       static_cast<const float*>(sin),
                       static_cast<int>(tokens),
                       static_cast<int>(groups * group_outputs),
                       static_cast<int>(depth / kStep),
                       static_cast<int>(group_outputs),
                       static_cast<int>((group_outputs + kUnit - 1) / kUnit),
                       0,
                       0,
                       0,
                       static_cast<int>(head),
                       static_cast<int>(rounds)};
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  if (width == 128) return run<128>(x, x_stride, groups, out, args, stream);
  return run<256>(x, x_stride, groups, out, args, stream);
}
