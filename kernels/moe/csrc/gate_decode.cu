// Router of the experts on sm_90: logits in slices of K, then the choice. See kernels/moe/gate_cuda.py.
//
// Experts are M (sixteen a block), rows are N. The slices, and within one the warps' blocks of 32
// inputs, follow from the width alone and are added in order, so a row's bits are its own.

#include "bf16.cuh"
#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kWarps = 8;
constexpr int kSlices = 8;
constexpr int kExperts = 16;     // of a block
constexpr int kAhead = 3;        // blocks of 32 inputs that a warp reads at once
constexpr int kChooseWarps = 4;  // a row each

struct Arguments {
  const __nv_bfloat16* x;       // [rows, hidden]
  const __nv_bfloat16* weight;  // [experts, hidden]
  float* parts;                 // [slices, rows, experts]
  const float* bias;            // [experts]
  const int* positions;         // [rows], negative: a row that goes to no expert; or null
  int* ids;                     // [rows, top_k]
  float* shares;                // [rows, top_k]
  int rows, hidden, experts, top_k;
  float scaling, temperature;
};

template <int kTiles>
__global__ void __launch_bounds__(kWarps * 32) logits_kernel(const Arguments args) {
  constexpr int kRows = 8 * kTiles;
  __shared__ float parts[kWarps][kRows][kExperts + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int slice = blockIdx.y, first_row = blockIdx.z * kRows, first_expert = blockIdx.x * kExperts;
  const int blocks = args.hidden / 32;
  const int low = blocks * slice / kSlices, high = blocks * (slice + 1) / kSlices;
  const int begin = low + (high - low) * warp / kWarps, end = low + (high - low) * (warp + 1) / kWarps;
  const __nv_bfloat16* const weight = args.weight + static_cast<int64_t>(first_expert + g) * args.hidden + 8 * q;
  uint4 a[kAhead], b[kAhead];
  auto read_weights = [&](int first) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int at = min(first + ahead, end - 1) * 32;
      a[ahead] = __ldg(reinterpret_cast<const uint4*>(weight + at));
      b[ahead] = __ldg(reinterpret_cast<const uint4*>(weight + 8 * args.hidden + at));
    }
  };
  let_next_begin();
  if (begin < end) read_weights(begin);  // they do not wait for the rows
  wait_for_previous();
  float sum[kTiles][4] = {};
  for (int first = begin; first < end; first += kAhead) {
    uint4 x[kAhead][kTiles];
    if (first != begin) read_weights(first);
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int at = min(first + ahead, end - 1) * 32;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int64_t row = min(first_row + n * 8 + g, args.rows - 1);
        x[ahead][n] = *reinterpret_cast<const uint4*>(args.x + row * args.hidden + at + 8 * q);
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (first + ahead >= end) break;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        bf16::mma(sum[n], a[ahead].x, b[ahead].x, a[ahead].y, b[ahead].y, x[ahead][n].x, x[ahead][n].y);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        bf16::mma(sum[n], a[ahead].z, b[ahead].z, a[ahead].w, b[ahead].w, x[ahead][n].z, x[ahead][n].w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][n * 8 + 2 * q + i % 2][g + i / 2 * 8] = sum[n][i];
  __syncthreads();
  for (int at = threadIdx.x; at < kRows * kExperts; at += kWarps * 32) {
    const int row = at / kExperts, expert = at % kExperts;
    if (first_row + row >= args.rows) break;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += parts[w][row][expert];
    args.parts[(static_cast<int64_t>(slice) * args.rows + first_row + row) * args.experts + first_expert + expert] =
        total;
  }
}

