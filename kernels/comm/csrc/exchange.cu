// Dispatch and combine by one-sided writes into the windows of the other ranks. See
// kernels/comm/one_sided.py.
//
// A rank writes where its peer will read; nobody ever asks for anything. What is sent goes in lines of
// 128 bytes: 120 of data, and the number of the exchange. Eight neighbouring threads write a line in
// one instruction, and eight read it: over NVLink a line comes as a whole or not at all (which is what
// NCCL's LL128 is built on). So there are no fences, which cost microseconds each, and all waiting is
// for single lines. Within a device that does not hold: a line may become visible by quarters. What a
// rank has for itself goes past its window, and ranks that share a device write a line in two steps and
// read it twice (`is_shared`). Numbers are never reset. Buffers alternate between two sets: a rank
// sends exchange n + 2 after it has seen every other rank send n + 1, which that one does behind its last
// read of exchange n. So nothing is overwritten before it was read, without a barrier. Whoever waits
// gives up after a while, or when told to, and says for whom it waited.
//
// A token lies at the same place on all ranks, so each can be sent, awaited and added up for itself.
// Kernels begin while the one before them ends (griddepcontrol); those that wait for other ranks look
// for lines before that, and are few enough to leave room for what they wait for if ranks share a device.
//
// One source for the device and for a host, where a thread stands for a rank, as in each.cuh.

#include "each.cuh"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#else
#include <sched.h>
#include <time.h>

#include <vector>
#endif

namespace exchange {

constexpr int64_t kLineBytes = 128, kLineWords = 15;  // words of 8 bytes, beside the number

BOTH int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct Group {  // mirrored by kernels/comm/one_sided.py
  int64_t rank, ranks;
  int64_t capacity;  // tokens of a rank and step for which the windows have room
  int64_t hidden, top_k;
  int64_t is_fp8;      // rows travel as e4m3 with a scale for each 32; else as float32
  int64_t slot_bytes;  // of an element on its way back: 4 or 2 (bfloat16)
  int64_t is_fast;     // sums of a rank travel back, not single slots
  int64_t is_shared;   // ranks are on one device
  int64_t patience_ns;
  uint8_t* const* windows;  // [ranks], ours among them
  uint32_t* state;
  uint32_t* status;

  // A token's head says who wants it; it goes to all ranks: ids, weights, which of the token's ranks
  // it goes to, scales.
  BOTH int64_t scale_words() const { return is_fp8 ? (hidden / 32 + 3) / 4 : 0; }  // of 4 bytes
  BOTH int64_t head_words() const { return 2 * top_k + 1 + scale_words(); }        // of 4 bytes
  BOTH int64_t row_words() const { return (is_fp8 ? hidden : 4 * hidden) / 8; }
  BOTH int64_t back_words() const { return hidden * slot_bytes / 8; }
  BOTH static int64_t lines(int64_t words) { return (words + kLineWords - 1) / kLineWords; }
  BOTH int64_t head_lines() const { return lines((head_words() + 1) / 2); }
  BOTH int64_t row_lines() const { return lines(row_words()); }
  BOTH int64_t back_lines() const { return lines(back_words()); }

  // Parts of a window, in this order, each twice.
  BOTH uint64_t heads_bytes() const { return ranks * capacity * head_lines() * kLineBytes; }
  BOTH uint64_t rows_bytes() const { return ranks * capacity * row_lines() * kLineBytes; }
  BOTH uint64_t back_bytes() const { return capacity * top_k * back_lines() * kLineBytes; }
  BOTH uint64_t window_bytes() const { return 2 * (heads_bytes() + rows_bytes() + back_bytes()); }

  // Of a token of `from`, in the window of `at`.
  BOTH uint64_t* head(int64_t at, uint32_t parity, int64_t from, int64_t token) const {
    uint8_t* const base = windows[at] + parity * heads_bytes();
    return reinterpret_cast<uint64_t*>(base + (from * capacity + token) * head_lines() * kLineBytes);
  }
  BOTH uint64_t* row(int64_t at, uint32_t parity, int64_t from, int64_t token) const {
    uint8_t* const base = windows[at] + 2 * heads_bytes() + parity * rows_bytes();
    return reinterpret_cast<uint64_t*>(base + (from * capacity + token) * row_lines() * kLineBytes);
  }
  BOTH uint64_t* back(int64_t at, uint32_t parity, int64_t token, int64_t slot) const {
    uint8_t* const base = windows[at] + 2 * (heads_bytes() + rows_bytes()) + parity * back_bytes();
    return reinterpret_cast<uint64_t*>(base + (token * top_k + slot) * back_lines() * kLineBytes);
  }
};

}  // namespace exchange

