// The best of each token's scores, ties to the lower index, on sm_90. See kernels/attention/select_cuda.py.
//
// A block takes one token: a radix select over order-preserving keys finds the last one chosen, then
// every warp writes what its run of entries contributes, in order of entries. Keys stay in shared
// memory where they fit.

#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBins = 2048;
constexpr int kMaxKept = 40960;  // keys in shared memory

struct Arguments {
  const float* scores;  // [tokens, stride]
  int64_t stride;
  const int* visible;       // [tokens]
  const uint32_t* allowed;  // [tokens, words]: a bit for each block of entries; null: all
  int64_t words;
  int block_size, top_k;
  const int *table, *rows;  // block table of the pool, row of each token
  int max_blocks, entries;
  int *indices, *slots;  // [tokens, top_k]
  uint32_t* chosen;      // [tokens, words], when blocks are chosen
  int kept;
};

// Unsigned keys in the order of the scores, at least 1; both zeros are one.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

// Sum over the warps before this one; called by all lanes.
__device__ __forceinline__ int before_warp(const int* by_warp, int warp, int lane) {
  return __reduce_add_sync(~0u, lane < warp ? by_warp[lane] : 0);
}

template <bool kBlocks>
__global__ void __launch_bounds__(kThreads) select_kernel(const Arguments args) {
  extern __shared__ uint32_t keys[];
  __shared__ int bins[kBins];
  __shared__ int by_warp[kWarps], ties_by_warp[kWarps];
  __shared__ int found_bin, found_room, found_count;
  const int64_t token = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  let_next_begin();

  const int seen = args.visible[token];
  const int size = args.block_size;
  const int count = kBlocks ? (seen + size - 1) / size : seen;
  const float* const scores = args.scores + token * args.stride;
  const int* const blocks = kBlocks ? nullptr : args.table + static_cast<int64_t>(args.rows[token]) * args.max_blocks;
  int* const indices = kBlocks ? nullptr : args.indices + token * args.top_k;
  int* const slots = kBlocks ? nullptr : args.slots + token * args.top_k;
  uint32_t* const chosen = kBlocks ? args.chosen + token * args.words : nullptr;
  const uint32_t* const allowed = args.allowed ? args.allowed + token * args.words : nullptr;
  auto put = [&](int at, int index) {
    indices[at] = index;
    const int block = index < 0 ? -1 : blocks[index / args.entries];
    slots[at] = block < 0 ? -1 : block * args.entries + index % args.entries;
  };
  if (count <= args.top_k) {  // all of them
    if (kBlocks) {
      for (int word = threadIdx.x; word < (count + 31) / 32; word += kThreads) chosen[word] = ~0u;
    } else {
      for (int at = threadIdx.x; at < args.top_k; at += kThreads) put(at, at < count ? at : -1);
    }
    return;
  }

  auto compute = [&](int i) -> uint32_t {
    if (kBlocks) {
      if (i == count - 1) return ~0u;  // of the newest entry
      float best = -INFINITY;
      for (int at = i * size; at < min(seen, (i + 1) * size); ++at) best = fmaxf(best, scores[at]);
      return key_of(best);
    }
    if (allowed && !(allowed[i / size / 32] >> (i / size % 32) & 1u)) return 0u;
    return key_of(scores[i]);
  };
  const bool keeps = count <= args.kept;
  if (keeps) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) keys[i] = compute(i);
  }
  auto key_at = [&](int i) { return keeps ? keys[i] : compute(i); };

  uint32_t prefix = 0, mask = 0, last = 0;  // chosen for sure: keys > last
  int room = args.top_k;                    // of keys == last, so many more
  for (int shift = 21; ; shift = shift == 21 ? 10 : 0) {
    const uint32_t bin_mask = shift ? kBins - 1 : 1023u;
    bins[threadIdx.x] = bins[threadIdx.x + kThreads] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t key = key_at(i);
      if ((key & mask) == prefix) atomicAdd(&bins[key >> shift & bin_mask], 1);
    }
    __syncthreads();
    const int top = kBins - 1 - 2 * threadIdx.x;
    const int first = bins[top], second = bins[top - 1];
    int sum = first + second;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) by_warp[warp] = sum;
    __syncthreads();
    const int before = sum - first - second + before_warp(by_warp, warp, lane);
    if (before < room && room <= before + first + second) {
      const bool in_first = room <= before + first;
      found_bin = in_first ? top : top - 1;
      found_room = in_first ? room - before : room - before - first;
      found_count = in_first ? first : second;
    }
    __syncthreads();
    room = found_room;
    prefix |= static_cast<uint32_t>(found_bin) << shift;
    mask |= bin_mask << shift;
    if (shift == 0) {
      last = prefix;
      break;
    }
    if (found_count == room) {  // the whole bin: no key is tied
      last = prefix ? prefix - 1 : 0;
      room = 0;
      break;
    }
  }
  if (last == 0) room = 0;  // what is not allowed

  const int run = (count + kThreads - 1) / kThreads * 32;
  const int begin = min(count, warp * run), end = min(count, begin + run);
  int above = 0, ties = 0;
  for (int start = begin; start < end; start += 32) {
    const uint32_t key = start + lane < end ? key_at(start + lane) : 0u;
    above += __popc(__ballot_sync(~0u, key > last));
    ties += __popc(__ballot_sync(~0u, key == last && start + lane < end));
  }
  __syncthreads();
  if (lane == 0) by_warp[warp] = above, ties_by_warp[warp] = ties;
  __syncthreads();
  above = before_warp(by_warp, warp, lane);
  ties = before_warp(ties_by_warp, warp, lane);
  const unsigned earlier = (1u << lane) - 1;
  for (int start = begin; start < end; start += 32) {
    const int index = start + lane;
    const uint32_t key = index < end ? key_at(index) : 0u;
    const unsigned sure = __ballot_sync(~0u, key > last);
    const unsigned tied = __ballot_sync(~0u, key == last && index < end);
    const int ties_before = ties + __popc(tied & earlier);
    const bool mine = key > last || (key == last && index < end && ties_before < room);
    if (kBlocks) {
      const unsigned bits = __ballot_sync(~0u, mine);
      if (lane == 0) chosen[start / 32] = bits;
    } else if (mine) {
      put(above + __popc(sure & earlier) + min(ties_before, room), index);
    }
    above += __popc(sure);
    ties += __popc(tied);
  }
  if (!kBlocks) {  // fewer are allowed than wanted
    const int total = room + before_warp(by_warp, kWarps, lane);
    for (int at = total + threadIdx.x; at < args.top_k; at += kThreads) put(at, -1);
  }
}

