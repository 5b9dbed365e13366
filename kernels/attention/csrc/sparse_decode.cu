// Multi-query attention over packed rows on sm_90. See kernels/attention/sparse_cuda.py.
//
// A block takes one token and kHeads of its heads, which are the narrow operand (N) of every product:
// rows come from memory into fragments without passing shared memory, and the bits of a head do not
// depend on how many share a block. First all scores (a warp has 16 window rows and 64 compressed
// ones; rows are M), then one softmax over all rows, then the values (a warp has 64 channels, which
// are M), for which the rows come again, from the L2. Nothing is split over K, so there is no
// second pass. Rows that are missing are read as row 0 and weigh nothing.

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
constexpr float kLog2e = 1.4426950408889634f;

struct Arguments {
  const __nv_bfloat16* queries;  // [tokens, heads, 512]
  const uint8_t* window;         // [*, 528]
  const int* window_slots;       // [tokens, window_width], negative: none
  const uint8_t* compressed;     // [*, 288]
  const int* compressed_slots;   // [tokens, compressed_width]
  const float* sinks;            // [heads]
  const float *cos, *sin;        // [tokens, 32], or null: do not rotate back
  __nv_bfloat16* out;            // [tokens, heads, 512]
  int heads, window_width, compressed_width, turns;  // turns: queries come unrotated
  float scale;  // of scores as powers of two
};

template <int kHeads>
struct Shared {
  static constexpr int kTiles = kHeads / 8;
  static constexpr int kStages = kHeads >= 64 ? 16 : kHeads >= 32 ? 20 : 24;  // of 24 in all
  union {
    uint2 queries[kChannels / 16 * kTiles * 32];  // [step of K][tile][lane]
    uint2 weights[kRows / 16 * kTiles * 32];      // [unit][tile][lane]
  };
  uint4 ring[kWarps][kStages][2][32];  // what a lane copies it reads itself
  uint32_t offsets[kRows];             // of rows in their pool, in 16 bytes
  uint32_t here[kRows / 32];           // bits: rows that are not missing
  float by_warp[kWarps][kHeads];
  float most[kHeads], inverse[kHeads];
};

template <typename T>
__device__ __forceinline__ T read(const uint8_t* lane_base, uint32_t offset) {
  return __ldg(reinterpret_cast<const T*>(lane_base + static_cast<uint64_t>(offset) * 16));
}
__device__ __forceinline__ void copy_16(void* to, const uint8_t* lane_base, uint32_t offset) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(lane_base + static_cast<uint64_t>(offset) * 16)
               : "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four pairs of channels rotated and rounded, as store_rows.cu does it.
__device__ __forceinline__ void turn(uint4& pairs, const float* cos, const float* sin) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(&pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c = cos[i], s = sin[i], a = bf16::low(words[i]), b = bf16::high(words[i]);
    words[i] = bf16::pair(__fadd_rn(__fmul_rn(a, c), -__fmul_rn(b, s)), __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
  }
}