namespace {

using namespace each;
using exchange::Group;
using exchange::kLineWords;

constexpr int kMostThreads = 512;
constexpr int kMostBlocks = 264;  // of a kernel: two a multiprocessor of an H200
constexpr int kMostTopK = 32;
constexpr int kWaitRounds = 32, kFirstLook = 15;  // between looks at the clock, and before the first one
constexpr uint64_t kHostLookNs = 1'000'000;       // between looks at what the host says: thousands of warps
                                                  // that read its memory at once would take longer than they wait
enum State { kBegun, kArrived, kFailed, kTag };                     // words of a rank, on its device
enum Status { kStop, kCode, kExchange, kFrom, kToken, kTheirTag };  // words that its host sees
enum Code : uint32_t { kFine, kLate, kStopped, kElsewhere };
constexpr uint32_t kApart = 2;  // in kFailed: nobody else takes part; sums are 0

// ---------------------------------------------------------------- blocks and warps of threads, or one

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
constexpr int kWarpThreads = 256;  // of a block of warps that work each for itself
constexpr int kWarpLines = 4, kWords = 2;  // lines that a warp has at a time; words of a thread
constexpr int kOwn = 16;  // elements of a row that a thread rounds at a time: half a group
#else
#define DEVICE inline
constexpr int kWarpThreads = 1;
constexpr int kWarpLines = 1, kWords = 16;
constexpr int kOwn = 32;
#endif

struct Block {
  int64_t index, count;
  int thread, threads;
  uint8_t* shared;  // of the block

#ifdef __CUDACC__
  __device__ void sync() const { __syncthreads(); }
  __device__ static void sync_warp() { __syncwarp(); }
  __device__ int64_t warp() const { return index * (threads / 32) + thread / 32; }
  __device__ int64_t warps() const { return count * (threads / 32); }
  __device__ int warp_of_block() const { return thread / 32; }
  __device__ int lane() const { return thread % 32; }
  static constexpr int kLanes = 32;
  __device__ int line() const { return thread % 32 / 8; }           // of those that the warp has
  __device__ int first_word() const { return thread % 8 * kWords; }  // of the line
#else
  void sync() const {}
  static void sync_warp() {}
  int64_t warp() const { return index; }
  int64_t warps() const { return count; }
  int warp_of_block() const { return 0; }
  int lane() const { return 0; }
  static constexpr int kLanes = 1;
  int line() const { return 0; }
  int first_word() const { return 0; }
#endif
};

// What a thread has of a line; the last word of the line is the number of its exchange, below a tag.
struct Part {
  uint64_t word[kWords];
};

#ifdef __CUDACC__
DEVICE float group_largest(float most) {
  return fmaxf(most, __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), most, 1));
}
DEVICE bool group_any(bool mine) { return __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), mine, 1) | mine; }
DEVICE bool all_of_warp(bool mine) { return __all_sync(~0u, mine); }
// One instruction of all eight writes or reads a line. Threads of a warp that took different ways before
// (the last of the eight has a word less) need not be together again by themselves.
DEVICE void meet_for_line() { __syncwarp(255u << (threadIdx.x % 32 & ~7)); }
DEVICE void store_line(const Group& group, uint64_t* line, Part part, uint64_t number) {  // by eight neighbours
  const bool is_last = threadIdx.x % 8 == 7;
  if (is_last) part.word[1] = number;
  if (group.is_shared) {
    if (!is_last) *reinterpret_cast<ulonglong2*>(line + threadIdx.x % 8 * 2) = make_ulonglong2(part.word[0], part.word[1]);
    __threadfence();
  }
  meet_for_line();
  if (group.is_shared && !is_last) return;
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line + threadIdx.x % 8 * 2), "l"(part.word[0]),
               "l"(part.word[1])
               : "memory");
}
DEVICE void load_line(const uint64_t* line, Part& part) {
  meet_for_line();
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(part.word[0]), "=l"(part.word[1])
               : "l"(line + threadIdx.x % 8 * 2)
               : "memory");
}
DEVICE uint64_t number_of(const Part& part) { return __shfl_sync(~0u, part.word[1], threadIdx.x % 32 | 7); }
DEVICE uint32_t load_word(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Nothing that was read before is taken for what is there now.
DEVICE uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
DEVICE void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
DEVICE bool swap(uint32_t* word, uint32_t from, uint32_t to) { return atomicCAS(word, from, to) == from; }
DEVICE void add(int* counter, int value) { atomicAdd(counter, value); }
DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
DEVICE void rest() { __nanosleep(50); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <class Work>
__global__ void __launch_bounds__(Work::kThreads, Work::kBlocks) blocks_kernel(const Work work) {
  extern __shared__ uint4 shared[];
  work(Block{blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
             reinterpret_cast<uint8_t*>(shared)});
}
template <class Work>
int run_blocks(int64_t count, int64_t threads, int64_t shared_bytes, const Work& work, void* stream) {
  if (count <= 0) return 0;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(least(count, kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, blocks_kernel<Work>, work);
}
template <class Work>
int prepare(int64_t shared_bytes) {  // loads the code: later would be behind kernels that wait
  return cudaFuncSetAttribute(blocks_kernel<Work>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
#else
DEVICE float group_largest(float most) { return most; }
DEVICE bool group_any(bool mine) { return mine; }
DEVICE bool all_of_warp(bool mine) { return mine; }
DEVICE void store_line(const Group&, uint64_t* line, const Part& part, uint64_t number) {
  for (int i = 0; i < kLineWords; ++i) line[i] = part.word[i];
  __atomic_store_n(line + kLineWords, number, __ATOMIC_RELEASE);
}
DEVICE void load_line(const uint64_t* line, Part& part) {
  part.word[kLineWords] = __atomic_load_n(line + kLineWords, __ATOMIC_ACQUIRE);
}
// What checks for races wants the rest to be read once the number is right.
DEVICE void load_rest(const uint64_t* line, Part& part) {
  for (int i = 0; i < kLineWords; ++i) part.word[i] = line[i];
}
DEVICE uint64_t number_of(const Part& part) { return part.word[kLineWords]; }
DEVICE uint32_t load_word(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
DEVICE uint32_t load_acquire(const uint32_t* word) { return load_word(word); }
DEVICE void store_release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
DEVICE bool swap(uint32_t* word, uint32_t from, uint32_t to) {
  return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
DEVICE void add(int* counter, int value) { *counter += value; }
DEVICE uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}
DEVICE void rest() { sched_yield(); }
DEVICE void wait_for_previous() {}
DEVICE void let_next_begin() {}

template <class Work>
int run_blocks(int64_t count, int64_t, int64_t shared_bytes, const Work& work, void*) {
  std::vector<uint64_t> shared(shared_bytes / 8 + 1);
  for (int64_t block = 0; block < count; ++block)
    work(Block{block, count, 0, 1, reinterpret_cast<uint8_t*>(shared.data())});
  return 0;
}
template <class Work>
int prepare(int64_t) {
  return 0;
}
#endif

// The first failure of a group is the one that is reported; nothing waits behind it any more.
DEVICE void fail(const Group& group, uint32_t code, uint32_t exchange, int64_t from, int64_t token,
                 uint32_t their_tag = 0) {
  if (!swap(&group.state[kFailed], 0, 1)) return;
  group.status[kExchange] = exchange;
  group.status[kFrom] = static_cast<uint32_t>(from);
  group.status[kToken] = static_cast<uint32_t>(token);
  group.status[kTheirTag] = their_tag;
  store_release(&group.status[kCode], code);
}

DEVICE bool has_failed(const Group& group) { return load_word(&group.state[kFailed]) != 0; }

DEVICE bool has_come(uint64_t number, uint32_t exchange) {
  return static_cast<int32_t>(static_cast<uint32_t>(number) - exchange) >= 0;
}

// By a whole warp: lines of this exchange. A null is no line. While it waits it asks for one line alone:
// thousands of warps that ask for all of theirs would keep the L2 from what comes. False: the group has
// failed.
template <int kCount>
DEVICE bool fetch(const Group& group, const uint64_t* const (&lines)[kCount], Part (&parts)[kCount], uint32_t exchange,
                  int64_t from, int64_t token) {
  uint64_t begin = 0, next_look = 0;
  uint32_t missing = (1u << kCount) - 1;  // the same in the whole warp
  bool wants_all = true;
  for (int round = 0;; ++round) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (lines[n] && (wants_all ? missing >> n & 1 : missing >> n == 1)) load_line(lines[n], parts[n]);
    uint32_t left = missing;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint64_t number = number_of(parts[n]);
      if (all_of_warp(!lines[n] || has_come(number, exchange))) left &= ~(1u << n);
    }
    wants_all = left != missing;
    missing = left;
    if (!missing) break;
    if (!wants_all) rest();
    if (round % kWaitRounds != kFirstLook) continue;
    if (!all_of_warp(!has_failed(group))) return false;
    const uint64_t now = now_ns();
    if (begin == 0) begin = now, next_look = now + kHostLookNs;
    if (now < next_look) continue;
    next_look = now + kHostLookNs;
    if (load_word(&group.status[kStop]))
      fail(group, kStopped, exchange, from, token);
    else if (now - begin > static_cast<uint64_t>(group.patience_ns))
      fail(group, kLate, exchange, from, token);
  }
#ifndef __CUDACC__
  for (int n = 0; n < kCount; ++n)
    if (lines[n]) load_rest(lines[n], parts[n]);
#else
  if (group.is_shared) {
    __threadfence();
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (lines[n]) load_line(lines[n], parts[n]);
  }
#endif
  return true;
}

// ---------------------------------------------------------------- elements

DEVICE float value_of(float x) { return x; }
DEVICE float value_of(uint16_t bfloat16) { return from_bits(static_cast<uint32_t>(bfloat16) << 16); }
DEVICE void put(float& to, float x) { to = x; }
DEVICE void put(uint16_t& to, float x) { to = static_cast<uint16_t>(bits_of(round_bf16(x)) >> 16); }

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T element[kCount];
};
template <int kCount, class T>
DEVICE Pack<T, kCount> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}
template <class T>
union Word {  // of 8 bytes, and its elements
  uint64_t bits;
  T element[8 / sizeof(T)];
};

// Two codes of values in units of their scale, and back.
DEVICE uint32_t pair_of_codes(float low, float high) {
#ifdef __CUDACC__
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
#else
  const auto code = [](float x) {
    return static_cast<uint32_t>(e4m3_code(keep_nan(x, nearest_e4m3(vmin(vmax(x, -448.0f), 448.0f)))));
  };
  return code(low) | code(high) << 8;
#endif
}
DEVICE void values_of(uint32_t codes, float& low, float& high) {  // of its lower 16 bits
#ifdef __CUDACC__
  const float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(codes), __NV_E4M3)));
  low = both.x, high = both.y;
