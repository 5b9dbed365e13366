// Linears of bfloat16 inputs as they are on sm_90, with bfloat16 or FP8 weights. See
// kernels/quant/linear_bf16_cuda.py.
//
// Weights are M (64 outputs a warpgroup), rows are N. A loading warpgroup brings tiles of 64 outputs
// by 64 positions by bulk copies and the rows by small ones; the others multiply. Tiles of bfloat16 lie
// in memory as wgmma reads them, codes as its registers want them: they are unpacked, times their scales,
// which is exact. The sum over a slice of K is one chain in the tensor core, slices are added in
// order, and both follow from the shape of the weights alone: the bits of a row are its own.

#include "bf16.cuh"
#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kOut = 64;            // outputs of a unit
constexpr int kStep = 64;           // positions of K of a stage
constexpr int kTileBytes = kOut * kStep * 2;
constexpr int kCodesBytes = kOut * kStep + 128;  // and four scales, in whole lines
constexpr int kLoaders = 128, kLoadWarps = kLoaders / 32;  // a warp has a run of stages of the ring
constexpr int kMaxShared = 225 * 1024;
constexpr int kMaxStages = 16;

template <int kRows, int kUnits, bool kFp8>
struct Shape {
  static constexpr int kPart = kRows < 128 ? kRows : 128;  // rows of one product
  static constexpr int kParts = kRows / kPart;
  static constexpr int kRowBytes = kRows * kStep * 2;
  static constexpr int kTile = kFp8 ? kCodesBytes : kTileBytes;
  static constexpr int kStageBytes = (kUnits * kTile + kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kFitting = kMaxShared / kStageBytes;
  static constexpr int kStages = (kFitting < kMaxStages ? kFitting : kMaxStages) / kLoadWarps * kLoadWarps;
  static_assert(kStages > 0, "rows take all shared memory");
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kStages * 8;
  static constexpr int kThreads = kLoaders * (kUnits + 1);
};

struct Arguments {
  const __nv_bfloat16* x;  // [tokens, groups · depth], `stride` apart
  const uint8_t* packed;   // [units, steps, bytes of a tile]
  void* outputs;           // one slice: [tokens, width]; else float [slices, tokens, width]
  int64_t stride;
  int tokens, units, group_units, outputs_of_group, width, steps, slices, passes;
  float factor;            // of results behind a first rounding, or 1
  int is_float;            // results, which are not rounded then
};

struct Item {
  int unit, slice, pass, first, last;
};

template <int kUnits>
__device__ __forceinline__ Item item_at(const Arguments& args, int index) {
  Item item;
  item.pass = index % args.passes;
  item.slice = index / args.passes % args.slices;
  item.unit = index / args.passes / args.slices * kUnits;
  item.first = args.steps * item.slice / args.slices;
  item.last = args.steps * (item.slice + 1) / args.slices;
  return item;
}

#define SUMS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
// d = 64 outputs times kN rows, 16 positions, added to d or not.
template <int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 8][4], uint64_t weights, uint64_t rows, int adds);
template <>
__device__ __forceinline__ void multiply<8>(float (&d)[1][4], uint64_t weights, uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3"
      "}, %4, %5, p, 1, 1, 0, 0;\n}\n"
      : SUMS(d[0])
      : "l"(weights), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<16>(float (&d)[2][4], uint64_t weights, uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, p, 1, 1, 0, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1])
      : "l"(weights), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<32>(float (&d)[4][4], uint64_t weights, uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, 0, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3])
      : "l"(weights), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<64>(float (&d)[8][4], uint64_t weights, uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3]), SUMS(d[4]), SUMS(d[5]), SUMS(d[6]), SUMS(d[7])
      : "l"(weights), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<128>(float (&d)[16][4], uint64_t weights, uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3]), SUMS(d[4]), SUMS(d[5]), SUMS(d[6]), SUMS(d[7]),
        SUMS(d[8]), SUMS(d[9]), SUMS(d[10]), SUMS(d[11]), SUMS(d[12]), SUMS(d[13]), SUMS(d[14]), SUMS(d[15])
      : "l"(weights), "l"(rows), "r"(adds));
}
// The same, weights in registers.
template <int kN>
__device__ __forceinline__ void multiply(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t rows, int adds);
template <>
__device__ __forceinline__ void multiply<8>(float (&d)[1][4], const uint32_t (&a)[4], uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n}\n"
      : SUMS(d[0])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<16>(float (&d)[2][4], const uint32_t (&a)[4], uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<32>(float (&d)[4][4], const uint32_t (&a)[4], uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<64>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3]), SUMS(d[4]), SUMS(d[5]), SUMS(d[6]), SUMS(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds));
}
template <>
__device__ __forceinline__ void multiply<128>(float (&d)[16][4], const uint32_t (&a)[4], uint64_t rows, int adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      : SUMS(d[0]), SUMS(d[1]), SUMS(d[2]), SUMS(d[3]), SUMS(d[4]), SUMS(d[5]), SUMS(d[6]), SUMS(d[7]),
        SUMS(d[8]), SUMS(d[9]), SUMS(d[10]), SUMS(d[11]), SUMS(d[12]), SUMS(d[13]), SUMS(d[14]), SUMS(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(adds));
}
#undef SUMS