// A warp a row: a lane has every 32nd expert, kOwn in all, of which the last may not be there. Logits are
// the sums of kParts.
template <int kOwn, int kParts>
__global__ void __launch_bounds__(kChooseWarps * 32) choose_kernel(const Arguments args) {
  __shared__ float chosen[kChooseWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * kChooseWarps + warp;
  wait_for_previous();
  let_next_begin();
  if (row >= args.rows) return;
  const bool is_padding = args.positions && args.positions[row] < 0;
  const int own = args.experts / 32;
  float part[kOwn][kParts], affinity[kOwn], choice[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
#pragma unroll
    for (int slice = 0; slice < kParts; ++slice)
      part[i][slice] = args.parts[(static_cast<int64_t>(slice) * args.rows + row) * args.experts +
                                  min(i, own - 1) * 32 + lane];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float logit = 0.f;
#pragma unroll
    for (int slice = 0; slice < kParts; ++slice) logit += part[i][slice];
    logit = __fdiv_rn(logit, args.temperature);
    affinity[i] = sqrtf(log1pf(expf(-fabsf(logit))) + fmaxf(logit, 0.f));
    if (logit != logit) affinity[i] = logit;
    const float wanted = affinity[i] + args.bias[min(i, own - 1) * 32 + lane];
    choice[i] = wanted == wanted ? wanted : 0.f;  // a row that is not finite still needs experts
  }
  uint32_t mine = 0;
  for (int k = 0; k < args.top_k; ++k) {
    float best = -INFINITY;
    int expert = 1 << 30;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i < own && !(mine >> i & 1u) && (choice[i] > best || expert == 1 << 30))
        best = choice[i], expert = i * 32 + lane;
#pragma unroll
    for (int step = 16; step; step /= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int other_expert = __shfl_xor_sync(~0u, expert, step);
      if (other > best || (other == best && other_expert < expert)) best = other, expert = other_expert;
    }
    if (expert % 32 == lane) mine |= 1u << expert / 32;
  }
  int before = 0, at = -1;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const bool is_mine = mine >> i & 1u;
    const unsigned all = __ballot_sync(~0u, is_mine);
    if (is_mine) {
      at = before + __popc(all & ((1u << lane) - 1));
      args.ids[static_cast<int64_t>(row) * args.top_k + at] = is_padding ? -1 : i * 32 + lane;
      chosen[warp][at] = affinity[i];
    }
    before += __popc(all);
  }
  __syncwarp();
  float total = 0.f;  // in ascending order of experts
  for (int k = 0; k < args.top_k; ++k) total += chosen[warp][k];
  if (lane < args.top_k)
    args.shares[static_cast<int64_t>(row) * args.top_k + lane] =
        __fdiv_rn(chosen[warp][lane], total + 1e-20f) * args.scaling;
}

template <int kParts>
cudaError_t choose(const Arguments& arguments, cudaStream_t stream) {
  const int own = arguments.experts / 32, blocks = (arguments.rows + kChooseWarps - 1) / kChooseWarps;
  const auto kernel = own <= 4    ? choose_kernel<4, kParts>
                      : own <= 8  ? choose_kernel<8, kParts>
                      : own <= 12 ? choose_kernel<12, kParts>
                                  : choose_kernel<32, kParts>;
  return launch_behind(kernel, blocks, kChooseWarps * 32, 0, stream, arguments);
}

template <int kTiles>
cudaError_t run(const Arguments& arguments, cudaStream_t stream) {
  const dim3 grid(arguments.experts / kExperts, kSlices, (arguments.rows + 8 * kTiles - 1) / (8 * kTiles));
  const cudaError_t error = launch_behind(logits_kernel<kTiles>, grid, kWarps * 32, 0, stream, arguments);
  return error == cudaSuccess ? choose<kSlices>(arguments, stream) : error;
}

}  // namespace

// All pointers are of the device. Both return a cudaError_t.
extern "C" int gate_decode(const void* x, int64_t rows, int64_t hidden, const void* weight, int64_t experts,
                           const void* bias, int64_t top_k, float scaling, float temperature, const void* positions,
                           void* parts, void* ids, void* shares, void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Arguments arguments{static_cast<const __nv_bfloat16*>(x),
                            static_cast<const __nv_bfloat16*>(weight),
                            static_cast<float*>(parts),
                            static_cast<const float*>(bias),
                            static_cast<const int*>(positions),
                            static_cast<int*>(ids),
                            static_cast<float*>(shares),
                            static_cast<int>(rows),
                            static_cast<int>(hidden),
                            static_cast<int>(experts),
                            static_cast<int>(top_k),
                            scaling,
                            temperature};
  if (rows <= 8) return run<1>(arguments, stream);
  if (rows <= 16) return run<2>(arguments, stream);
  return run<4>(arguments, stream);
}

// Of logits that are there.
extern "C" int gate_choose(const void* logits, int64_t rows, int64_t experts, const void* bias, int64_t top_k,
                           float scaling, float temperature, void* ids, void* shares, void* stream_pointer) {
  Arguments arguments{};
  arguments.parts = static_cast<float*>(const_cast<void*>(logits));
  arguments.bias = static_cast<const float*>(bias);
  arguments.ids = static_cast<int*>(ids);
  arguments.shares = static_cast<float*>(shares);
  arguments.rows = static_cast<int>(rows);
  arguments.experts = static_cast<int>(experts);
  arguments.top_k = static_cast<int>(top_k);
  arguments.scaling = scaling;
  arguments.temperature = temperature;
  return choose<1>(arguments, static_cast<cudaStream_t>(stream_pointer));
}