#else
  low = from_e4m3(codes & 255u), high = from_e4m3(codes >> 8 & 255u);
#endif
}

// Codes times their scale are exact in bfloat16, too.
DEVICE void put_exact(float& to, float x) { to = x; }
DEVICE void put_exact(uint16_t& to, float x) { to = static_cast<uint16_t>(bits_of(x) >> 16); }
template <class Out>
DEVICE void put_codes(uint32_t codes, float scale, Out& first, Out& second) {
  float low, high;
  values_of(codes, low, high);
  put_exact(first, low * scale), put_exact(second, high * scale);
}

// ---------------------------------------------------------------- dispatch

template <class T>
struct Arrived {  // see `Receive`
  T* x;            // [ranks, step_capacity, hidden]; rows that are not wanted here may be anything
  int32_t* ids;    // [ranks, step_capacity, top_k]; -1: not held here
  float* weights;  // [ranks, step_capacity, top_k]
  int32_t* rows;   // null, or a counter: how many ids are held here is added
};

// Blocks take tokens in turn: all other ranks hear of each, also of those behind the last one. Our own go
// where they are wanted at once.
template <class In>
struct Send {
  static constexpr int kThreads = kMostThreads, kBlocks = 2;
  Group group;
  int64_t step_capacity, tokens;
  const In* x;           // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]; negative: not wanted by anybody
  const float* weights;  // [tokens, top_k]
  const int32_t* owners;
  Arrived<In> own;

  struct Shared {  // of a token; its scales, then its row behind it
    int32_t id[kMostTopK], owner[kMostTopK], first[kMostTopK];  // first: the rank, at its first slot
    float weight[kMostTopK];
  };
  BOTH static int64_t scales_bytes(const Group& group) { return exchange::round_up(4 * group.scale_words(), 16); }
  static int64_t shared_bytes(const Group& group) {
    return sizeof(Shared) + scales_bytes(group) + 8 * group.row_words();
  }

