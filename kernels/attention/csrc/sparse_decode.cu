// Multi-query attention over packed rows on sm_90. See kernels/attention/sparse_cuda.py.
//
// A block takes one token and kHeads of its heads, which are the narrow operand (N) of every product:
// rows come from memory into fragments without passing shared memory, and the bits of a head do not
// depend on how many share a block. First all scores (a warp has 16 window rows and 64 compressed
// ones; rows are M), then one softmax over all rows, then the values (a warp has 64 channels, which
// are M), for which the rows come again, from the L2. Nothing is split over K, so there is no
// second pass.

#include "bf16.cuh"
#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kWarps = 8;
constexpr int kChannels = 512;
constexpr int kWindow = 128, kCompressed = 512, kRows = kWindow + kCompressed;
constexpr int kWindowUnits = kWindow / 16, kCompressedUnits = kCompressed / 16;
constexpr int kUnits = 1 + kCompressedUnits / kWarps;  // of 16 rows, of a warp
constexpr int kWindowBytes = kChannels + kChannels / 32;
constexpr int kCompressedBytes = kChannels / 2 + kChannels / 16;
constexpr int kRotated = 64;  // channels at the end

struct Arguments {
  const __nv_bfloat16* queries;  // [tokens, heads, 512]
  const uint8_t* window;         // [*, 528]
  const int* window_slots;       // [tokens, window_width], negative: none
  const uint8_t* compressed;     // [*, 288]
  const int* compressed_slots;   // [tokens, compressed_width]
  const float* sinks;            // [heads]
  const float *cos, *sin;        // [tokens, 32], or null: do not rotate back
  __nv_bfloat16* out;            // [tokens, heads, 512]
  int heads, window_width, compressed_width;
  float scale;
};

template <int kHeads>
struct Shared {
  static constexpr int kTiles = kHeads / 8;
  union {
    uint4 queries[kChannels / 8 / 4 * kTiles * 32];  // [two steps of K][tile][lane]
    uint2 weights[kRows / 16 * kTiles * 32];         // [unit][tile][lane]
  };
  int slots[kRows];
  float by_warp[kWarps][kHeads];
  float most[kHeads], inverse[kHeads];
};

__device__ __forceinline__ uint4 read_16(const uint8_t* row, int at) {
  uint4 none{};
  return row ? __ldg(reinterpret_cast<const uint4*>(row + at)) : none;
}
__device__ __forceinline__ uint2 read_8(const uint8_t* row, int at) {
  uint2 none{};
  return row ? __ldg(reinterpret_cast<const uint2*>(row + at)) : none;
}
__device__ __forceinline__ uint32_t read_4(const uint8_t* row, int at) {
  return row ? __ldg(reinterpret_cast<const uint32_t*>(row + at)) : 0u;
}
__device__ __forceinline__ const uint8_t* row_at(const uint8_t* pool, int slot, int bytes) {
  return slot < 0 ? nullptr : pool + static_cast<int64_t>(slot) * bytes;
}

