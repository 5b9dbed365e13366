// Dispatch and combine by one-sided writes into the windows of the other ranks. See
// kernels/comm/one_sided.py.
//
// A rank writes where its peer will read, then releases a flag of the peer; nobody ever asks for
// anything. Flags hold the number of the exchange and are never reset. Buffers alternate between
// two sets: a rank sends exchange n + 2 after it has seen every other rank send n + 1, which that one
// does behind its last read of exchange n. So nothing is overwritten before it was read, without a
// barrier. Whoever waits gives up after a while, or when told to, and says for whom it waited.
//
// Tokens go in items of `tile` of them, each with a flag of its own: a token lies at the same place on
// all ranks, so an item needs to know nothing of the others. Blocks take items in turn. Kernels begin
// while the one before them ends (griddepcontrol); those that wait for other ranks look for flags
// before that, and are few enough to leave room for what they wait for if ranks share a device.
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

constexpr uint64_t kAlign = 128;

struct Group {  // mirrored by kernels/comm/one_sided.py
  int64_t rank, ranks;
  int64_t capacity;  // tokens of a rank and step for which the windows have room
  int64_t hidden, top_k;
  int64_t is_fp8;      // rows travel as e4m3 with a scale for each 32; else as float32
  int64_t slot_bytes;  // of an element on its way back: 4 or 2 (bfloat16)
  int64_t is_fast;     // sums of a rank travel back, not single slots
  int64_t patience_ns;
  uint8_t* const* windows;  // [ranks], ours among them
  uint32_t* state;
  uint32_t* status;

  // A row: elements; then its tail: scales, ids, weights, and which of the token's ranks it goes to.
  BOTH int64_t body_bytes() const { return is_fp8 ? hidden : 4 * hidden; }
  BOTH int64_t scale_words() const { return is_fp8 ? (hidden / 32 + 3) / 4 : 0; }
  BOTH int64_t tail_words() const { return (scale_words() + 2 * top_k + 1 + 3) / 4 * 4; }
  BOTH int64_t row_stride() const { return body_bytes() + 4 * tail_words(); }
  BOTH int64_t back_stride() const { return hidden * slot_bytes; }
  BOTH static uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  // Parts of a window, in this order. The other ranks' parts in ours, ours in theirs.
  BOTH uint64_t sent_flags_bytes() const { return aligned(8 * ranks * capacity); }
  BOTH uint64_t back_flags_bytes() const { return aligned(4 * ranks * capacity); }
  BOTH uint64_t flags_bytes() const { return sent_flags_bytes() + back_flags_bytes(); }
  BOTH uint64_t rows_bytes() const { return aligned(ranks * capacity * row_stride()); }
  BOTH uint64_t back_bytes() const { return aligned(capacity * top_k * back_stride()); }

  BOTH uint64_t* sent_flag(int64_t at, int64_t from, int64_t item) const {  // tag, exchange
    return reinterpret_cast<uint64_t*>(windows[at]) + from * capacity + item;
  }
  BOTH uint32_t* back_flag(int64_t at, int64_t from, int64_t item) const {
    return reinterpret_cast<uint32_t*>(windows[at] + sent_flags_bytes()) + from * capacity + item;
  }
  BOTH uint8_t* row(int64_t at, uint32_t parity, int64_t from, int64_t token) const {
    return windows[at] + flags_bytes() + parity * rows_bytes() + (from * capacity + token) * row_stride();
  }
  BOTH uint32_t* tail(int64_t at, uint32_t parity, int64_t from, int64_t token) const {
    return reinterpret_cast<uint32_t*>(row(at, parity, from, token) + body_bytes());
  }
  BOTH uint8_t* back(int64_t at, uint32_t parity, int64_t token, int64_t slot) const {
    return windows[at] + flags_bytes() + 2 * rows_bytes() + parity * back_bytes() +
           (token * top_k + slot) * back_stride();
  }
  BOTH uint64_t window_bytes() const { return flags_bytes() + 2 * (rows_bytes() + back_bytes()); }
};

}  // namespace exchange