// Of rows of 128 bytes at `address`, eight rows after another, swizzled over 128 bytes.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// All stages of all items, in turn by the loading warps. A warp fills its run of stages, waits until the rows
// have come, and tells the products of them with one fence for all: a fence for each step, there or
// here, takes longer than the step. Weights do not wait for the kernel before.
template <int kRows, int kUnits, bool kFp8>
__device__ __forceinline__ void load_items(const Arguments& args, uint32_t ring, uint32_t full, uint32_t empty,
                                           int begin, int end) {
  using S = Shape<kRows, kUnits, kFp8>;
  constexpr int kRun = S::kStages / kLoadWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto load_weights = [&](const Item& item, int step, int stage) {
    if (lane != 0) return;
    const uint32_t barrier = full + stage * 8, to = ring + stage * S::kStageBytes + S::kRowBytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(kUnits * S::kTile)
                 : "memory");
    for (int u = 0; u < kUnits; ++u)
      bulk_copy(to + u * S::kTile, args.packed + (static_cast<int64_t>(item.unit + u) * args.steps + step) * S::kTile,
                S::kTile, barrier);
  };
  auto tell = [&](int stages) {  // of this warp's run
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane != 0) return;
    for (int i = 0; i < stages; ++i)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(full + (warp * kRun + i) * 8) : "memory");
  };
  int count = 0;  // of steps so far
  for (int index = begin; index < end && count < S::kStages; ++index) {
    const Item item = item_at<kUnits>(args, index);
    for (int step = item.first; step < item.last && count < S::kStages; ++step, ++count)
      if (count / kRun == warp) load_weights(item, step, count);
  }
  wait_for_previous();
  int stage = 0, round = 0, filled = 0;
  for (int index = begin; index < end; ++index) {
    const Item item = item_at<kUnits>(args, index);
    const __nv_bfloat16* const from =
        args.x + static_cast<int64_t>(item.unit / args.group_units) * args.steps * kStep;
    for (int step = item.first; step < item.last; ++step) {
      if (stage / kRun == warp) {
        if (round) {
          wait_barrier(empty + stage * 8, (round - 1) & 1);
          load_weights(item, step, stage);
        }
        const uint32_t to = ring + stage * S::kStageBytes;
        for (int piece = lane; piece < kRows * 8; piece += 32) {
          const int row = piece / 8, at = piece % 8, token = item.pass * kRows + row;
          const int here = token < args.tokens ? 16 : 0;  // missing rows are zeros
          const __nv_bfloat16* const source =
              from + (here ? static_cast<int64_t>(token) * args.stride : 0) + step * kStep + at * 8;
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * 128 + ((at ^ (row & 7)) * 16)),
                       "l"(source), "r"(here)
                       : "memory");
        }
        if (++filled == kRun) {
          tell(kRun);
          filled = 0;
        }
      }
      if (++stage == S::kStages) stage = 0, ++round;
    }
  }
  if (filled) tell(filled);
}

// A lane has outputs g and g + 8 of its warp's sixteen, rows 2q and 2q + 1 of every eight.
template <typename T, int kParts, int kPart>
__device__ __forceinline__ void store(const Arguments& args, T* to, int token, bool upper, bool lower,
                                      const float (&sum)[kParts][kPart / 8][4]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n, token += 8, to += 8 * static_cast<int64_t>(args.width)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (token + i % 2 >= args.tokens || !(i / 2 ? lower : upper)) continue;
        T* const at = to + i % 2 * args.width + i / 2 * 8;
        const float value = sum[part][n][i];
        if constexpr (sizeof(T) == 4)
          *at = value;
        else
          *at = __float2bfloat16_rn(args.factor == 1.f ? value : round_bf16(value) * args.factor);
      }
    }
}

// A warp's sixteen outputs of a tile of codes: registers of four products, 16 positions each.
struct Unpacked {
  uint32_t a[kStep / 16][4];