// Two steps of K: words of rows g and g + 8, four pairs of channels each.
template <int kTiles, int kCount>
__device__ __forceinline__ void multiply_rows(const uint32_t (&low)[kCount][4], const uint32_t (&high)[kCount][4],
                                              const uint4* queries, float (*score)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const uint4 b = queries[n * 32];
#pragma unroll
    for (int unit = 0; unit < kCount; ++unit)
      bf16::mma(score[unit][n], low[unit][0], high[unit][0], low[unit][1], high[unit][1], b.x, b.y);
#pragma unroll
    for (int unit = 0; unit < kCount; ++unit)
      bf16::mma(score[unit][n], low[unit][2], high[unit][2], low[unit][3], high[unit][3], b.z, b.w);
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Scores of 16 window rows. A lane has of its rows g and g + 8 channels 128 j + 32 q + 0…31.
template <int kTiles>
__device__ __forceinline__ void score_window(const uint8_t* const (&rows)[2], int q, const uint4* queries,
                                             float (*score)[kTiles][4]) {
  const uint32_t scales[2] = {read_4(rows[0], kChannels + 4 * q), read_4(rows[1], kChannels + 4 * q)};
  uint4 next[2] = {read_16(rows[0], 32 * q), read_16(rows[1], 32 * q)};
#pragma unroll 1
  for (int half = 0; half < 8; ++half) {  // 64 channels over all lanes
    const uint4 now[2] = {next[0], next[1]};
    if (half < 7) {
      const int at = 128 * ((half + 1) / 2) + 32 * q + 16 * ((half + 1) % 2);
      next[0] = read_16(rows[0], at);
      next[1] = read_16(rows[1], at);
    }
    const uint32_t factor[2] = {bf16::factor_fp8_ue8m0(bf16::splat_byte(scales[0], half / 2)),
                                bf16::factor_fp8_ue8m0(bf16::splat_byte(scales[1], half / 2))};
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      uint32_t pairs[2][1][4];
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t even, odd;
          bf16::unpack_fp8(word_of(now[row], 2 * two + step), even, odd);
          pairs[row][0][2 * step] = bf16::multiply(even, factor[row]);
          pairs[row][0][2 * step + 1] = bf16::multiply(odd, factor[row]);
        }
      multiply_rows<kTiles, 1>(pairs[0], pairs[1], queries + (half * 2 + two) * kTiles * 32, score);
    }
  }
}

// Scores of two units of 16 compressed rows.
template <int kTiles>
__device__ __forceinline__ void score_compressed(const uint8_t* const (&rows)[2][2], int q, const uint4* queries,
                                                 float (*score)[kTiles][4]) {
  uint2 scales[2][2];
  uint4 next[2][2];
#pragma unroll
  for (int unit = 0; unit < 2; ++unit)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      scales[unit][row] = read_8(rows[unit][row], kChannels / 2 + 8 * q);
      next[unit][row] = read_16(rows[unit][row], 16 * q);
    }
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {  // 128 channels over all lanes
    uint4 now[2][2];
    uint32_t factor[2][2][2];
#pragma unroll
    for (int unit = 0; unit < 2; ++unit)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        now[unit][row] = next[unit][row];
        if (j < 3) next[unit][row] = read_16(rows[unit][row], 64 * (j + 1) + 16 * q);
        const uint32_t bytes = j & 2 ? scales[unit][row].y : scales[unit][row].x;
        factor[unit][row][0] = bf16::factor_fp4_e4m3(bf16::splat_byte(bytes, 2 * (j & 1)));
        factor[unit][row][1] = bf16::factor_fp4_e4m3(bf16::splat_byte(bytes, 2 * (j & 1) + 1));
      }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t pairs[2][2][4];  // row, unit
#pragma unroll
      for (int unit = 0; unit < 2; ++unit)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          bf16::unpack_fp4(word_of(now[unit][row], word), pairs[row][unit]);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            pairs[row][unit][i] = bf16::multiply(pairs[row][unit][i], factor[unit][row][word / 2]);
        }
      multiply_rows<kTiles, 2>(pairs[0], pairs[1], queries + (j * 4 + word) * kTiles * 32, score);
    }
  }
}

// What a lane needs of a unit for the values: of rows 2q, 2q + 1, 2q + 8, 2q + 9 eight channels each.
struct WindowUnit {
  uint2 codes[4];
  uint32_t scales[4];
};
struct CompressedUnit {
  uint32_t codes[4];
  uint32_t scales[4];
};