  using Some = Pack<In, kOwn>;

  DEVICE void operator()(const Block& block) const {
    Shared& token = *reinterpret_cast<Shared*>(block.shared);
    uint8_t* const scales = block.shared + sizeof(Shared);
    uint64_t* const row = reinterpret_cast<uint64_t*>(scales + scales_bytes(group));
    wait_for_previous();
    let_next_begin();
    const uint32_t exchange = group.state[kBegun] + 1;
    const uint64_t number = static_cast<uint64_t>(group.state[kTag]) << 32 | exchange;
    for (int64_t t = block.index; t < step_capacity; t += block.count) {
      if (t != block.index) block.sync();
      read(t, token, scales, row, block);
      send(t, number, token, reinterpret_cast<const uint32_t*>(scales), row, block);
    }
  }

  // The token as it travels, into shared memory. Ends with a sync.
  DEVICE void read(int64_t t, Shared& token, uint8_t* scales, uint64_t* row, const Block& block) const {
    const bool is_there = t < tokens;
    const int64_t parts = is_there ? group.hidden / kOwn : 0;
    Some some;
    if (block.thread < parts) some = load<kOwn>(x + t * group.hidden + block.thread * kOwn);
    for (int64_t k = block.thread; k < group.top_k; k += block.threads) {
      const int32_t id = is_there ? ids[t * group.top_k + k] : -1;
      token.id[k] = id;
      token.weight[k] = id < 0 ? 0.0f : weights[t * group.top_k + k];
      token.owner[k] = id < 0 ? -1 : owners[id];
    }
    for (int64_t part = block.thread; part < parts; part += block.threads) {
      if (part != block.thread) some = load<kOwn>(x + t * group.hidden + part * kOwn);
      pack(some, t, part, scales, row);
    }
    block.sync();
    if (own.rows && block.thread == block.threads - 1) {
      int held = 0;
      for (int64_t k = 0; k < group.top_k; ++k) held += token.owner[k] == group.rank;
      if (held) add(own.rows, held);
    }
    for (int64_t k = block.thread; k < group.top_k; k += block.threads) {
      const int64_t at = (group.rank * step_capacity + t) * group.top_k + k;
      const bool is_own = token.owner[k] == group.rank;
      own.ids[at] = is_own ? token.id[k] : -1;
      own.weights[at] = is_own ? token.weight[k] : 0.0f;
      bool is_new = !is_own;
      for (int64_t other = 0; other < k; ++other) is_new &= token.owner[other] != token.owner[k];
      token.first[k] = is_new ? token.owner[k] : -1;
    }
    block.sync();
  }

  DEVICE void pack(const Some& some, int64_t t, int64_t part, uint8_t* scales, uint64_t* row) const {
    Some& ours = reinterpret_cast<Some*>(own.x + (group.rank * step_capacity + t) * group.hidden)[part];
    float values[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) values[i] = value_of(some.element[i]);
    if (!group.is_fp8) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) reinterpret_cast<float*>(row)[part * kOwn + i] = values[i];
      ours = some;
      return;
    }
    float most = 0.0f;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) most = vmax(most, fabsf(values[i])), has_nan |= values[i] != values[i];
    most = group_largest(most), has_nan = group_any(has_nan);
    const float scale = scale_of(most, kFp8);
    const uint32_t code = has_nan || most == INFINITY ? 255 : bits_of(scale) >> 23;
    scales[part * kOwn / kGroup] = static_cast<uint8_t>(code);
    const float units = from_bits((254u << 23) - bits_of(scale));  // 1 / scale, a power of two
    Pack<uint32_t, kOwn / 4> codes;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i)
      codes.element[i] = pair_of_codes(values[4 * i] * units, values[4 * i + 1] * units) |
                         pair_of_codes(values[4 * i + 2] * units, values[4 * i + 3] * units) << 16;
    reinterpret_cast<Pack<uint32_t, kOwn / 4>*>(row)[part] = codes;
    const float as_read = from_ue8m0(code);
    Some rounded;
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i)
      put_codes(codes.element[i / 2] >> i % 2 * 16, as_read, rounded.element[2 * i], rounded.element[2 * i + 1]);
    ours = rounded;
  }

  DEVICE void send(int64_t t, uint64_t number, const Shared& token, const uint32_t* scales, const uint64_t* row,
                   const Block& block) const {
    const uint32_t parity = number & 1;
    const int first = block.first_word();
    const int64_t at = block.warp_of_block() * kWarpLines + block.line();
    const int64_t step = block.threads / block.kLanes * kWarpLines;
    for (int64_t line = at; line < (group.ranks - 1) * group.head_lines(); line += step) {
      const int64_t other = line / group.head_lines(), nth = line % group.head_lines();
      const int64_t to = other + (other >= group.rank);
      Part part;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int64_t word = 2 * (nth * kLineWords + first + i);
        part.word[i] = head_word(token, scales, to, word) |
                       static_cast<uint64_t>(head_word(token, scales, to, word + 1)) << 32;
      }
      store_line(group, group.head(to, parity, group.rank, t) + 16 * nth, part, number);
    }
    for (int64_t line = at; line < group.row_lines(); line += step) {
      Part part;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int64_t word = line * kLineWords + first + i;
        part.word[i] = word < group.row_words() ? row[word] : 0;
      }
      for (int64_t k = 0; k < group.top_k; ++k)
        if (const int to = token.first[k]; to >= 0)
          store_line(group, group.row(to, parity, group.rank, t) + 16 * line, part, number);
    }
  }

  DEVICE uint32_t head_word(const Shared& token, const uint32_t* scales, int64_t to, int64_t word) const {
    const int64_t k = group.top_k;
    if (word < k) return token.owner[word] == to ? token.id[word] : ~0u;  // whoever holds it knows
    if (word < 2 * k) return bits_of(token.weight[word - k]);
    if (word > 2 * k) return word < group.head_words() ? scales[word - 2 * k - 1] : 0;
    uint32_t before = 0;  // ranks of the token below this one
    bool is_ours = false;
    for (int64_t i = 0; i < k; ++i) {
      before += token.first[i] >= 0 && token.first[i] < to;
      is_ours |= token.owner[i] == group.rank;
    }
    return before + (is_ours && group.rank < to);
  }
};

