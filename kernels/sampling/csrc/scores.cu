// Log-probabilities and ranks of given ids on sm_90, a block a row. Contract: kernels/sampling/scores_cuda.py.

#include "hopper.cuh"
#include "logprobs.cuh"

namespace {

using namespace sampling;

constexpr int kWarps = kThreads / 32;

struct Scores {  // of rows of logits
  const float* logits;
  int64_t stride, num_ids, num_top;
  const int32_t* ids;
  float* logprobs;
  int32_t *ranks, *top_ids;
  float* top_logprobs;
};

struct Own {  // of the row, beside `Shared`
  uint32_t is_bad, largest, rank;
};

__global__ void __launch_bounds__(kThreads, 2) scores_kernel(const Scores a) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  Own& own = *reinterpret_cast<Own*>(memory + sizeof(Shared));
  const int64_t r = blockIdx.x, units = (a.num_ids + kUnit - 1) / kUnit;
  uint32_t* const most = reinterpret_cast<uint32_t*>(memory + sizeof(Shared) + sizeof(Own));
  float* const sums = reinterpret_cast<float*>(most + units);
  const int lane = threadIdx.x % 32;
  Row row{};
  row.x = a.logits + r * a.stride, row.n = a.num_ids;
  const int64_t id = a.ids[r];
  if (threadIdx.x == 0) own.is_bad = own.largest = own.rank = 0;
  __syncthreads();

  const uint64_t key = order_key(row.x[id], id);
  uint32_t size = 0, before = 0;
  float next[kGroup];
  load_group(row, threadIdx.x / 32 * kUnit + lane * kGroup, next);
  for (int64_t unit = threadIdx.x / 32; unit < units; unit += kWarps) {
    const int64_t first = unit * kUnit + lane * kGroup;
    float v[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = next[j];
    load_group(row, first + kWarps * kUnit, next);
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (first + j >= row.n) continue;
      size = max(size, each::bits_of(v[j]) << 1);
      best = max(best, ordered(v[j]));
      before += order_key(v[j], first + j) > key;
    }
    best = __reduce_max_sync(~0u, best);
    if (lane == 0) most[unit] = best, atomicMax(&own.largest, best);
  }
  if (size >= 0xff000000u) own.is_bad = 1;
  if (before) atomicAdd(&own.rank, before);
  __syncthreads();

  const int num_top = static_cast<int>(a.num_top);
  if (own.is_bad) {  // the request ends when it samples; until then these are numbers
    if (threadIdx.x == 0) a.logprobs[r] = 0.0f, a.ranks[r] = 1;
    if (static_cast<int>(threadIdx.x) < num_top)
      a.top_ids[r * num_top + threadIdx.x] = threadIdx.x, a.top_logprobs[r * num_top + threadIdx.x] = 0.0f;
    return;
  }
  const Scan scan{unordered(own.largest), most, sums};
  sum_exponentials<kThreads>(row, scan.best, sums, 0, 1);
  const double norm = log_sum(s, row, scan);
  const auto logprob = [&](int64_t at) { return static_cast<float>(static_cast<double>(row.x[at]) - norm); };
  if (threadIdx.x == 0) a.logprobs[r] = logprob(id), a.ranks[r] = static_cast<int32_t>(own.rank + 1);
  if (num_top > 0)
    best_ids(s, row, scan, num_top, [&](int place, int32_t at) {
      a.top_ids[r * num_top + place] = at, a.top_logprobs[r * num_top + place] = logprob(at);
    });
}

}  // namespace

// All pointers are of the device. Returns a cudaError_t.
extern "C" int token_scores(const void* logits, int64_t stride, int64_t rows, int64_t num_ids, const void* ids,
                            int64_t num_top, void* logprobs, void* ranks, void* top_ids, void* top_logprobs,
                            void* stream_pointer) {
  const Scores scores{static_cast<const float*>(logits),  stride,
                      num_ids,                            num_top,
                      static_cast<const int32_t*>(ids),   static_cast<float*>(logprobs),
                      static_cast<int32_t*>(ranks),       static_cast<int32_t*>(top_ids),
                      static_cast<float*>(top_logprobs)};
  const int64_t units = (num_ids + kUnit - 1) / kUnit, sums = (num_ids + kSummed - 1) / kSummed;
  const int bytes = static_cast<int>(sizeof(Shared) + sizeof(Own) + 4 * (units + sums));
  const int set = cudaFuncSetAttribute(scores_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (set != cudaSuccess) return set;
  scores_kernel<<<rows, kThreads, bytes, static_cast<cudaStream_t>(stream_pointer)>>>(scores);
  return cudaGetLastError();
}