__device__ __forceinline__ void read_unit(const uint8_t* pool, const int* slots, int warp, int g, WindowUnit& to) {
  const int scales_at = kChannels + 4 * (2 * (warp % 2) + g / 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8_t* const row = row_at(pool, slots[i % 2 + i / 2 * 8], kWindowBytes);
    to.codes[i] = read_8(row, 64 * warp + 8 * g);
    to.scales[i] = read_4(row, scales_at);
  }
}
__device__ __forceinline__ void read_unit(const uint8_t* pool, const int* slots, int warp, int g,
                                          CompressedUnit& to) {
  const int scales_at = kChannels / 2 + 8 * (2 * (warp % 2) + g / 4) + 4 * (warp / 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8_t* const row = row_at(pool, slots[i % 2 + i / 2 * 8], kCompressedBytes);
    to.codes[i] = read_4(row, 32 * warp + 4 * g);
    to.scales[i] = read_4(row, scales_at);
  }
}

// Values of a unit: even[p][i] is channel 2i of eight, odd channel 2i + 1, both of the rows of pair p.
__device__ __forceinline__ void unpack_unit(const WindowUnit& unit, int warp, int, uint32_t (&even)[2][4],
                                            uint32_t (&odd)[2][4]) {
  const uint32_t pick = (warp / 2) * 0x0101u + 0x0400u;  // that byte of either row into bytes 0 and 2
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t both = __byte_perm(unit.scales[2 * p], unit.scales[2 * p + 1], pick) & 0x00FF00FFu;
    const uint32_t factor = bf16::factor_fp8_ue8m0(both);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t first = half ? unit.codes[2 * p].y : unit.codes[2 * p].x;
      const uint32_t second = half ? unit.codes[2 * p + 1].y : unit.codes[2 * p + 1].x;
      uint32_t* const e = even[p] + 2 * half;
      uint32_t* const o = odd[p] + 2 * half;
      bf16::unpack_fp8(__byte_perm(first, second, 0x5410), e[0], e[1]);
      bf16::unpack_fp8(__byte_perm(first, second, 0x7632), o[0], o[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      even[p][i] = bf16::multiply(even[p][i], factor);
      odd[p][i] = bf16::multiply(odd[p][i], factor);
    }
  }
}
__device__ __forceinline__ void unpack_unit(const CompressedUnit& unit, int warp, int g, uint32_t (&even)[2][4],
                                            uint32_t (&odd)[2][4]) {
  const uint32_t pick = (2 * (warp / 2 % 2) + g / 2 % 2) * 0x0101u + 0x0400u;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t both = __byte_perm(unit.scales[2 * p], unit.scales[2 * p + 1], pick) & 0x00FF00FFu;
    const uint32_t factor = bf16::factor_fp4_e4m3(both);
    bf16::unpack_fp4(__byte_perm(unit.codes[2 * p], unit.codes[2 * p + 1], 0x5410), even[p]);
    bf16::unpack_fp4(__byte_perm(unit.codes[2 * p], unit.codes[2 * p + 1], 0x7632), odd[p]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      even[p][i] = bf16::multiply(even[p][i], factor);
      odd[p][i] = bf16::multiply(odd[p][i], factor);
    }
  }
}

// Adds weights times values of `count` units; rows of the next ones are on their way meanwhile.
template <int kTiles, int kAhead, typename Unit>
__device__ __forceinline__ void add_values(const uint8_t* pool, const int* slots, int count, int warp, int lane,
                                           const uint2* weights, float (&sum)[4][kTiles][4]) {
  const int g = lane / 4, q = lane % 4;
  Unit next[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (u < count) read_unit(pool, slots + u * 16 + 2 * q, warp, g, next[u]);
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = first + u;
      if (at >= count) break;
      uint32_t even[2][4], odd[2][4];
      unpack_unit(next[u], warp, g, even, odd);
      if (at + kAhead < count) read_unit(pool, slots + (at + kAhead) * 16 + 2 * q, warp, g, next[u]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint2 b = weights[(at * kTiles + n) * 32 + lane];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          bf16::mma(sum[i][n], even[0][i], odd[0][i], even[1][i], odd[1][i], b.x, b.y);
      }
    }
  }
}