// Warps take parts of other ranks' tokens in turn.
template <class Out>
struct Receive {
  static constexpr int kThreads = kWarpThreads, kBlocks = 3, kAtOnce = 3;
  Group group;
  int64_t step_capacity, parts;
  Arrived<Out> arrived;

  BOTH static int64_t head_bytes(const Group& group) { return 8 * kLineWords * group.head_lines(); }
  static int64_t shared_bytes(const Group& group) {
    return head_bytes(group) * (kWarpThreads / Block::kLanes);
  }

  DEVICE void operator()(const Block& block) const {
    uint32_t* const head = reinterpret_cast<uint32_t*>(block.shared + block.warp_of_block() * head_bytes(group));
    const uint32_t exchange = load_word(&group.state[kBegun]) + 1, tag = load_word(&group.state[kTag]);
    const bool is_lost = !all_of_warp(!has_failed(group));
    let_next_begin();
    const int64_t others = group.ranks - 1, items = others * step_capacity * parts;
    for (int64_t item = block.warp(); item < items; item += block.warps()) {
      const int64_t part = item % parts, other = item / parts % others, token = item / parts / others;
      const int64_t from = other + (other >= group.rank);
      const bool is_there = !is_lost && fetch_head(head, exchange, tag, from, token, block);
      const int64_t at = from * step_capacity + token, k = group.top_k;
      int wanted = 0;
      for (int64_t i = 0; is_there && i < k; ++i) wanted += head[i] != ~0u;
      if (part == 0) {
        for (int64_t i = block.lane(); i < k; i += block.kLanes) {
          const bool is_here = is_there && head[i] != ~0u;
          arrived.ids[at * k + i] = is_here ? static_cast<int32_t>(head[i]) : -1;
          arrived.weights[at * k + i] = is_here ? from_bits(head[k + i]) : 0.0f;
        }
        if (arrived.rows && wanted && block.lane() == 0) add(arrived.rows, wanted);
      }
      if (wanted) take(head, exchange, part, from, token, block);
      block.sync_warp();
    }
    wait_for_previous();  // whoever waits for our end waits for that of `Send`, too
    if (block.thread == 0 && block.index == 0) group.state[kArrived] = exchange;
  }

  DEVICE bool fetch_head(uint32_t* head, uint32_t exchange, uint32_t tag, int64_t from, int64_t token,
                         const Block& block) const {
    const uint64_t* const lines = group.head(group.rank, exchange & 1, from, token);
    for (int64_t first = 0; first < group.head_lines(); first += kWarpLines) {
      const int64_t line = first + block.line();
      const uint64_t* const wanted[1] = {line < group.head_lines() ? lines + 16 * line : nullptr};
      Part part[1] = {};
      if (!fetch(group, wanted, part, exchange, from, token)) return false;
      const uint32_t theirs = static_cast<uint32_t>(number_of(part[0]) >> 32);
      const bool is_same = !wanted[0] || theirs == tag;
      if (!is_same) fail(group, kElsewhere, exchange, from, token, theirs);
      if (!all_of_warp(is_same)) return false;
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (wanted[0] && block.first_word() + i < kLineWords)
          reinterpret_cast<uint64_t*>(head)[line * kLineWords + block.first_word() + i] = part[0].word[i];
    }
    block.sync_warp();
    return true;
  }

  DEVICE void take(const uint32_t* head, uint32_t exchange, int64_t part, int64_t from, int64_t token,
                   const Block& block) const {
    const uint8_t* const scales = reinterpret_cast<const uint8_t*>(head + 2 * group.top_k + 1);
    const uint64_t* const row = group.row(group.rank, exchange & 1, from, token);
    Out* const to = arrived.x + (from * step_capacity + token) * group.hidden;
    const int64_t rounds = (group.row_lines() + kWarpLines - 1) / kWarpLines;
    for (int64_t round = part; round < rounds; round += kAtOnce * parts) {
      const uint64_t* lines[kAtOnce];
      Part found[kAtOnce] = {};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t line = (round + n * parts) * kWarpLines + block.line();
        lines[n] = line < group.row_lines() ? row + 16 * line : nullptr;
      }
      if (!fetch(group, lines, found, exchange, from, token)) return;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t first = ((round + n * parts) * kWarpLines + block.line()) * kLineWords + block.first_word();
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          if (lines[n] && block.first_word() + i < kLineWords && first + i < group.row_words())
            unpack(found[n].word[i], first + i, scales, to);
      }
    }
  }

  DEVICE void unpack(uint64_t word, int64_t at, const uint8_t* scales, Out* to) const {
    if (!group.is_fp8) {
      Word<float> both{word};
      put(to[2 * at], both.element[0]), put(to[2 * at + 1], both.element[1]);
      return;
    }
    const float scale = from_ue8m0(scales[at * 8 / kGroup]);
    Pack<Out, 8> values;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      put_codes(static_cast<uint32_t>(word >> 16 * c), scale, values.element[2 * c], values.element[2 * c + 1]);
    reinterpret_cast<Pack<Out, 8>*>(to)[at] = values;
  }
};