namespace {

using namespace each;
using exchange::Group;

constexpr int kMostThreads = 512;
constexpr int kMostBlocks = 264;  // of a kernel: two a multiprocessor of an H200
constexpr int kMostTopK = 32;
constexpr int kWaitRounds = 64;  // between looks at the clock
constexpr int kRestRounds = 8;   // between rests
enum State { kBegun, kArrived, kFailed, kTag };                     // words of a rank, on its device
enum Status { kStop, kCode, kExchange, kFrom, kItem, kTheirTag };   // words that its host sees
enum Code : uint32_t { kFine, kLate, kStopped, kElsewhere };
constexpr uint32_t kApart = 2;  // in kFailed: nobody else takes part; sums are 0

// ---------------------------------------------------------------- blocks of threads, or one

struct alignas(16) Quad {
  uint32_t word[4];
};

struct Block {
  int64_t index, count;
  int thread, threads;
  uint8_t* shared;  // of the block

#ifdef __CUDACC__
  __device__ void sync() const { __syncthreads(); }
#else
  void sync() const {}
#endif
};

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
constexpr int kOwn = 16;  // elements of a row that a thread takes at a time: half a group
DEVICE float group_largest(float most) {
  return fmaxf(most, __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), most, 1));
}
DEVICE bool group_any(bool mine) { return __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), mine, 1) | mine; }
template <class Word>
DEVICE Word load_relaxed(const Word* word);
template <>
DEVICE uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
template <>
DEVICE uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
DEVICE void acquire() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }  // what was read is in force
// What this block has written, up to its last `sync`, comes before the word on any device.
DEVICE void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
DEVICE void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
DEVICE bool swap(uint32_t* word, uint32_t from, uint32_t to) { return atomicCAS(word, from, to) == from; }
DEVICE void add(int* counter, int value) { atomicAdd(counter, value); }
DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
DEVICE void rest() { __nanosleep(32); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <class Work>
__global__ void __launch_bounds__(kMostThreads, 2) blocks_kernel(const Work work) {
  extern __shared__ uint4 shared[];
  work(Block{blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
             reinterpret_cast<uint8_t*>(shared)});
}
template <class Work>
int run_blocks(int64_t count, int64_t hidden, int64_t shared_bytes, const Work& work, void* stream) {
  if (count <= 0) return 0;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int64_t threads = (hidden / kOwn + 31) / 32 * 32;
  config.gridDim = dim3(static_cast<unsigned>(least(count, kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(least(threads, kMostThreads)));
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
#define DEVICE inline
constexpr int kOwn = 32;
DEVICE float group_largest(float most) { return most; }
DEVICE bool group_any(bool mine) { return mine; }
template <class Word>
DEVICE Word load_relaxed(const Word* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);  // what checks for races knows no fences
}
DEVICE void acquire() {}
template <class Word>
DEVICE void store_release(Word* word, Word value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
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
  std::vector<Quad> shared(shared_bytes / sizeof(Quad) + 1);
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
DEVICE void fail(const Group& group, uint32_t code, uint32_t exchange, int64_t from, int64_t where,
                 uint32_t their_tag = 0) {
  if (!swap(&group.state[kFailed], 0, 1)) return;
  group.status[kExchange] = exchange;
  group.status[kFrom] = static_cast<uint32_t>(from);
  group.status[kItem] = static_cast<uint32_t>(where);
  group.status[kTheirTag] = their_tag;
  store_release(&group.status[kCode], code);
}

DEVICE bool has_failed(const Group& group) { return load_relaxed(&group.state[kFailed]) != 0; }

// Until `flag`, whose lower half is the number of an exchange, has come to `exchange`; one thread's work.
template <class Word>
DEVICE Word wait(const Group& group, const Word* flag, uint32_t exchange, int64_t from, int64_t where) {
  uint64_t begin = 0;
  for (int round = 0;; ++round) {
    const Word found = load_relaxed(flag);
    if (static_cast<int32_t>(static_cast<uint32_t>(found) - exchange) >= 0) {
      acquire();
      return found;
    }
    if (round % kRestRounds == kRestRounds - 1) rest();
    if (round % kWaitRounds) continue;
    if (has_failed(group)) return 0;
    if (begin == 0) begin = now_ns();
    if (load_relaxed(&group.status[kStop]))
      fail(group, kStopped, exchange, from, where);
    else if (now_ns() - begin > static_cast<uint64_t>(group.patience_ns))
      fail(group, kLate, exchange, from, where);
  }
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

// ---------------------------------------------------------------- dispatch

// An item: `tile` tokens. All ranks hear of each, who of them is wanted or not.
template <class In>
struct Send {
  Group group;
  int64_t tile, items, step_capacity, tokens;
  const In* x;           // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]; negative: not wanted by anybody
  const float* weights;  // [tokens, top_k]
  const int32_t* owners;

  struct Shared {  // of a token; scales behind it
    int32_t id[kMostTopK], owner[kMostTopK], first[kMostTopK];  // first: the rank, at its first slot
    float weight[kMostTopK];
    uint32_t scales[1];
  };
  static int64_t shared_bytes(const Group& group) { return sizeof(Shared) + 4 * group.scale_words(); }

  using Some = Pack<In, kOwn>;

  DEVICE void operator()(const Block& block) const {
    Shared& token = *reinterpret_cast<Shared*>(block.shared);
    wait_for_previous();
    let_next_begin();
    const uint32_t exchange = group.state[kBegun] + 1, parity = exchange & 1;
    const uint64_t flag = static_cast<uint64_t>(group.state[kTag]) << 32 | exchange;
    for (int64_t item = block.index; item < items; item += block.count) {
      for (int64_t t = item * tile; t < least((item + 1) * tile, step_capacity); ++t) send(t, parity, token, block);
      for (int64_t to = block.thread; to < group.ranks; to += block.threads)
        store_release(group.sent_flag(to, group.rank, item), flag);
    }
  }

  // Ends with a sync.
  DEVICE void send(int64_t t, uint32_t parity, Shared& token, const Block& block) const {
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
    block.sync();
    for (int64_t k = block.thread; k < group.top_k; k += block.threads) {
      bool is_new = true;
      for (int64_t other = 0; other < k; ++other) is_new &= token.owner[other] != token.owner[k];
      token.first[k] = is_new ? token.owner[k] : -1;
    }
    block.sync();
    for (int64_t part = block.thread; part < parts; part += block.threads) {
      if (part != block.thread) some = load<kOwn>(x + t * group.hidden + part * kOwn);
      send_part(some, t, parity, part, token);
    }
    block.sync();
    const int64_t quads = group.tail_words() / 4;
    for (int64_t i = block.thread; i < group.ranks * quads; i += block.threads) {
      const int64_t to = i / quads;
      Quad quad;
#pragma unroll
      for (int w = 0; w < 4; ++w) quad.word[w] = tail_word(token, to, i % quads * 4 + w);
      reinterpret_cast<Quad*>(group.tail(to, parity, group.rank, t))[i % quads] = quad;
    }
    block.sync();
  }

  // As it travels.
  DEVICE void send_part(const Some& some, int64_t t, uint32_t parity, int64_t part, Shared& token) const {
    float values[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) values[i] = value_of(some.element[i]);
    if (!group.is_fp8) {
      for (int64_t k = 0; k < group.top_k; ++k)
        if (const int to = token.first[k]; to >= 0)
          *reinterpret_cast<Pack<float, kOwn>*>(group.row(to, parity, group.rank, t) + part * kOwn * 4) =
              *reinterpret_cast<const Pack<float, kOwn>*>(values);
      return;
    }
    float most = 0.0f;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) most = vmax(most, fabsf(values[i])), has_nan |= values[i] != values[i];
    most = group_largest(most), has_nan = group_any(has_nan);
    const float scale = scale_of(most, kFp8);
    const uint32_t code = has_nan || most == INFINITY ? 255 : bits_of(scale) >> 23;
    reinterpret_cast<uint8_t*>(token.scales)[part * kOwn / kGroup] = static_cast<uint8_t>(code);
    const float units = from_bits((254u << 23) - bits_of(scale));  // 1 / scale, a power of two
    Pack<uint32_t, kOwn / 4> codes;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i)
      codes.element[i] = pair_of_codes(values[4 * i] * units, values[4 * i + 1] * units) |
                         pair_of_codes(values[4 * i + 2] * units, values[4 * i + 3] * units) << 16;
    for (int64_t k = 0; k < group.top_k; ++k)
      if (const int to = token.first[k]; to >= 0)
        *reinterpret_cast<Pack<uint32_t, kOwn / 4>*>(group.row(to, parity, group.rank, t) + part * kOwn) = codes;
  }

  DEVICE uint32_t tail_word(const Shared& token, int64_t to, int64_t word) const {
    if (word < group.scale_words()) return token.scales[word];
    word -= group.scale_words();
    const int64_t k = group.top_k;
    if (word < k) return token.owner[word] == to ? token.id[word] : ~0u;  // whoever holds it knows
    if (word < 2 * k) return bits_of(token.weight[word - k]);
    uint32_t before = 0;  // ranks of the token below this one
    if (word == 2 * k)
      for (int64_t i = 0; i < k; ++i) before += token.first[i] >= 0 && token.first[i] < to;
    return before;
  }
};

// An item: `tile` tokens of a source.
template <class Out>
struct Receive {
  Group group;
  int64_t tile, items, step_capacity;
  Out* x;          // [ranks, step_capacity, hidden]; rows that are not wanted here are left alone
  int32_t* ids;    // [ranks, step_capacity, top_k]; -1: not held here
  float* weights;  // [ranks, step_capacity, top_k]
  int32_t* rows;   // null, or a counter: how many ids are held here is added

  static constexpr int kAtOnce = 4;
  struct Shared {
    int has_failed, is_wanted[1];  // [tile]
  };
  static int64_t shared_bytes(int64_t tile) { return sizeof(Shared) + 4 * tile; }

  struct Part {
    Pack<uint32_t, kOwn / 4> codes;
    uint32_t scale;
  };

  DEVICE void operator()(const Block& block) const {
    Shared& shared = *reinterpret_cast<Shared*>(block.shared);
    const uint32_t exchange = load_relaxed(&group.state[kBegun]) + 1, parity = exchange & 1;
    const uint32_t tag = load_relaxed(&group.state[kTag]);
    let_next_begin();
    for (int64_t i = block.index; i < group.ranks * items; i += block.count) {
      const int64_t from = i % group.ranks, item = i / group.ranks;
      if (block.thread == 0) {
        const uint64_t found = wait(group, group.sent_flag(group.rank, from, item), exchange, from, item);
        const uint32_t theirs = static_cast<uint32_t>(found >> 32);
        if (found && theirs != tag) fail(group, kElsewhere, exchange, from, item, theirs);
        shared.has_failed = has_failed(group);
      }
      block.sync();
      take(from, item, parity, shared, block);
      block.sync();
    }
    wait_for_previous();  // whoever waits for our end waits for that of `Send`, too
    if (block.thread == 0 && block.index == 0) group.state[kArrived] = exchange;
  }

  DEVICE void take(int64_t from, int64_t item, uint32_t parity, Shared& shared, const Block& block) const {
    const int64_t first = item * tile, count = least(tile, step_capacity - first);
    const int64_t parts = group.hidden / kOwn, all = count * parts;
    const bool is_lost = shared.has_failed != 0;
    Part held[kAtOnce];
    if (group.is_fp8) fetch(held, block.thread, all, from, first, parity, block);  // wanted or not
    for (int64_t t = block.thread; t < count; t += block.threads) {
      const uint32_t* const tail = group.tail(group.rank, parity, from, first + t) + group.scale_words();
      const int64_t at = (from * step_capacity + first + t) * group.top_k;
      int wanted = 0;
      for (int64_t k = 0; k < group.top_k; ++k) {
        const int32_t id = is_lost ? -1 : static_cast<int32_t>(tail[k]);
        ids[at + k] = id;
        weights[at + k] = id < 0 ? 0.0f : from_bits(tail[group.top_k + k]);
        wanted += id >= 0;
      }
      shared.is_wanted[t] = wanted;
      if (rows && wanted) add(rows, wanted);
    }
    block.sync();
    const int64_t stride = kAtOnce * block.threads;
    for (int64_t i = block.thread; i < all; i += stride) {
      if (group.is_fp8 && i != block.thread) fetch(held, i, all, from, first, parity, block);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t at = i + n * block.threads, t = at / parts;
        if (at >= all || !shared.is_wanted[t]) continue;
        Out* const to = x + (from * step_capacity + first + t) * group.hidden + at % parts * kOwn;
        Pack<Out, kOwn> values;
        if (group.is_fp8) {
          const float scale = from_ue8m0(held[n].scale);
#pragma unroll
          for (int c = 0; c < kOwn / 2; ++c) {
            float low, high;
            values_of(held[n].codes.element[c / 2] >> c % 2 * 16, low, high);
            put(values.element[2 * c], low * scale), put(values.element[2 * c + 1], high * scale);
          }
        } else {
          const auto floats = load<kOwn>(
              reinterpret_cast<const float*>(group.row(group.rank, parity, from, first + t)) + at % parts * kOwn);
#pragma unroll
          for (int c = 0; c < kOwn; ++c) put(values.element[c], floats.element[c]);
        }
        *reinterpret_cast<Pack<Out, kOwn>*>(to) = values;
      }
    }
  }

  DEVICE void fetch(Part (&held)[kAtOnce], int64_t i, int64_t all, int64_t from, int64_t first, uint32_t parity,
                    const Block& block) const {
    const int64_t parts = group.hidden / kOwn;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t at = i + n * block.threads;
      if (at >= all) break;
      const uint8_t* const row = group.row(group.rank, parity, from, first + at / parts);
      const int64_t part = at % parts;
      held[n].codes = load<kOwn / 4>(reinterpret_cast<const uint32_t*>(row + part * kOwn));
      held[n].scale = row[group.hidden + part * kOwn / kGroup];
    }
  }
};

// ---------------------------------------------------------------- combine

// An item: the results of `tile` tokens on their way to another rank that sent them.
template <class Slot>
struct Return {
  Group group;
  int64_t tile, items, step_capacity;
  const Slot* slots;  // [ranks, step_capacity, top_k, hidden]

  static constexpr int kAtOnce = 8;  // loads in flight
  static constexpr int kQuad = 16 / sizeof(Slot);

  DEVICE void operator()(const Block& block) const {
    int32_t* const held = reinterpret_cast<int32_t*>(block.shared);  // slots that are held here; how many
    wait_for_previous();
    let_next_begin();
    const uint32_t exchange = group.state[kArrived], parity = exchange & 1;
    if (block.thread == 0 && block.index == 0) group.state[kBegun] = exchange;
    if (has_failed(group)) return;
    for (int64_t i = block.index; i < (group.ranks - 1) * items; i += block.count) {
      const int64_t other = i % (group.ranks - 1), to = other + (other >= group.rank), item = i / (group.ranks - 1);
      int num_sent = 0;
      for (int64_t t = item * tile; t < least((item + 1) * tile, step_capacity); ++t) {
        const uint32_t* const tail = group.tail(group.rank, parity, to, t) + group.scale_words();
        if (block.thread == 0) {
          int count = 0;
          for (int64_t k = 0; k < group.top_k; ++k)
            if (tail[k] != ~0u) held[count++] = static_cast<int32_t>(k);
          held[kMostTopK] = count;
        }
        block.sync();
        const int count = held[kMostTopK];
        const Slot* const from = slots + (to * step_capacity + t) * group.top_k * group.hidden;
        if (count && group.is_fast)
          add_up(held, count, from, group.back(to, parity, t, tail[2 * group.top_k]), block);
        else if (count)
          copy(held, count, from, group.back(to, parity, t, 0), block);
        num_sent += count;
        block.sync();
      }
      if (block.thread == 0 && num_sent) store_release(group.back_flag(to, group.rank, item), exchange);
    }
  }

  DEVICE void copy(const int32_t* held, int count, const Slot* from, uint8_t* to, const Block& block) const {
    const int quads = static_cast<int>(group.back_stride() / 16), all = count * quads;
    for (int i = block.thread; i < all; i += kAtOnce * block.threads) {
      Quad some[kAtOnce];
      int places[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = i + n * block.threads;
        places[n] = at < all ? held[at / quads] * quads + at % quads : -1;
        if (places[n] >= 0) some[n] = reinterpret_cast<const Quad*>(from)[places[n]];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        if (places[n] >= 0) reinterpret_cast<Quad*>(to)[places[n]] = some[n];
    }
  }

  DEVICE void add_up(const int32_t* held, int count, const Slot* from, uint8_t* to, const Block& block) const {
    for (int64_t i = block.thread; i < group.hidden / kQuad; i += block.threads) {
      float sum[kQuad] = {};
      for (int n = 0; n < count; ++n) {
        const auto some = load<kQuad>(from + held[n] * group.hidden + kQuad * i);
#pragma unroll
        for (int c = 0; c < kQuad; ++c) sum[c] += value_of(some.element[c]);
      }
      Pack<Slot, kQuad> values;
#pragma unroll
      for (int c = 0; c < kQuad; ++c) put(values.element[c], sum[c]);
      reinterpret_cast<Pack<Slot, kQuad>*>(to)[i] = values;
    }
  }
};

// A block adds up our own tokens in turn: in ascending order of slots, or of ranks.
template <class Slot>
struct Reduce {
  Group group;
  int64_t tile, tokens, step_capacity;
  const int32_t *ids, *owners;
  const Slot* slots;  // [ranks, step_capacity, top_k, hidden]: our own tokens' are read there
  float* out;         // [tokens, hidden]

  static constexpr int kQuad = 16 / sizeof(Slot), kAtOnce = 4;
  struct Shared {
    const Slot* from[kMostTopK];  // what is added, in this order
    int32_t owner[kMostTopK];
    int32_t is_own[kMostTopK];  // slots of ours: in fast mode they are added up first, as the others' were
    int count;
    uint32_t failed;
  };

  DEVICE void operator()(const Block& block) const {
    Shared& shared = *reinterpret_cast<Shared*>(block.shared);
    const uint32_t exchange = load_relaxed(&group.state[kArrived]);
    let_next_begin();
    acquire();  // what kernels before `Return` have written: its end is not waited for yet
    for (int64_t token = block.index; token < tokens; token += block.count) {
      gather(token, exchange, shared, block);
      add_up(token, shared, block);
      block.sync();
    }
    wait_for_previous();  // whoever waits for our end waits for that of `Return`, too
  }

  // Ends with a sync.
  DEVICE void gather(int64_t token, uint32_t exchange, Shared& shared, const Block& block) const {
    const int64_t k = group.top_k;
    for (int64_t slot = block.thread; slot < k; slot += block.threads) {
      const int32_t id = ids[token * k + slot];
      shared.owner[slot] = id < 0 ? -1 : owners[id];
    }
    block.sync();
    for (int64_t slot = block.thread; slot < k; slot += block.threads) {
      const int from = shared.owner[slot];
      bool is_new = from >= 0 && from != group.rank;
      for (int64_t other = 0; other < slot; ++other) is_new &= shared.owner[other] != from;
      if (is_new) wait(group, group.back_flag(group.rank, from, token / tile), exchange, from, token / tile);
    }
    block.sync();
    if (block.thread == 0) {
      shared.failed = load_relaxed(&group.state[kFailed]);
      shared.count = group.is_fast ? list_ranks(token, exchange & 1, shared) : list_slots(token, exchange & 1, shared);
    }
    block.sync();
  }

  DEVICE const Slot* own(int64_t token, int64_t slot) const {
    return slots + ((group.rank * step_capacity + token) * group.top_k + slot) * group.hidden;
  }

  DEVICE int list_slots(int64_t token, uint32_t parity, Shared& shared) const {
    int count = 0;
    for (int64_t slot = 0; slot < group.top_k; ++slot) {
      if (shared.owner[slot] < 0) continue;
      shared.is_own[count] = 0;
      shared.from[count++] = shared.owner[slot] == group.rank
                                 ? own(token, slot)
                                 : reinterpret_cast<const Slot*>(group.back(group.rank, parity, token, slot));
    }
    return count;
  }

  DEVICE int list_ranks(int64_t token, uint32_t parity, Shared& shared) const {
    int count = 0;
    for (int64_t last = -1;;) {  // the least rank behind the last one
      int64_t next = group.ranks;
      for (int64_t slot = 0; slot < group.top_k; ++slot)
        if (shared.owner[slot] > last) next = least(next, shared.owner[slot]);
      if (next == group.ranks) return count;
      shared.is_own[count] = next == group.rank;
      shared.from[count] = reinterpret_cast<const Slot*>(group.back(group.rank, parity, token, count));
      last = next, ++count;
    }
  }

  DEVICE Pack<Slot, kQuad> sum_of_ours(int64_t token, int64_t i, const Shared& shared) const {
    float sum[kQuad] = {};
    for (int64_t slot = 0; slot < group.top_k; ++slot) {
      if (shared.owner[slot] != group.rank) continue;
      const auto some = load<kQuad>(own(token, slot) + kQuad * i);
#pragma unroll
      for (int c = 0; c < kQuad; ++c) sum[c] += value_of(some.element[c]);
    }
    Pack<Slot, kQuad> values;
#pragma unroll
    for (int c = 0; c < kQuad; ++c) put(values.element[c], sum[c]);
    return values;
  }

  DEVICE void add_up(int64_t token, const Shared& shared, const Block& block) const {
    const int count = shared.failed ? 0 : shared.count;
    const float nothing = shared.failed && shared.failed != kApart ? NAN : 0.0f;
    for (int64_t i = block.thread; i < group.hidden / kQuad; i += block.threads) {
      float sum[kQuad];
#pragma unroll
      for (int c = 0; c < kQuad; ++c) sum[c] = nothing;
      for (int first = 0; first < count; first += kAtOnce) {
        Pack<Slot, kQuad> some[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (first + n < count)
            some[n] = shared.is_own[first + n] ? sum_of_ours(token, i, shared)
                                               : load<kQuad>(shared.from[first + n] + kQuad * i);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (first + n < count)
#pragma unroll
            for (int c = 0; c < kQuad; ++c) sum[c] += value_of(some[n].element[c]);
      }
#pragma unroll
      for (int c = 0; c < kQuad; c += 4)
        *reinterpret_cast<Pack<float, 4>*>(out + token * group.hidden + kQuad * i + c) =
            Pack<float, 4>{sum[c], sum[c + 1], sum[c + 2], sum[c + 3]};
    }
  }
};

constexpr int64_t kReturnShared = 4 * (kMostTopK + 1);

template <class Slot>
int64_t reduce_shared() {
  return sizeof(typename Reduce<Slot>::Shared);
}

}  // namespace

extern "C" int64_t exchange_window_bytes(const Group* group) { return group->window_bytes(); }

extern "C" int exchange_prepare(const Group* group, int64_t tile) {
  if (group->top_k > kMostTopK) return -1;
  const int64_t send = Send<float>::shared_bytes(*group), receive = Receive<float>::shared_bytes(tile);
  for (const int error : {prepare<Send<float>>(send), prepare<Send<uint16_t>>(send), prepare<Receive<float>>(receive),
                          prepare<Receive<uint16_t>>(receive), prepare<Return<float>>(kReturnShared),
                          prepare<Return<uint16_t>>(kReturnShared), prepare<Reduce<float>>(reduce_shared<float>()),
                          prepare<Reduce<uint16_t>>(reduce_shared<uint16_t>())})
    if (error) return error;
  return 0;
}

extern "C" int exchange_send(const Group* group, int64_t tile, int64_t items, int64_t step_capacity, int64_t tokens,
                             const void* x, int64_t is_bf16, const int32_t* ids, const float* weights,
                             const int32_t* owners, void* stream) {
  const int64_t shared = Send<float>::shared_bytes(*group);
  if (is_bf16)
    return run_blocks(items, group->hidden, shared,
                      Send<uint16_t>{*group, tile, items, step_capacity, tokens, static_cast<const uint16_t*>(x), ids,
                                     weights, owners},
                      stream);
  return run_blocks(items, group->hidden, shared,
                    Send<float>{*group, tile, items, step_capacity, tokens, static_cast<const float*>(x), ids, weights,
                                owners},
                    stream);
}

extern "C" int exchange_receive(const Group* group, int64_t tile, int64_t items, int64_t step_capacity, void* x,
                                int64_t is_bf16, int32_t* ids, float* weights, int32_t* rows, void* stream) {
  const int64_t count = group->ranks * items, shared = Receive<float>::shared_bytes(tile);
  if (is_bf16)
    return run_blocks(
        count, group->hidden, shared,
        Receive<uint16_t>{*group, tile, items, step_capacity, static_cast<uint16_t*>(x), ids, weights, rows}, stream);
  return run_blocks(count, group->hidden, shared,
                    Receive<float>{*group, tile, items, step_capacity, static_cast<float*>(x), ids, weights, rows},
                    stream);
}

extern "C" int exchange_return(const Group* group, int64_t tile, int64_t items, int64_t step_capacity,
                               const void* slots, void* stream) {
  const int64_t count = (group->ranks - 1) * items, blocks = count ? count : 1;  // it counts exchanges, too
  if (group->slot_bytes == 2)
    return run_blocks(blocks, group->hidden, kReturnShared,
                      Return<uint16_t>{*group, tile, items, step_capacity, static_cast<const uint16_t*>(slots)},
                      stream);
  return run_blocks(blocks, group->hidden, kReturnShared,
                    Return<float>{*group, tile, items, step_capacity, static_cast<const float*>(slots)}, stream);
}

extern "C" int exchange_reduce(const Group* group, int64_t tile, int64_t tokens, int64_t step_capacity,
                               const int32_t* ids, const int32_t* owners, const void* slots, float* out,
                               void* stream) {
  if (group->slot_bytes == 2)
    return run_blocks(tokens, group->hidden, reduce_shared<uint16_t>(),
                      Reduce<uint16_t>{*group, tile, tokens, step_capacity, ids, owners,
                                       static_cast<const uint16_t*>(slots), out},
                      stream);
  return run_blocks(
      tokens, group->hidden, reduce_shared<float>(),
      Reduce<float>{*group, tile, tokens, step_capacity, ids, owners, static_cast<const float*>(slots), out}, stream);
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