__device__ __forceinline__ float over_rows(float x) {  // lanes of one q
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}
__device__ __forceinline__ float most_of_rows(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

template <int kHeads>
__global__ void __launch_bounds__(kWarps * 32, kHeads >= 64 ? 1 : 2) attention_kernel(const Arguments args) {
  constexpr int kTiles = kHeads / 8;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared<kHeads>& shared = *reinterpret_cast<Shared<kHeads>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int parts = args.heads / kHeads;
  const int64_t token = blockIdx.x / parts;
  const int first_head = blockIdx.x % parts * kHeads;
  wait_for_previous();
  let_next_begin();

  for (int i = threadIdx.x; i < kRows; i += kWarps * 32) {
    int slot = -1;
    if (i < kWindow) {
      if (i < args.window_width) slot = args.window_slots[token * args.window_width + i];
    } else if (i - kWindow < args.compressed_width) {
      slot = args.compressed_slots[token * args.compressed_width + i - kWindow];
    }
    shared.slots[i] = slot;
  }
  for (int task = warp; task < kTiles * 4; task += kWarps) {
    const int n = task / 4, j = task % 4;
    const uint4* const from = reinterpret_cast<const uint4*>(
        args.queries + ((token * args.heads + first_head + n * 8 + g) * kChannels + 128 * j + 32 * q));
    uint4 some[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) some[i] = from[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.queries[((j * 4 + i) * kTiles + n) * 32 + lane] = some[i];
  }
  __syncthreads();

  const int compressed_units = min(kCompressedUnits, (args.compressed_width + 15) / 16);
  float score[kUnits][kTiles][4] = {};
  {
    const int* const slots = shared.slots + warp * 16 + g;
    const uint8_t* const rows[2] = {row_at(args.window, slots[0], kWindowBytes),
                                    row_at(args.window, slots[8], kWindowBytes)};
    score_window<kTiles>(rows, q, shared.queries + lane, score);
  }
#pragma unroll
  for (int two = 0; two < kUnits / 2; ++two) {
    const int unit = warp * (kUnits - 1) + 2 * two;
    if (unit >= compressed_units) break;
    const int* const slots = shared.slots + kWindow + unit * 16 + g;
    const uint8_t* const rows[2][2] = {{row_at(args.compressed, slots[0], kCompressedBytes),
                                        row_at(args.compressed, slots[8], kCompressedBytes)},
                                       {row_at(args.compressed, slots[16], kCompressedBytes),
                                        row_at(args.compressed, slots[24], kCompressedBytes)}};
    score_compressed<kTiles>(rows, q, shared.queries + lane, score + 1 + 2 * two);
  }

  // Softmax of a head over the rows of all warps.
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int* const slots = shared.slots + (u ? kWindow + (warp * (kUnits - 1) + u - 1) * 16 : warp * 16) + g;
    const bool here[2] = {slots[0] >= 0, slots[8] >= 0};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        score[u][n][i] = here[i / 2] ? score[u][n][i] * args.scale : -INFINITY;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float most = -INFINITY;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) most = fmaxf(most, fmaxf(score[u][n][head], score[u][n][head + 2]));
      most = most_of_rows(most);
      if (g == 0) shared.by_warp[warp][n * 8 + 2 * q + head] = most;
    }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float most = args.sinks[first_head + threadIdx.x];
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.by_warp[w][threadIdx.x]);
    shared.most[threadIdx.x] = most;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float most[2] = {shared.most[n * 8 + 2 * q], shared.most[n * 8 + 2 * q + 1]};
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[u][n][i] = __expf(score[u][n][i] - most[i % 2]);
        total[i % 2] += score[u][n][i];
      }
      // A lane pair makes pairs of rows: even rows' lanes those of head 2q, odd rows' of 2q + 1.
      const bool odd = g & 1;
      uint32_t rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = score[u][n][2 * half], second = score[u][n][2 * half + 1];
        const float kept = odd ? second : first, sent = odd ? first : second;
        const float got = __shfl_xor_sync(~0u, sent, 4);
        rows[half] = odd ? bf16::pair(got, kept) : bf16::pair(kept, got);
      }
      const int unit = u ? kWindowUnits + warp * (kUnits - 1) + u - 1 : warp;
      shared.weights[(unit * kTiles + n) * 32 + (2 * q + odd) * 4 + g / 2] = make_uint2(rows[0], rows[1]);
    }
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float sum = over_rows(total[head]);
      if (g == 0) shared.by_warp[warp][n * 8 + 2 * q + head] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float total = __expf(args.sinks[first_head + threadIdx.x] - shared.most[threadIdx.x]);
    for (int w = 0; w < kWarps; ++w) total += shared.by_warp[w][threadIdx.x];
    shared.inverse[threadIdx.x] = bf16::kPutBack / total;
  }

  constexpr int kAhead = kTiles >= 8 ? 2 : 4;
  float sum[4][kTiles][4] = {};
  add_values<kTiles, kAhead, WindowUnit>(args.window, shared.slots, min(kWindowUnits, (args.window_width + 15) / 16),
                                         warp, lane, shared.weights, sum);
  add_values<kTiles, kAhead, CompressedUnit>(args.compressed, shared.slots + kWindow, compressed_units, warp, lane,
                                             shared.weights + kWindowUnits * kTiles * 32, sum);
  __syncthreads();

  const int channel = 64 * warp + 8 * g;
  const bool rotates = args.cos && channel >= kChannels - kRotated;
  float4 cos{}, sin{};
  if (rotates) {
    const int64_t at = token * (kRotated / 2) + (channel - (kChannels - kRotated)) / 2;
    cos = *reinterpret_cast<const float4*>(args.cos + at);
    sin = *reinterpret_cast<const float4*>(args.sin + at);
  }
  const float turn[4][2] = {{cos.x, sin.x}, {cos.y, sin.y}, {cos.z, sin.z}, {cos.w, sin.w}};
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const int h = n * 8 + 2 * q + head;
      const float inverse = shared.inverse[h];
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = bf16::pair(sum[i][n][head] * inverse, sum[i][n][2 + head] * inverse);
        if (rotates) {
          const float a = bf16::low(words[i]), b = bf16::high(words[i]);
          words[i] = bf16::pair(a * turn[i][0] + b * turn[i][1], b * turn[i][0] - a * turn[i][1]);
        }
      }
      *reinterpret_cast<uint4*>(args.out + (token * args.heads + first_head + h) * kChannels + channel) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
}