// ---------------------------------------------------------------- combine

// Where the ids of a token that came are, and which of its ranks this one is, in the lines of its head.
DEVICE uint32_t word_of_head(const uint64_t* head, int64_t word) {
  const int64_t pair = word / 2;
  return load_word(reinterpret_cast<const uint32_t*>(head + pair / kLineWords * 16 + pair % kLineWords) + word % 2);
}

// Warps send slots of other ranks' tokens back, in parts; or in fast mode what they add up to.
template <class Slot, bool kFast>
struct Return {
  static constexpr int kThreads = kWarpThreads, kBlocks = 4, kAtOnce = 4, kElements = 8 / sizeof(Slot);
  Group group;
  int64_t step_capacity, parts;
  const Slot* slots;  // [ranks, step_capacity, top_k, hidden]

  BOTH static int64_t rows(const Group& group) { return kFast ? 1 : group.top_k; }  // of a token

  DEVICE void operator()(const Block& block) const {
    wait_for_previous();
    let_next_begin();
    const uint32_t exchange = group.state[kArrived];
    const uint64_t number = static_cast<uint64_t>(group.state[kTag]) << 32 | exchange;
    if (block.thread == 0 && block.index == 0) group.state[kBegun] = exchange;
    if (has_failed(group)) return;
    const int64_t others = group.ranks - 1, each = rows(group), items = others * step_capacity * each * parts;
    for (int64_t item = block.warp(); item < items; item += block.warps()) {
      const int64_t part = item % parts, k = item / parts % each, other = item / parts / each % others;
      const int64_t to = other + (other >= group.rank), token = item / parts / each / others;
      const uint64_t* const head = group.head(group.rank, exchange & 1, to, token);
      uint32_t held = 0;  // slots, as bits
      for (int64_t i = 0; i < group.top_k; ++i)
        if (word_of_head(head, i) != ~0u) held |= 1u << i;
      if (!kFast) held &= 1u << k;
      if (!held) continue;
      const int64_t place = kFast ? word_of_head(head, 2 * group.top_k) : k;
      send(held, (to * step_capacity + token) * group.top_k, group.back(to, exchange & 1, token, place), part, number,
           block);
    }
  }

  DEVICE void send(uint32_t held, int64_t first_slot, uint64_t* back, int64_t part, uint64_t number,
                   const Block& block) const {
    const int64_t lines = group.back_lines(), rounds = (lines + kWarpLines - 1) / kWarpLines;
    for (int64_t round = part; round < rounds; round += kAtOnce * parts) {
      Part some[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t first = ((round + n * parts) * kWarpLines + block.line()) * kLineWords + block.first_word();
#pragma unroll
        for (int i = 0; i < kWords; ++i)
          some[n].word[i] = block.first_word() + i < kLineWords && first + i < group.back_words()
                                ? word_of(held, first_slot, first + i)
                                : 0;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t line = (round + n * parts) * kWarpLines + block.line();
        if (line < lines) store_line(group, back + 16 * line, some[n], number);
      }
    }
  }

  DEVICE uint64_t word_of(uint32_t held, int64_t first_slot, int64_t at) const {
    if (!kFast) {
      int64_t k = 0;
      while (!(held >> k & 1)) ++k;
      return reinterpret_cast<const uint64_t*>(slots + (first_slot + k) * group.hidden)[at];
    }
    float sum[kElements] = {};
    for (int64_t k = 0; k < group.top_k; ++k) {
      if (!(held >> k & 1)) continue;
      const Word<Slot> some{reinterpret_cast<const uint64_t*>(slots + (first_slot + k) * group.hidden)[at]};
#pragma unroll
      for (int c = 0; c < kElements; ++c) sum[c] += value_of(some.element[c]);
    }
    Word<Slot> values{0};
#pragma unroll
    for (int c = 0; c < kElements; ++c) put(values.element[c], sum[c]);
    return values.bits;
  }
};

// Warps add up parts of our own tokens: in ascending order of slots, or of ranks.
template <class Slot, bool kFast>
struct Reduce {
  static constexpr int kThreads = kWarpThreads, kBlocks = 2, kAtOnce = 6, kElements = 8 / sizeof(Slot);
  Group group;
  int64_t tokens, step_capacity, parts;
  const int32_t *ids, *owners;
  const Slot* slots;  // [ranks, step_capacity, top_k, hidden]: our own tokens' are read there
  float* out;         // [tokens, hidden]

  struct Shared {  // of a warp
    int32_t owner[kMostTopK];
    int32_t place[kMostTopK];  // what is added, in this order: a slot of ours, or a place of what came
    int32_t from[kMostTopK];   // whose it is
    int count;
  };
  static int64_t shared_bytes() { return sizeof(Shared) * (kWarpThreads / Block::kLanes); }

  DEVICE void operator()(const Block& block) const {
    Shared& shared = reinterpret_cast<Shared*>(block.shared)[block.warp_of_block()];
    const uint32_t exchange = load_acquire(&group.state[kArrived]);  // `Return` has not ended yet
    const bool is_lost = !all_of_warp(!has_failed(group));
    let_next_begin();
    for (int64_t item = block.warp(); item < tokens * parts; item += block.warps()) {
      const int64_t token = item / parts;
      list(token, shared, block);
      add_up(token, item % parts, exchange, is_lost, shared, block);
      block.sync_warp();
    }
    wait_for_previous();  // whoever waits for our end waits for that of `Return`, too
  }

  // Ends with a sync of the warp.
  DEVICE void list(int64_t token, Shared& shared, const Block& block) const {
    for (int64_t slot = block.lane(); slot < group.top_k; slot += block.kLanes) {
      const int32_t id = ids[token * group.top_k + slot];
      shared.owner[slot] = id < 0 ? -1 : owners[id];
    }
    block.sync_warp();
    if (block.lane() == 0) shared.count = kFast ? list_ranks(shared) : list_slots(shared);
    block.sync_warp();
  }