// Two steps of K: words of rows g and g + 8, four pairs of channels each.
template <int kTiles, int kCount>
__device__ __forceinline__ void multiply_rows(const uint32_t (&low)[kCount][4], const uint32_t (&high)[kCount][4],
                                              const uint2* queries, float (*score)[kTiles][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step)  // the same sum again only after all others
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint2 b = queries[(step * kTiles + n) * 32];
#pragma unroll
      for (int unit = 0; unit < kCount; ++unit)
        bf16::mma(score[unit][n], low[unit][2 * step], high[unit][2 * step], low[unit][2 * step + 1],
                  high[unit][2 * step + 1], b.x, b.y);
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Rows g and g + 8 of a warp's units, a lane's 16 bytes of each, stage by stage: 8 stages of 64
// channels of the window unit, then for each pair of compressed units 8 of 128 channels of one unit.
template <int kHeads>
struct Rows {
  static constexpr int kStages = Shared<kHeads>::kStages;
  Shared<kHeads>& shared;
  const uint8_t *window, *compressed;  // of this lane
  int warp, lane, units;

  __device__ __forceinline__ const uint8_t* source(int stage) const {
    return stage < 8 ? window + 128 * (stage / 2) + 16 * (stage % 2) + 32 * (lane % 4)
                     : compressed + 64 * (stage % 8 / 2) + 16 * (lane % 4);
  }
  __device__ __forceinline__ int unit_of(int stage) const {
    return warp * (kUnits - 1) + (stage - 8) / 8 * 2 + stage % 2;
  }
  __device__ __forceinline__ void put(int stage, uint32_t first, uint32_t second) {
    uint4* const to = &shared.ring[warp][stage % kStages][0][lane];
    copy_16(to, source(stage), first);
    copy_16(to + 32, source(stage), second);
  }
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  __device__ __forceinline__ void begin() {
    uint32_t offset[kUnits][2];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t* const from = shared.offsets + (u ? kWindow + (warp * (kUnits - 1) + u - 1) * 16 : warp * 16);
      offset[u][0] = from[lane / 4];
      offset[u][1] = from[lane / 4 + 8];
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int u = stage < 8 ? 0 : 1 + (stage - 8) / 8 * 2 + stage % 2;
      if (stage < 8 || unit_of(stage) / 2 * 2 < units) put(stage, offset[u][0], offset[u][1]);
      commit();
    }
  }
  __device__ __forceinline__ void copy(int stage) {  // one that `begin` left
    if (stage < 24 && unit_of(stage) / 2 * 2 < units) {
      const uint32_t* const from = shared.offsets + kWindow + unit_of(stage) * 16 + lane / 4;
      put(stage, from[0], from[8]);
    }
    commit();
  }
  __device__ __forceinline__ uint4 at(int stage, int row) const {
    return shared.ring[warp][stage % kStages][row][lane];
  }
};

// Scores of 16 window rows. A lane has of its rows g and g + 8 channels 128 j + 32 q + 0…31.
template <int kHeads, int kTiles>
__device__ __forceinline__ void score_window(Rows<kHeads>& rows, const uint32_t (&scales)[2], const uint2* queries,
                                             float (*score)[kTiles][4]) {
#pragma unroll 1
  for (int half = 0; half < 8; ++half) {  // 64 channels over all lanes
    wait_copies<Rows<kHeads>::kStages - 1>();
    const uint4 now[2] = {rows.at(half, 0), rows.at(half, 1)};
    rows.copy(half + Rows<kHeads>::kStages);
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
      multiply_rows<kTiles, 1>(pairs[0], pairs[1], queries + (half * 2 + two) * 2 * kTiles * 32, score);
    }
  }
}