template <int kHeads>
cudaError_t run(const Arguments& arguments, int tokens, cudaStream_t stream) {
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(
        attention_kernel<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<kHeads>));
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  return launch_behind(attention_kernel<kHeads>, tokens * (arguments.heads / kHeads), kWarps * 32,
                       sizeof(Shared<kHeads>), stream, arguments);
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int sparse_decode(const void* queries, int64_t tokens, int64_t heads, const void* window,
                             const void* window_slots, int64_t window_width, const void* compressed,
                             const void* compressed_slots, int64_t compressed_width, const void* sinks,
                             const void* cos, const void* sin, float scale, int64_t block_heads, void* out,
                             void* stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  const Arguments arguments{static_cast<const __nv_bfloat16*>(queries),
                            static_cast<const uint8_t*>(window),
                            static_cast<const int*>(window_slots),
                            static_cast<const uint8_t*>(compressed),
                            static_cast<const int*>(compressed_slots),
                            static_cast<const float*>(sinks),
                            static_cast<const float*>(cos),
                            static_cast<const float*>(sin),
                            static_cast<__nv_bfloat16*>(out),
                            static_cast<int>(heads),
                            static_cast<int>(window_width),
                            static_cast<int>(compressed_width),
                            scale * bf16::kPutBack};
  const int count = static_cast<int>(tokens);
  if (block_heads == 8) return run<8>(arguments, count, stream);
  if (block_heads == 16) return run<16>(arguments, count, stream);
  if (block_heads == 32) return run<32>(arguments, count, stream);
  return run<64>(arguments, count, stream);
}