  DEVICE int list_slots(Shared& shared) const {
    int count = 0;
    for (int64_t slot = 0; slot < group.top_k; ++slot)
      if (shared.owner[slot] >= 0) shared.place[count] = slot, shared.from[count++] = shared.owner[slot];
    return count;
  }

  DEVICE int list_ranks(Shared& shared) const {
    int count = 0;
    for (int64_t last = -1;; ++count) {  // the least rank behind the last one
      int64_t next = group.ranks;
      for (int64_t slot = 0; slot < group.top_k; ++slot)
        if (shared.owner[slot] > last) next = least(next, shared.owner[slot]);
      if (next == group.ranks) return count;
      shared.place[count] = count, shared.from[count] = static_cast<int32_t>(next), last = next;
    }
  }

  DEVICE void add_up(int64_t token, int64_t part, uint32_t exchange, bool is_lost, const Shared& shared,
                     const Block& block) const {
    const int64_t lines = group.back_lines(), rounds = (lines + kWarpLines - 1) / kWarpLines;
    for (int64_t round = part; round < rounds; round += parts) {
      const int64_t line = round * kWarpLines + block.line(), first = line * kLineWords + block.first_word();
      float sum[kWords][kElements];
      const bool is_there = !is_lost && gather(token, line, first, exchange, shared, sum);
      const float nothing = is_there || load_word(&group.state[kFailed]) == kApart ? 0.0f : NAN;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (block.first_word() + i >= kLineWords || first + i >= group.back_words()) continue;
        Pack<float, kElements> values;
#pragma unroll
        for (int c = 0; c < kElements; ++c) values.element[c] = is_there ? sum[i][c] : nothing;
        *reinterpret_cast<Pack<float, kElements>*>(out + token * group.hidden + (first + i) * kElements) = values;
      }
    }
  }

  DEVICE bool gather(int64_t token, int64_t line, int64_t first, uint32_t exchange, const Shared& shared,
                     float (&sum)[kWords][kElements]) const {
    const int count = shared.count;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int c = 0; c < kElements; ++c) sum[i][c] = 0.0f;
    for (int begin = 0; begin < count; begin += kAtOnce) {
      const uint64_t* wanted[kAtOnce];
      Part some[kAtOnce] = {};
      int from = 0;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        wanted[n] = nullptr;
        if (begin + n >= count || line >= group.back_lines()) continue;
        const int place = shared.place[begin + n];
        if (shared.from[begin + n] == group.rank)
          some[n] = ours(token, place, first, shared);
        else
          wanted[n] = group.back(group.rank, exchange & 1, token, place) + 16 * line, from = shared.from[begin + n];
      }
      if (!fetch(group, wanted, some, exchange, from, token)) return false;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        if (begin + n < count)
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            const Word<Slot> word{some[n].word[i]};
#pragma unroll
            for (int c = 0; c < kElements; ++c) sum[i][c] += value_of(word.element[c]);
          }
    }
    return true;
  }

  // Words of a slot of ours; in fast mode of the sum of all of them, rounded as it would travel.
  DEVICE Part ours(int64_t token, int place, int64_t first, const Shared& shared) const {
    const Slot* const own = slots + (group.rank * step_capacity + token) * group.top_k * group.hidden;
    Part part = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (first % kLineWords + i >= kLineWords || first + i >= group.back_words()) continue;
      if (!kFast) {
        part.word[i] = reinterpret_cast<const uint64_t*>(own + place * group.hidden)[first + i];
        continue;
      }
      float total[kElements] = {};
      for (int64_t slot = 0; slot < group.top_k; ++slot) {
        if (shared.owner[slot] != group.rank) continue;
        const Word<Slot> word{reinterpret_cast<const uint64_t*>(own + slot * group.hidden)[first + i]};
#pragma unroll
        for (int c = 0; c < kElements; ++c) total[c] += value_of(word.element[c]);
      }
      Word<Slot> values{0};
#pragma unroll
      for (int c = 0; c < kElements; ++c) put(values.element[c], total[c]);
      part.word[i] = values.bits;
    }
    return part;
  }
};

// In how many parts a row of so many lines goes, of so many rows: as many as keep all warps busy.
int64_t parts_of(int64_t rows, int64_t lines) {
  const int64_t rounds = (lines + kWarpLines - 1) / kWarpLines;
  const int64_t warps = kMostBlocks * (kWarpThreads / Block::kLanes), wanted = rows ? warps / rows : 1;
  return wanted < 1 ? 1 : least(wanted, rounds);
}

// Blocks of warps that take so many items in turn.
int64_t blocks_of(int64_t items) {
  const int64_t warps = kWarpThreads / Block::kLanes;
  return (items + warps - 1) / warps;
}

int64_t send_threads(const Group& group) {
  return least(exchange::round_up(group.hidden / kOwn, 32), kMostThreads);
}

template <class In>
int send(const Group& group, int64_t step_capacity, int64_t tokens, const void* x, const int32_t* ids,
         const float* weights, const int32_t* owners, const Arrived<void>& own, void* stream) {
  using Work = Send<In>;
  const Arrived<In> arrived{static_cast<In*>(own.x), own.ids, own.weights, own.rows};
  return run_blocks(
      step_capacity, send_threads(group), Work::shared_bytes(group),
      Work{group, step_capacity, tokens, static_cast<const In*>(x), ids, weights, owners, arrived}, stream);
}

