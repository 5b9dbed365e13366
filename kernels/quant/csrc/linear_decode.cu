// FP8 linears with scales of 32 x 32 blocks for few rows, on sm_90: as in the experts' kernel the
// weights stream once and rows are the narrow operand. See kernels/quant/linear_cuda.py for layouts.
//
// A unit is 64 outputs times a slice of K, for a pass of up to 64 rows. Four warps share a unit, each
// with a range of the slice. Slices and ranges depend on the shape of the weights alone, and partial
// sums are added in their order: the bits of a row do not depend on how many rows there are.

#include "fp8_linear.cuh"

using namespace fp8_linear;

namespace {

constexpr int kWarps = 8;
constexpr int kUnitWarps = 4;
constexpr int kTeams = kWarps / kUnitWarps;
constexpr int kPartStride = 68;
constexpr int kPartFloats = 8 * kPartStride;

template <int kTiles>
struct Shape {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kStages = kTiles >= 8 ? 2 : kTiles >= 4 ? 3 : kTiles >= 2 ? 4 : 5;
  static constexpr int kStageBytes = kChunkBytes + kRows * kChunkPositions * 2;
  static constexpr int kSharedBytes = kWarps * (kStages * kStageBytes + kPartFloats * 4 + kStages * 8);
};

struct Arguments {
  const uint8_t* packed;    // [units, steps, 4224]
  const __half* inputs;     // [passes, groups · steps, rows, 64], see `element`
  const float* input_unit;  // [tokens]
  void* outputs;            // one slice: bfloat16 [tokens, width]; else float [slices, tokens, width]
  int tokens, units, group_units, steps, total_steps, slices, passes;
};

template <int kTiles>
__global__ void __launch_bounds__(kWarps * 32, 1) linear_kernel(const Arguments args) {
  using S = Shape<kTiles>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / kUnitWarps, member = warp % kUnitWarps;
  const int g = lane / 4, q = lane % 4;
  const int near = q * 16 + (g & 1) * 64;  // the exchange of `element`
  uint8_t* const ring = shared + warp * S::kStages * S::kStageBytes;
  float* const parts = reinterpret_cast<float*>(shared + kWarps * S::kStages * S::kStageBytes) +
                       team * kUnitWarps * kPartFloats;
  uint64_t* const barriers =
      reinterpret_cast<uint64_t*>(shared + kWarps * (S::kStages * S::kStageBytes + kPartFloats * 4)) +
      warp * S::kStages;
  if (lane == 0) {
    for (int s = 0; s < S::kStages; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + s)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  let_next_begin();

  // Items are (unit, slice, pass), passes innermost: their weights are in the L2 then.
  const int items = args.units * args.slices * args.passes;
  const int teams = gridDim.x * kTeams, me = blockIdx.x * kTeams + team;
  const int begin = static_cast<int>(static_cast<int64_t>(items) * me / teams);
  const int end = static_cast<int>(static_cast<int64_t>(items) * (me + 1) / teams);
  if (begin == end) {
    wait_for_previous();
    return;
  }

  struct Range {
    int unit, slice, pass, first, last;
  };
  auto range = [&](int item) {
    Range r;
    r.pass = item % args.passes;
    r.slice = item / args.passes % args.slices;
    r.unit = item / args.passes / args.slices;
    const int low = args.steps * r.slice / args.slices, high = args.steps * (r.slice + 1) / args.slices;
    r.first = low + (high - low) * member / kUnitWarps;
    r.last = low + (high - low) * (member + 1) / kUnitWarps;
    return r;
  };

  int load_item = begin, load_step = 0, load_stage = 0;
  Range source = range(begin);
  const uint8_t* from = nullptr;
  const __half* from_rows = nullptr;
  uint32_t row_bytes = 0;
  auto open = [&] {  // the next item with steps of this warp
    while (source.first == source.last && ++load_item < end) source = range(load_item);
    if (load_item >= end) return;
    load_step = source.first;
    from = args.packed + (static_cast<int64_t>(source.unit) * args.steps + source.first) * kChunkBytes;
    from_rows = args.inputs + (static_cast<int64_t>(source.pass) * args.total_steps +
                               source.unit / args.group_units * args.steps + source.first) *
                                  (S::kRows * kChunkPositions);
    row_bytes = min(S::kRows, args.tokens - source.pass * S::kRows) * kChunkPositions * 2;
  };
  auto copy_rows = [&](int stage, const __half* rows, uint32_t bytes) {
    bulk_copy(shared_address(ring + stage * S::kStageBytes) + kChunkBytes, rows, bytes,
              shared_address(barriers + stage));
  };
  auto load = [&](bool with_rows) {
    if (load_item >= end) return;
    if (lane == 0) {
      const uint32_t barrier = shared_address(barriers + load_stage);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(kChunkBytes + row_bytes)
                   : "memory");
      bulk_copy(shared_address(ring + load_stage * S::kStageBytes), from, kChunkBytes, barrier);
      if (with_rows) copy_rows(load_stage, from_rows, row_bytes);
    }
    from += kChunkBytes;
    from_rows += S::kRows * kChunkPositions;
    load_stage = load_stage + 1 == S::kStages ? 0 : load_stage + 1;
    if (++load_step == source.last) {
      if (++load_item < end) {
        source = range(load_item);
        open();
      }
    }
  };

  open();
  {  // weights do not wait for the rows, which the previous kernel makes
    const __half* late_rows[S::kStages];
    uint32_t late_bytes[S::kStages];
#pragma unroll
    for (int s = 0; s < S::kStages; ++s) {
      late_rows[s] = from_rows;
      late_bytes[s] = load_item < end ? row_bytes : 0;
      load(false);
    }
    wait_for_previous();
#pragma unroll
    for (int s = 0; s < S::kStages; ++s)
      if (lane == 0 && late_bytes[s]) copy_rows(s, late_rows[s], late_bytes[s]);
  }

  int stage_at = 0;
  uint32_t parity = 0;
  for (int item = begin; item < end; ++item) {
    const Range sink = range(item);
    float sum[kTiles][4][4] = {};
    for (int step = sink.first; step < sink.last; ++step) {
      uint8_t* const stage = ring + stage_at * S::kStageBytes;
      wait_barrier(shared_address(barriers + stage_at), parity);
      const uint32_t scales = *reinterpret_cast<const uint32_t*>(stage + 4096);
      const uint4* const codes = reinterpret_cast<const uint4*>(stage) + lane;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        uint4 b[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          b[n] = *reinterpret_cast<const uint4*>(stage + kChunkBytes + (n * 8 + g) * (kChunkPositions * 2) +
                                                 (near ^ (group * 64)));
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          const uint4 words = codes[(tile * 2 + group) * 32];
          uint32_t a[4], c[4];
          unpack(words.x, a[0], a[1]);
          unpack(words.y, a[2], a[3]);
          unpack(words.z, c[0], c[1]);
          unpack(words.w, c[2], c[3]);
          // bytes: outputs 0-31 of positions 0-31, 32-63; outputs 32-63 of both
          const uint32_t byte = scales >> (8 * (tile / 2 * 2 + group)) & 255u;
          const float scale = __uint_as_float(byte << 23);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const float zero[4] = {0.f, 0.f, 0.f, 0.f};
            float part[4];
            mma(part, a, b[n].x, b[n].y, zero);
            mma(part, c, b[n].z, b[n].w, part);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[n][tile][i] = fmaf(scale, part[i], sum[n][tile][i]);
          }
        }
      }
      __syncwarp();  // all lanes have read the stage
      load(true);
      if (++stage_at == S::kStages) stage_at = 0, parity ^= 1;
    }
    float* const my_part = parts + member * kPartFloats;
    const int width = args.units * kOut;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int first_row = sink.pass * S::kRows + n * 8;
      if (first_row >= args.tokens) break;
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float* const to = my_part + 2 * q * kPartStride + tile * 16 + g;
        to[0] = sum[n][tile][0];
        to[kPartStride] = sum[n][tile][1];
        to[8] = sum[n][tile][2];
        to[kPartStride + 8] = sum[n][tile][3];
      }
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kUnitWarps * 32) : "memory");
      for (int row = member; row < 8 && first_row + row < args.tokens; row += kUnitWarps) {
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int w = 0; w < kUnitWarps; ++w) {
          low += parts[w * kPartFloats + row * kPartStride + lane];
          high += parts[w * kPartFloats + row * kPartStride + lane + 32];
        }
        const int token = first_row + row;
        const int64_t at = static_cast<int64_t>(token) * width + sink.unit * kOut + lane;
        if (args.slices == 1) {
          const float unit = args.input_unit[token] * 256.0f;
          __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(args.outputs) + at;
          out[0] = __float2bfloat16_rn(low * unit);
          out[32] = __float2bfloat16_rn(high * unit);
        } else {
          float* const out = static_cast<float*>(args.outputs) +
                             static_cast<int64_t>(sink.slice) * args.tokens * width + at;
          out[0] = low;
          out[32] = high;
        }
      }
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kUnitWarps * 32) : "memory");
    }
  }
}