  __device__ __forceinline__ void from(const uint8_t* tile, int warp, int lane) {
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(tile + kOut * kStep) >> (warp / 2 * 16);
#pragma unroll
    for (int group = 0; group < 2; ++group) {  // of 32 positions
      const uint4 words = *reinterpret_cast<const uint4*>(tile + ((group * 4 + warp) * 32 + lane) * 16);
      const uint32_t byte = scales >> (8 * group) & 255u;
      const uint32_t factor = (byte + 120u) * 0x00800080u;  // 2^120 times the scale, twice
      const uint32_t codes[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t* const to = a[group * 2 + i / 2] + i % 2 * 2;
        bf16::unpack_fp8(codes[i], to[0], to[1]);
        to[0] = bf16::multiply(to[0], factor);
        to[1] = bf16::multiply(to[1], factor);
      }
    }
  }
};

template <int kRows, int kUnits, bool kFp8>
__global__ void __launch_bounds__(Shape<kRows, kUnits, kFp8>::kThreads, 1) linear_kernel(const Arguments args) {
  using S = Shape<kRows, kUnits, kFp8>;
  extern __shared__ uint8_t shared[];
  uint8_t* const ring = shared + (-shared_address(shared) & 1023u);
  const uint32_t full = shared_address(ring + S::kStages * S::kStageBytes), empty = full + S::kStages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + s * 8), "n"(2));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + s * 8), "n"(kUnits));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  const int items = args.units / kUnits * args.slices * args.passes;
  const int begin = static_cast<int>(static_cast<int64_t>(items) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(items) * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x < kLoaders) {
    if (kUnits == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    load_items<kRows, kUnits, kFp8>(args, shared_address(ring), full, empty, begin, end);
    return;
  }
  if (kUnits == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  wait_for_previous();  // which may still read what this one writes
  const int own = threadIdx.x / kLoaders - 1;
  const bool frees = threadIdx.x % kLoaders == 0;
  int stage = 0, before = 0;
  uint32_t parity = 0;
  for (int index = begin; index < end; ++index) {
    const Item item = item_at<kUnits>(args, index);
    float sum[S::kParts][S::kPart / 8][4];
    auto begin_step = [&] { wait_barrier(full + stage * 8, parity); };
    auto end_step = [&] {
      before = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    };
    auto free_stage = [&](int which) {
      if (frees) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + which * 8) : "memory");
    };
    if constexpr (kFp8) {
      auto issue = [&](const Unpacked& weights, uint64_t b, bool adds) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k)
#pragma unroll
          for (int part = 0; part < S::kParts; ++part)
            multiply<S::kPart>(sum[part], weights.a[k], b + 2 * k + part * (S::kPart * 128 / 16), adds || k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      };
      const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 1
      for (int step = item.first; step < item.last; step += 2) {  // two are under way at once
        Unpacked first, second;
        const uint8_t* at = ring + stage * S::kStageBytes;
        begin_step();
        first.from(at + S::kRowBytes + own * S::kTile, warp, lane);
        issue(first, describe(shared_address(at)), step > item.first);
        end_step();
        const int freed = before;
        const bool both = step + 1 < item.last;
        if (both) {
          at = ring + stage * S::kStageBytes;
          begin_step();
          second.from(at + S::kRowBytes + own * S::kTile, warp, lane);
          issue(second, describe(shared_address(at)), true);
          end_step();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        free_stage(freed);
        if (both) free_stage(before);
      }
    } else {
      for (int step = item.first; step < item.last; ++step) {
        begin_step();
        const uint32_t rows = shared_address(ring) + stage * S::kStageBytes;
        const uint64_t b = describe(rows), a = describe(rows + S::kRowBytes + own * kTileBytes);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k)
#pragma unroll
          for (int part = 0; part < S::kParts; ++part)
            multiply<S::kPart>(sum[part], a + 2 * k, b + 2 * k + part * (S::kPart * 128 / 16), step > item.first || k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (step > item.first) {  // one step stays in flight
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          free_stage(before);
        }
        end_step();
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      free_stage(before);
    }
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
#pragma unroll
      for (int n = 0; n < S::kPart / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[part][n][i])::"memory");
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, unit = item.unit + own;
    const int output = unit % args.group_units * kOut + warp * 16 + lane / 4;  // of its group
    const int token = item.pass * kRows + 2 * (lane % 4);
    const int64_t at = static_cast<int64_t>(token) * args.width +
                       static_cast<int64_t>(unit / args.group_units) * args.outputs_of_group + output;
    const bool upper = output < args.outputs_of_group, lower = output + 8 < args.outputs_of_group;
    if (args.slices > 1 || args.is_float)
      store<float, S::kParts, S::kPart>(args,
                                        static_cast<float*>(args.outputs) + at +
                                            (args.slices > 1 ? static_cast<int64_t>(item.slice) * args.tokens * args.width : 0),
                                        token, upper, lower, sum);
    else
      store<__nv_bfloat16, S::kParts, S::kPart>(args, static_cast<__nv_bfloat16*>(args.outputs) + at, token, upper,
                                                lower, sum);
  }
}