// Scores of two units of 16 compressed rows.
template <int kHeads, int kTiles>
__device__ __forceinline__ void score_compressed(Rows<kHeads>& rows, int first_stage, const uint2 (&scales)[2][2],
                                                 const uint2* queries, float (*score)[kTiles][4]) {
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {  // 128 channels over all lanes
    const int stage = first_stage + 2 * j;
    uint4 now[2][2];
    uint32_t factor[2][2][2];
    wait_copies<Rows<kHeads>::kStages - 2>();
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        now[unit][row] = rows.at(stage + unit, row);
        const uint32_t bytes = j & 2 ? scales[unit][row].y : scales[unit][row].x;
        factor[unit][row][0] = bf16::factor_fp4_e4m3(bf16::splat_byte(bytes, 2 * (j & 1)));
        factor[unit][row][1] = bf16::factor_fp4_e4m3(bf16::splat_byte(bytes, 2 * (j & 1) + 1));
      }
      rows.copy(stage + unit + Rows<kHeads>::kStages);
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
      multiply_rows<kTiles, 2>(pairs[0], pairs[1], queries + (j * 4 + word) * 2 * kTiles * 32, score);
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

// Addresses of a lane's codes and scales in row 0 of a pool.
struct Lane {
  const uint8_t *codes, *scales;
};
__device__ __forceinline__ void read_unit(const Lane& from, const uint32_t* offsets, WindowUnit& to) {
  const uint2 low = *reinterpret_cast<const uint2*>(offsets), high = *reinterpret_cast<const uint2*>(offsets + 8);
  const uint32_t rows[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to.codes[i] = read<uint2>(from.codes, rows[i]);
    to.scales[i] = read<uint32_t>(from.scales, rows[i]);
  }
}
__device__ __forceinline__ void read_unit(const Lane& from, const uint32_t* offsets, CompressedUnit& to) {
  const uint2 low = *reinterpret_cast<const uint2*>(offsets), high = *reinterpret_cast<const uint2*>(offsets + 8);
  const uint32_t rows[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to.codes[i] = read<uint32_t>(from.codes, rows[i]);
    to.scales[i] = read<uint32_t>(from.scales, rows[i]);
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

template <int kAhead, typename Unit>
__device__ __forceinline__ void read_first(const Lane& from, const uint32_t* offsets, int count, Unit (&next)[kAhead]) {
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (u < count) read_unit(from, offsets + u * 16, next[u]);
}

// Adds weights times values of `count` units; `next` holds the first ones, and meanwhile those ahead.
template <int kTiles, int kAhead, typename Unit>
__device__ __forceinline__ void add_values(const Lane& from, const uint32_t* offsets, int count, int warp, int lane,
                                           const uint2* weights, Unit (&next)[kAhead], float (&sum)[4][kTiles][4]) {
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = first + u;
      if (at >= count) break;
      uint32_t even[2][4], odd[2][4];
      unpack_unit(next[u], warp, lane / 4, even, odd);
      if (at + kAhead < count) read_unit(from, offsets + (at + kAhead) * 16, next[u]);
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
__global__ void __launch_bounds__(kWarps * 32, 1) attention_kernel(const Arguments args) {
  constexpr int kTiles = kHeads / 8;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared<kHeads>& shared = *reinterpret_cast<Shared<kHeads>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int parts = args.heads / kHeads;
  const int64_t token = blockIdx.x / parts;
  const int first_head = blockIdx.x % parts * kHeads;
  wait_for_previous();
  let_next_begin();

  for (int start = 32 * warp; start < kRows; start += kWarps * 32) {
    const int i = start + lane;
    int slot = -1;
    if (i < kWindow) {
      if (i < args.window_width) slot = args.window_slots[token * args.window_width + i];
    } else if (i - kWindow < args.compressed_width) {
      slot = args.compressed_slots[token * args.compressed_width + i - kWindow];
    }
    shared.offsets[i] = max(slot, 0) * ((i < kWindow ? kWindowBytes : kCompressedBytes) / 16);
    const unsigned bits = __ballot_sync(~0u, slot >= 0);
    if (lane == 0) shared.here[start / 32] = bits;
  }
  for (int task = warp; task < kTiles * 4; task += kWarps) {
    const int n = task / 4, j = task % 4;
    const uint4* const from = reinterpret_cast<const uint4*>(
        args.queries + ((token * args.heads + first_head + n * 8 + g) * kChannels + 128 * j + 32 * q));
    uint4 some[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) some[i] = from[i];
    if (args.turns && 128 * j + 32 * q >= kChannels - kRotated) {
      const int64_t at = token * (kRotated / 2) + (128 * j + 32 * q - (kChannels - kRotated)) / 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) turn(some[i], args.cos + at + 4 * i, args.sin + at + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint2* const to = shared.queries + ((j * 4 + i) * 2 * kTiles + n) * 32 + lane;
      to[0] = make_uint2(some[i].x, some[i].y);
      to[kTiles * 32] = make_uint2(some[i].z, some[i].w);
    }
  }
  __syncthreads();

  const int window_units = min(kWindowUnits, (args.window_width + 15) / 16);
  const int compressed_units = min(kCompressedUnits, (args.compressed_width + 15) / 16);
  Rows<kHeads> rows{shared, args.window, args.compressed, warp, lane, compressed_units};
  rows.begin();
  float score[kUnits][kTiles][4] = {};
  {
    const uint32_t* const offsets = shared.offsets + warp * 16 + g;
    const uint8_t* const from = args.window + kChannels + 4 * q;
    const uint32_t scales[2] = {read<uint32_t>(from, offsets[0]), read<uint32_t>(from, offsets[8])};
    score_window<kHeads>(rows, scales, shared.queries + lane, score);
  }
#pragma unroll
  for (int two = 0; two < kUnits / 2; ++two) {
    const int unit = warp * (kUnits - 1) + 2 * two;
    if (unit >= compressed_units) break;
    const uint32_t* const offsets = shared.offsets + kWindow + unit * 16 + g;
    const uint8_t* const from = args.compressed + kChannels / 2 + 8 * q;
    const uint2 scales[2][2] = {{read<uint2>(from, offsets[0]), read<uint2>(from, offsets[8])},
                                {read<uint2>(from, offsets[16]), read<uint2>(from, offsets[24])}};
    score_compressed<kHeads>(rows, 8 + 8 * two, scales, shared.queries + lane, score + 1 + 2 * two);
  }
  wait_copies<0>();

  constexpr int kAhead = kTiles >= 8 ? 2 : kTiles >= 4 ? 4 : 8;
  const Lane near{args.window + 64 * warp + 8 * g, args.window + kChannels + 4 * (2 * (warp % 2) + g / 4)};
  const Lane far{args.compressed + 32 * warp + 4 * g,
                 args.compressed + kChannels / 2 + 8 * (2 * (warp % 2) + g / 4) + 4 * (warp / 4)};
  const uint32_t* const near_offsets = shared.offsets + 2 * q;
  const uint32_t* const far_offsets = shared.offsets + kWindow + 2 * q;
  WindowUnit near_units[kAhead];
  CompressedUnit far_units[kAhead];
  if (kTiles <= 2) read_first(near, near_offsets, window_units, near_units);

  // Softmax of a head over the rows of all warps, with powers of two.
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int row = u ? kWindow + (warp * (kUnits - 1) + u - 1) * 16 : warp * 16;
    const unsigned bits = shared.here[row / 32] >> row % 32 & 0xFFFFu;
    if (bits == 0xFFFFu) continue;
    const bool here[2] = {(bits >> g & 1) != 0, (bits >> (g + 8) & 1) != 0};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!here[i / 2]) score[u][n][i] = -INFINITY;
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
    float most = args.sinks[first_head + threadIdx.x] * kLog2e;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.by_warp[w][threadIdx.x] * args.scale);
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
        score[u][n][i] = power_of_two(fmaf(score[u][n][i], args.scale, -most[i % 2]));
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
    float total = power_of_two(args.sinks[first_head + threadIdx.x] * kLog2e - shared.most[threadIdx.x]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.by_warp[w][threadIdx.x];
    shared.inverse[threadIdx.x] = bf16::kPutBack / total;
  }

  if (kTiles > 2) read_first(near, near_offsets, window_units, near_units);
  read_first(far, far_offsets, compressed_units, far_units);
  float sum[4][kTiles][4] = {};
  add_values<kTiles>(near, near_offsets, window_units, warp, lane, shared.weights, near_units, sum);
  add_values<kTiles>(far, far_offsets, compressed_units, warp, lane, shared.weights + kWindowUnits * kTiles * 32,
                     far_units, sum);
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
                             const void* cos, const void* sin, int64_t turns, float scale, int64_t block_heads,
                             void* out, void* stream_pointer) {
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
                            static_cast<int>(turns),
                            scale * bf16::kPutBack * kLog2e};
  const int count = static_cast<int>(tokens);
  if (block_heads == 8) return run<8>(arguments, count, stream);
  if (block_heads == 16) return run<16>(arguments, count, stream);
  if (block_heads == 32) return run<32>(arguments, count, stream);
  return run<64>(arguments, count, stream);
}