template <bool kBlocks>
cudaError_t run(Arguments arguments, int tokens, int64_t most, cudaStream_t stream) {
  static bool allowed = false;
  if (!allowed) {
    const cudaError_t error = cudaFuncSetAttribute(select_kernel<kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   kMaxKept * static_cast<int>(sizeof(uint32_t)));
    if (error != cudaSuccess) return error;
    allowed = true;
  }
  arguments.kept = most < kMaxKept ? static_cast<int>(most) : kMaxKept;
  return launch_behind(select_kernel<kBlocks>, tokens, kThreads, arguments.kept * static_cast<int>(sizeof(uint32_t)),
                       stream, arguments);
}

}  // namespace

// All pointers are of the device. Both return a cudaError_t.
extern "C" int top_k_decode(const void* scores, int64_t tokens, int64_t stride, const void* visible,
                            const void* allowed, int64_t words, int64_t block_size, int64_t top_k,
                            const void* table, int64_t max_blocks, int64_t entries, const void* rows,
                            void* indices, void* slots, void* stream_pointer) {
  Arguments arguments{};
  arguments.scores = static_cast<const float*>(scores);
  arguments.stride = stride;
  arguments.visible = static_cast<const int*>(visible);
  arguments.allowed = static_cast<const uint32_t*>(allowed);
  arguments.words = words;
  arguments.block_size = static_cast<int>(block_size);
  arguments.top_k = static_cast<int>(top_k);
  arguments.table = static_cast<const int*>(table);
  arguments.max_blocks = static_cast<int>(max_blocks);
  arguments.entries = static_cast<int>(entries);
  arguments.rows = static_cast<const int*>(rows);
  arguments.indices = static_cast<int*>(indices);
  arguments.slots = static_cast<int*>(slots);
  return run<false>(arguments, static_cast<int>(tokens), stride, static_cast<cudaStream_t>(stream_pointer));
}

extern "C" int candidate_blocks_decode(const void* scores, int64_t tokens, int64_t stride, const void* visible,
                                       int64_t block_size, int64_t num_blocks, int64_t words, void* chosen,
                                       void* stream_pointer) {
  Arguments arguments{};
  arguments.scores = static_cast<const float*>(scores);
  arguments.stride = stride;
  arguments.visible = static_cast<const int*>(visible);
  arguments.words = words;
  arguments.block_size = static_cast<int>(block_size);
  arguments.top_k = static_cast<int>(num_blocks);
  arguments.chosen = static_cast<uint32_t*>(chosen);
  return run<true>(arguments, static_cast<int>(tokens), (stride + block_size - 1) / block_size,
                   static_cast<cudaStream_t>(stream_pointer));
}