// Adds the slices in order.
__global__ void __launch_bounds__(256) add_slices_kernel(const Arguments args, const float* parts, void* out) {
  wait_for_previous();
  let_next_begin();
  const int64_t count = static_cast<int64_t>(args.tokens) * args.width;
  for (int64_t at = blockIdx.x * 256 + threadIdx.x; at < count; at += static_cast<int64_t>(gridDim.x) * 256) {
    float sum = parts[at];
    for (int slice = 1; slice < args.slices; ++slice) sum += parts[slice * count + at];
    if (args.is_float)
      static_cast<float*>(out)[at] = sum;
    else
      static_cast<__nv_bfloat16*>(out)[at] =
          __float2bfloat16_rn(args.factor == 1.f ? sum : round_bf16(sum) * args.factor);
  }
}

template <int kRows, int kUnits, bool kFp8>
cudaError_t run(Arguments arguments, void* partial, void* out, cudaStream_t stream) {
  using S = Shape<kRows, kUnits, kFp8>;
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(linear_kernel<kRows, kUnits, kFp8>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  arguments.passes = (arguments.tokens + kRows - 1) / kRows;
  arguments.outputs = arguments.slices == 1 ? out : partial;
  const int items = arguments.units / kUnits * arguments.slices * arguments.passes;
  const int blocks = items < device_multiprocessors() ? items : device_multiprocessors();
  const cudaError_t error =
      launch_behind(linear_kernel<kRows, kUnits, kFp8>, blocks, S::kThreads, S::kSharedBytes, stream, arguments);
  if (error != cudaSuccess || arguments.slices == 1) return error;
  const int64_t adders = (static_cast<int64_t>(arguments.tokens) * arguments.width + 255) / 256;
  return launch_behind(add_slices_kernel, static_cast<int>(adders < 528 ? adders : 528), 256, 0, stream, arguments,
                       static_cast<const float*>(partial), out);
}

template <int kUnits, bool kFp8>
cudaError_t run_rows(const Arguments& arguments, void* partial, void* out, cudaStream_t stream) {
  if (arguments.tokens <= 8) return run<8, kUnits, kFp8>(arguments, partial, out, stream);
  if (arguments.tokens <= 16) return run<16, kUnits, kFp8>(arguments, partial, out, stream);
  if (arguments.tokens <= 32) return run<32, kUnits, kFp8>(arguments, partial, out, stream);
  if (arguments.tokens <= 64) return run<64, kUnits, kFp8>(arguments, partial, out, stream);
  if (arguments.tokens <= 128) return run<128, kUnits, kFp8>(arguments, partial, out, stream);
  return run<256, kUnits, kFp8>(arguments, partial, out, stream);
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int linear_bf16(const void* x, int64_t stride, int64_t tokens, const void* packed, int64_t groups,
                           int64_t outputs, int64_t depth, int64_t slices, int64_t is_fp8, float factor,
                           int64_t is_float, void* partial, void* out, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const int group_units = static_cast<int>((outputs + kOut - 1) / kOut);
  const Arguments arguments{static_cast<const __nv_bfloat16*>(x),
                            static_cast<const uint8_t*>(packed),
                            nullptr,
                            stride,
                            static_cast<int>(tokens),
                            static_cast<int>(groups) * group_units,
                            group_units,
                            static_cast<int>(outputs),
                            static_cast<int>(groups * outputs),
                            static_cast<int>(depth / kStep),
                            static_cast<int>(slices),
                            0,
                            factor,
                            static_cast<int>(is_float)};
  // Two units share the rows of an item where there are enough of them.
  const bool two = group_units % 2 == 0 && arguments.units * slices >= 4 * device_multiprocessors();
  if (is_fp8)
    return two ? run_rows<2, true>(arguments, partial, out, stream) : run_rows<1, true>(arguments, partial, out, stream);
  return two ? run_rows<2, false>(arguments, partial, out, stream) : run_rows<1, false>(arguments, partial, out, stream);
}