template <class Out>
int receive(const Group& group, int64_t step_capacity, const Arrived<void>& all, void* stream) {
  using Work = Receive<Out>;
  const Arrived<Out> arrived{static_cast<Out*>(all.x), all.ids, all.weights, all.rows};
  const int64_t count = (group.ranks - 1) * step_capacity, parts = parts_of(count, group.row_lines());
  const int64_t blocks = blocks_of(count * parts);
  return run_blocks(blocks ? blocks : 1, kWarpThreads, Work::shared_bytes(group),  // it counts exchanges, too
                    Work{group, step_capacity, parts, arrived}, stream);
}

template <class Slot, bool kFast>
int send_back(const Group& group, int64_t step_capacity, const void* slots, void* stream) {
  using Work = Return<Slot, kFast>;
  const int64_t count = (group.ranks - 1) * step_capacity * Work::rows(group);
  const int64_t parts = parts_of(count, group.back_lines()), blocks = blocks_of(count * parts);
  return run_blocks(blocks ? blocks : 1, kWarpThreads, 0,  // it counts exchanges, too
                    Work{group, step_capacity, parts, static_cast<const Slot*>(slots)}, stream);
}

template <class Slot, bool kFast>
int reduce(const Group& group, int64_t tokens, int64_t step_capacity, const int32_t* ids, const int32_t* owners,
           const void* slots, float* out, void* stream) {
  using Work = Reduce<Slot, kFast>;
  const int64_t parts = parts_of(tokens, group.back_lines());
  return run_blocks(
      blocks_of(tokens * parts), kWarpThreads, Work::shared_bytes(),
      Work{group, tokens, step_capacity, parts, ids, owners, static_cast<const Slot*>(slots), out}, stream);
}

}  // namespace

extern "C" int64_t exchange_window_bytes(const Group* group) { return group->window_bytes(); }

template <class Slot, bool kFast>
int prepare_combine() {
  const int error = prepare<Return<Slot, kFast>>(0);
  return error ? error : prepare<Reduce<Slot, kFast>>(Reduce<Slot, kFast>::shared_bytes());
}

extern "C" int exchange_prepare(const Group* group) {
  if (group->top_k > kMostTopK) return -1;
  const int64_t sent = Send<float>::shared_bytes(*group), received = Receive<float>::shared_bytes(*group);
  for (const int error : {prepare<Send<float>>(sent), prepare<Send<uint16_t>>(sent), prepare<Receive<float>>(received),
                          prepare<Receive<uint16_t>>(received), prepare_combine<float, false>(),
                          prepare_combine<float, true>(), prepare_combine<uint16_t, false>(),
                          prepare_combine<uint16_t, true>()})
    if (error) return error;
  return 0;
}

// x is bfloat16 or float32, and so is what arrives.
extern "C" int exchange_send(const Group* group, int64_t step_capacity, int64_t tokens, const void* x, int64_t is_bf16,
                             const int32_t* ids, const float* weights, const int32_t* owners, void* their_x,
                             int32_t* their_ids, float* their_weights, int32_t* rows, void* stream) {
  const Arrived<void> own{their_x, their_ids, their_weights, rows};
  return is_bf16 ? send<uint16_t>(*group, step_capacity, tokens, x, ids, weights, owners, own, stream)
                 : send<float>(*group, step_capacity, tokens, x, ids, weights, owners, own, stream);
}

extern "C" int exchange_receive(const Group* group, int64_t step_capacity, void* x, int64_t is_bf16, int32_t* ids,
                                float* weights, int32_t* rows, void* stream) {
  const Arrived<void> all{x, ids, weights, rows};
  return is_bf16 ? receive<uint16_t>(*group, step_capacity, all, stream)
                 : receive<float>(*group, step_capacity, all, stream);
}

extern "C" int exchange_return(const Group* group, int64_t step_capacity, const void* slots, void* stream) {
  if (group->is_fast)
    return group->slot_bytes == 2 ? send_back<uint16_t, true>(*group, step_capacity, slots, stream)
                                  : send_back<float, true>(*group, step_capacity, slots, stream);
  return group->slot_bytes == 2 ? send_back<uint16_t, false>(*group, step_capacity, slots, stream)
                                : send_back<float, false>(*group, step_capacity, slots, stream);
}

extern "C" int exchange_reduce(const Group* group, int64_t tokens, int64_t step_capacity, const int32_t* ids,
                               const int32_t* owners, const void* slots, float* out, void* stream) {
  if (group->is_fast)
    return group->slot_bytes == 2
               ? reduce<uint16_t, true>(*group, tokens, step_capacity, ids, owners, slots, out, stream)
               : reduce<float, true>(*group, tokens, step_capacity, ids, owners, slots, out, stream);
  return group->slot_bytes == 2
             ? reduce<uint16_t, false>(*group, tokens, step_capacity, ids, owners, slots, out, stream)
             : reduce<float, false>(*group, tokens, step_capacity, ids, owners, slots, out, stream);
}

// ---------------------------------------------------------------- memory that other processes may open

#ifdef __CUDACC__
extern "C" int window_allocate(int64_t bytes, void** window) {
  const int error = cudaMalloc(window, bytes);
  return error ? error : cudaMemset(*window, 0, bytes);
}
extern "C" int window_clear(void* window, int64_t bytes) { return cudaMemset(window, 0, bytes); }
extern "C" int window_free(void* window) { return cudaFree(window); }
extern "C" int window_export(void* window, void* handle) {
  return cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), window);
}
extern "C" int window_open(const void* handle, void** window) {
  return cudaIpcOpenMemHandle(window, *static_cast<const cudaIpcMemHandle_t*>(handle),
                              cudaIpcMemLazyEnablePeerAccess);
}
// By the copy engine, also to another device's window: what a put of so many bytes takes.
extern "C" int window_put(void* to, const void* from, int64_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
}
extern "C" int window_close(void* window) { return cudaIpcCloseMemHandle(window); }
#endif