template <int kTiles>
cudaError_t run(const void* x, int depth, Arguments arguments, void* inputs, void* input_unit,
                void* partial, void* out, cudaStream_t stream) {
  using S = Shape<kTiles>;
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(
        linear_kernel<kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  cudaError_t error = cudaSuccess;
  if (x)
    error = launch_behind(prepare_kernel<S::kRows, false>, arguments.tokens, kPrepareThreads, 0, stream,
                          static_cast<const __nv_bfloat16*>(x), depth, static_cast<__half*>(inputs),
                          static_cast<float*>(input_unit));
  if (error != cudaSuccess) return error;
  arguments.passes = (arguments.tokens + S::kRows - 1) / S::kRows;
  arguments.outputs = arguments.slices == 1 ? out : partial;
  error = launch_behind(linear_kernel<kTiles>, device_multiprocessors(), kWarps * 32,
                                          S::kSharedBytes, stream, arguments);
  if (error != cudaSuccess || arguments.slices == 1 || !out) return error;  // parts are the result
  return launch_behind(add_slices_kernel, 2 * device_multiprocessors(), 256, 0, stream,
                       static_cast<const float4*>(partial), static_cast<const float*>(input_unit),
                       arguments.slices, arguments.tokens, arguments.units * kOut,
                       static_cast<uint2*>(out));
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int linear_decode(const void* x, int64_t tokens, const void* packed, int64_t groups,
                             int64_t group_outputs, int64_t depth, int64_t slices, void* inputs,
                             void* input_unit, void* partial, void* out, void* stream_pointer) {
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
  if (tokens <= 8) return run<1>(x, row, arguments, inputs, input_unit, partial, out, stream);
  if (tokens <= 16) return run<2>(x, row, arguments, inputs, input_unit, partial, out, stream);
  if (tokens <= 32) return run<4>(x, row, arguments, inputs, input_unit, partial, out, stream);
  return run<8>(x, row, arguments, inputs, input_unit, partial, out, stream);
}
