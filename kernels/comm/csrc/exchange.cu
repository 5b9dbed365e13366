// Dispatch and combine by one-sided writes into the windows of the other ranks. See
// kernels/comm/one_sided.py.
//
// A rank writes where its peer will read, then releases a flag of the peer; nobody ever asks for
// anything. Flags hold the number of the exchange and are never reset. Buffers alternate between
// two sets: a rank sends exchange n + 2 after it has seen every other rank send n + 1, which that one
// does behind its last read of exchange n. So nothing is overwritten before it was read, without a
// barrier. Whoever waits gives up after a while, or when told to, and says for whom it waited.
//
// One source for the device and for a host, where a thread stands for a rank, as in each.cuh.

#include "each.cuh"

#ifndef __CUDACC__
#include <sched.h>
#include <time.h>

#include <vector>
#endif

namespace exchange {

constexpr uint64_t kAlign = 128;
constexpr int64_t kMostParts = 8;  // of what a rank sends in an exchange, each with a flag of its own

struct Group {  // mirrored by kernels/comm/one_sided.py
  int64_t rank, ranks;
  int64_t capacity;  // tokens of a rank and step for which the windows have room
  int64_t hidden, top_k;
  int64_t is_fp8;      // rows travel as e4m3 with a scale for each 32; else as float32
  int64_t slot_bytes;  // of an element on its way back: 4 or 2 (bfloat16)
  int64_t is_fast;     // sums of a rank travel back, not single slots
  int64_t patience_ns;
  uint8_t* const* windows;  // [ranks], ours among them
  uint32_t* state;  // kSent is the first of kMostParts words: blocks of the part that have ended
  uint32_t* status;
  int32_t* places;  // [capacity, top_k]: where the rank of each slot has the token

  BOTH int64_t row_bytes() const { return is_fp8 ? hidden + hidden / 32 : 4 * hidden; }
  BOTH int64_t row_stride() const { return (row_bytes() + 15) / 16 * 16; }
  BOTH int64_t meta_words() const { return 2 * top_k + 2; }  // ids, weights, token, order of the rank
  BOTH int64_t back_stride() const { return hidden * slot_bytes; }
  BOTH static uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  // Parts of a window, in this order. The other ranks' parts in ours, ours in theirs.
  BOTH uint64_t sent_flags_bytes() const { return aligned(4 * ranks * kMostParts); }
  BOTH uint64_t back_flags_bytes() const { return aligned(4 * ranks * capacity); }
  BOTH uint64_t flags_bytes() const { return sent_flags_bytes() + back_flags_bytes(); }
  BOTH uint64_t heads_bytes() const { return aligned(2 * 8 * ranks); }
  BOTH uint64_t meta_bytes() const { return aligned(4 * ranks * capacity * meta_words()); }
  BOTH uint64_t rows_bytes() const { return aligned(ranks * capacity * row_stride()); }
  BOTH uint64_t back_bytes() const { return aligned(capacity * top_k * back_stride()); }

  BOTH uint32_t* sent_flag(int64_t at, int64_t from, int64_t part) const {
    return reinterpret_cast<uint32_t*>(windows[at]) + from * kMostParts + part;
  }
  BOTH uint32_t* back_flag(int64_t at, int64_t from, int64_t block) const {
    return reinterpret_cast<uint32_t*>(windows[at] + sent_flags_bytes()) + from * capacity + block;
  }
  BOTH uint32_t* head(int64_t at, uint32_t parity, int64_t from) const {  // tokens sent, tag
    return reinterpret_cast<uint32_t*>(windows[at] + flags_bytes()) + 2 * (parity * ranks + from);
  }
  BOTH uint32_t* meta(int64_t at, uint32_t parity, int64_t from, int64_t place) const {
    uint8_t* base = windows[at] + flags_bytes() + heads_bytes() + parity * meta_bytes();
    return reinterpret_cast<uint32_t*>(base) + (from * capacity + place) * meta_words();
  }
  BOTH uint8_t* row(int64_t at, uint32_t parity, int64_t from, int64_t place) const {
    uint8_t* base = windows[at] + flags_bytes() + heads_bytes() + 2 * meta_bytes() + parity * rows_bytes();
    return base + (from * capacity + place) * row_stride();
  }
  BOTH uint8_t* back(int64_t at, uint32_t parity, int64_t token, int64_t slot) const {
    uint8_t* base =
        windows[at] + flags_bytes() + heads_bytes() + 2 * (meta_bytes() + rows_bytes()) + parity * back_bytes();
    return base + (token * top_k + slot) * back_stride();
  }
  BOTH uint64_t window_bytes() const {
    return flags_bytes() + heads_bytes() + 2 * (meta_bytes() + rows_bytes() + back_bytes());
  }
};

}  // namespace exchange

namespace {

using namespace each;
using exchange::Group;

constexpr int kThreads = 256;
constexpr int kWaitRounds = 64;  // between looks at the clock
constexpr int kRestRounds = 4;   // between rests: thousands of threads that ask at once delay the writers
enum State { kBegun, kArrived, kFailed, kTag, kSent };              // words of a rank, on its device
enum Status { kStop, kCode, kExchange, kFrom, kBlock, kTheirTag };  // words that its host sees
enum Code : uint32_t { kFine, kLate, kStopped, kElsewhere };
constexpr uint32_t kApart = 2;  // in kFailed: nobody else takes part; sums are 0

// ---------------------------------------------------------------- blocks of threads, or one

struct alignas(16) Quad {
  uint32_t word[4];
};

struct Block {
  int64_t index;
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
DEVICE uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
DEVICE void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
DEVICE void publish() { __threadfence_system(); }
DEVICE bool swap(uint32_t* word, uint32_t from, uint32_t to) { return atomicCAS(word, from, to) == from; }
DEVICE int add(int* counter, int value) { return atomicAdd(counter, value); }  // what it was
DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
DEVICE void rest() { __nanosleep(64); }

template <class Work>
__global__ void __launch_bounds__(kThreads) blocks_kernel(const Work work) {
  extern __shared__ uint4 shared[];
  work(Block{blockIdx.x, static_cast<int>(threadIdx.x), kThreads, reinterpret_cast<uint8_t*>(shared)});
}
template <class Work>
int run_blocks(int64_t count, int64_t shared_bytes, const Work& work, void* stream) {
  if (count > 0)
    blocks_kernel<<<count, kThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}
template <class Work>
int prepare(int64_t shared_bytes) {  // loads the code: later would be behind kernels that wait
  const int error =
      cudaFuncSetAttribute(blocks_kernel<Work>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  return error;
}
#else
#define DEVICE inline
DEVICE uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
DEVICE void store_release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
DEVICE void publish() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE bool swap(uint32_t* word, uint32_t from, uint32_t to) {
  return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
DEVICE int add(int* counter, int value) {
  const int before = *counter;
  *counter = before + value;
  return before;
}
DEVICE uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}
DEVICE void rest() { sched_yield(); }

template <class Work>
int run_blocks(int64_t count, int64_t shared_bytes, const Work& work, void*) {
  std::vector<Quad> shared(shared_bytes / sizeof(Quad) + 1);
  for (int64_t block = 0; block < count; ++block)
    work(Block{block, 0, 1, reinterpret_cast<uint8_t*>(shared.data())});
  return 0;
}
template <class Work>
int prepare(int64_t) {
  return 0;
}
#endif

DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t bytes, const Block& block) {  // of whole quads
  constexpr int kAtOnce = 4;
  const int64_t quads = bytes / 16;
  for (int64_t i = block.thread; i < quads; i += kAtOnce * block.threads) {
    Quad held[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      held[n] = reinterpret_cast<const Quad*>(from)[least(i + n * block.threads, quads - 1)];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (i + n * block.threads < quads) reinterpret_cast<Quad*>(to)[i + n * block.threads] = held[n];
  }
}

// The first failure of a group is the one that is reported; nothing waits behind it any more.
DEVICE void fail(const Group& group, uint32_t code, uint32_t exchange, int64_t from, int64_t where) {
  if (!swap(&group.state[kFailed], 0, 1)) return;
  group.status[kExchange] = exchange;
  group.status[kFrom] = static_cast<uint32_t>(from);
  group.status[kBlock] = static_cast<uint32_t>(where);
  publish();
  store_release(&group.status[kCode], code);
}

// Until `flag` has come to `exchange`.
DEVICE void wait(const Group& group, const uint32_t* flag, uint32_t exchange, int64_t from, int64_t where) {
  const uint64_t begin = now_ns();
  for (int round = 1; static_cast<int32_t>(load_acquire(flag) - exchange) < 0; ++round) {
    if (round % kRestRounds == 0) rest();
    if (round % kWaitRounds) continue;
    if (load_acquire(&group.state[kFailed])) return;
    if (load_acquire(&group.status[kStop])) return fail(group, kStopped, exchange, from, where);
    if (now_ns() - begin > static_cast<uint64_t>(group.patience_ns))
      return fail(group, kLate, exchange, from, where);
  }
}

DEVICE bool has_failed(const Group& group) { return load_acquire(&group.state[kFailed]) != 0; }

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

// ---------------------------------------------------------------- dispatch

BOTH int64_t num_parts(int64_t blocks) { return least(blocks, exchange::kMostParts); }

// A block sends `tile` tokens. Within the window of a rank, tokens lie in their order, without gaps.
template <class In>
struct Send {
  Group group;
  int64_t tile, blocks, tokens;
  const In* x;           // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]; negative: not wanted by anybody
  const float* weights;  // [tokens, top_k]
  const int32_t* owners;

  DEVICE int owner(int64_t token, int64_t slot) const {
    const int32_t id = ids[token * group.top_k + slot];
    return id < 0 ? -1 : owners[id];
  }
  DEVICE bool is_first(int64_t token, int64_t slot, int rank) const {  // of the slots of that rank
    for (int64_t k = 0; k < slot; ++k)
      if (owner(token, k) == rank) return false;
    return rank >= 0;
  }
  DEVICE uint32_t order(int64_t token, int rank) const {  // among the ranks of the token
    uint32_t before = 0;
    for (int64_t k = 0; k < group.top_k; ++k) {
      const int other = owner(token, k);
      before += other < rank && is_first(token, k, other);
    }
    return before;
  }

  DEVICE void operator()(const Block& block) const {
    if (has_failed(group)) return;  // the others find out by waiting
    int* const counts = reinterpret_cast<int*>(block.shared);  // tokens that each rank has so far
    uint8_t* const row = block.shared + (4 * group.ranks + 15) / 16 * 16;
    const uint32_t exchange = group.state[kBegun] + 1, parity = exchange & 1;
    const int64_t begin = least(block.index * tile, tokens), end = least(begin + tile, tokens);
    for (int64_t r = block.thread; r < group.ranks; r += block.threads) counts[r] = 0;
    block.sync();
    for (int64_t t = block.thread; t < begin; t += block.threads)
      for (int64_t k = 0; k < group.top_k; ++k)
        if (const int to = owner(t, k); is_first(t, k, to)) add(&counts[to], 1);
    block.sync();
    for (int64_t t = begin; t < end; ++t) {
      pack(x + t * group.hidden, row, block);
      block.sync();
      for (int64_t k = 0; k < group.top_k; ++k) {
        const int to = owner(t, k);
        if (!is_first(t, k, to)) continue;
        copy(group.row(to, parity, group.rank, counts[to]), row, group.row_stride(), block);
        uint32_t* const meta = group.meta(to, parity, group.rank, counts[to]);
        for (int64_t i = block.thread; i < group.meta_words(); i += block.threads) meta[i] = meta_word(t, to, i);
      }
      block.sync();
      for (int64_t k = block.thread; k < group.top_k; k += block.threads)
        if (const int to = owner(t, k); to >= 0) group.places[t * group.top_k + k] = counts[to];
      block.sync();
      for (int64_t k = block.thread; k < group.top_k; k += block.threads)
        if (const int to = owner(t, k); is_first(t, k, to)) counts[to] += 1;
      block.sync();
    }
    announce(block, counts, exchange);
  }

  // The last block of all says how many tokens each rank got. Whichever block of a part ends last
  // raises the part's flag at all ranks, behind what the others have written.
  DEVICE void announce(const Block& block, const int* counts, uint32_t exchange) const {
    if (block.index == blocks - 1)
      for (int64_t to = block.thread; to < group.ranks; to += block.threads) {
        uint32_t* const head = group.head(to, exchange & 1, group.rank);
        head[0] = counts[to], head[1] = group.state[kTag];
      }
    publish();
    block.sync();
    const int64_t parts = num_parts(blocks), part = block.index * parts / blocks;
    const int64_t first = (part * blocks + parts - 1) / parts, behind = ((part + 1) * blocks + parts - 1) / parts;
    int* const ended = reinterpret_cast<int*>(group.state) + kSent + part;
    int* const is_last = reinterpret_cast<int*>(block.shared);
    if (block.thread == 0) *is_last = add(ended, 1) == behind - first - 1;
    block.sync();
    if (!*is_last) return;
    publish();
    if (block.thread == 0) *ended = 0;
    for (int64_t to = block.thread; to < group.ranks; to += block.threads)
      store_release(group.sent_flag(to, group.rank, part), exchange);
  }

  DEVICE uint32_t meta_word(int64_t token, int to, int64_t i) const {
    const int64_t k = group.top_k;
    if (i < k) return owner(token, i) == to ? ids[token * k + i] : ~0u;  // whoever holds it knows
    if (i < 2 * k) return bits_of(weights[token * k + i - k]);
    return i == 2 * k ? static_cast<uint32_t>(token) : order(token, to);
  }

  // As it travels. A thread has a group of 32.
  DEVICE void pack(const In* from, uint8_t* row, const Block& block) const {
    for (int64_t g = block.thread; g < group.hidden / 32; g += block.threads) {
      float values[32];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const auto some = load<8>(from + 32 * g + 8 * part);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[8 * part + i] = value_of(some.element[i]);
      }
      if (!group.is_fp8) {
#pragma unroll
        for (int i = 0; i < 32; ++i) reinterpret_cast<float*>(row)[32 * g + i] = values[i];
        continue;
      }
      float most = 0.0f;
      bool has_nan = false;
#pragma unroll
      for (int i = 0; i < 32; ++i) most = vmax(most, fabsf(values[i])), has_nan |= values[i] != values[i];
      const float scale = scale_of(most, kFp8);
      row[group.hidden + g] = has_nan || most == INFINITY ? 255 : static_cast<uint8_t>(bits_of(scale) >> 23);
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        Quad codes{};
#pragma unroll
        for (int i = 0; i < 16; ++i)
          codes.word[i / 4] |= static_cast<uint32_t>(e4m3_code(in_units(values[16 * quad + i], scale, kFp8)))
                               << 8 * (i % 4);
        reinterpret_cast<Quad*>(row)[2 * g + quad] = codes;
      }
    }
  }
};

// A block takes `tile` places of a source in.
template <class Out>
struct Receive {
  Group group;
  int64_t tile, blocks, step_capacity;
  Out* x;          // [ranks, step_capacity, hidden]; rows behind a rank's last token are left alone
  int32_t* ids;    // [ranks, step_capacity, top_k]; -1 where nothing came, and of others' experts
  float* weights;  // [ranks, step_capacity, top_k]
  int32_t* counts;  // [ranks]

  DEVICE void operator()(const Block& block) const {
    const uint32_t exchange = group.state[kBegun] + 1, parity = exchange & 1;
    const int64_t from = block.index / blocks, begin = block.index % blocks * tile;
    for (int64_t part = block.thread; part < num_parts(blocks); part += block.threads)
      wait(group, group.sent_flag(group.rank, from, part), exchange, from, part);
    block.sync();
    const uint32_t* const head = group.head(group.rank, parity, from);
    if (block.thread == 0 && !has_failed(group) && head[1] != group.state[kTag]) {
      group.status[kTheirTag] = head[1];
      fail(group, kElsewhere, exchange, from, 0);
    }
    block.sync();
    const int64_t count = has_failed(group) ? 0 : head[0];
    block.sync();
    if (block.thread == 0 && begin == 0) {
      counts[from] = static_cast<int32_t>(count);
      if (from == 0) group.state[kArrived] = exchange;
    }
    for (int64_t place = begin; place < least(begin + tile, step_capacity); ++place) {
      const int64_t at = from * step_capacity + place, k = group.top_k;
      const uint32_t* const meta = group.meta(group.rank, parity, from, place);
      for (int64_t i = block.thread; i < k; i += block.threads) {
        ids[at * k + i] = place < count ? static_cast<int32_t>(meta[i]) : -1;
        weights[at * k + i] = place < count ? from_bits(meta[k + i]) : 0.0f;
      }
      if (place < count) unpack(group.row(group.rank, parity, from, place), x + at * group.hidden, block);
    }
  }

  DEVICE void unpack(const uint8_t* row, Out* out, const Block& block) const {
    for (int64_t i = block.thread; i < group.hidden / 8; i += block.threads) {
      Pack<Out, 8> values;
      if (group.is_fp8) {
        const float scale = from_ue8m0(row[group.hidden + i / 4]);
        const auto codes = load<8>(row + 8 * i);
#pragma unroll
        for (int c = 0; c < 8; ++c) put(values.element[c], from_e4m3(codes.element[c]) * scale);
      } else {
        const auto floats = load<8>(reinterpret_cast<const float*>(row) + 8 * i);
#pragma unroll
        for (int c = 0; c < 8; ++c) put(values.element[c], floats.element[c]);
      }
      reinterpret_cast<Pack<Out, 8>*>(out)[i] = values;
    }
  }
};

// ---------------------------------------------------------------- combine

// A block sends the results of `tile` places back to their source.
template <class Slot>
struct Return {
  Group group;
  int64_t tile, blocks, step_capacity;
  const Slot* slots;  // [ranks, step_capacity, top_k, hidden]

  DEVICE void operator()(const Block& block) const {
    const uint32_t exchange = group.state[kArrived], parity = exchange & 1;
    if (block.thread == 0 && block.index == 0) group.state[kBegun] = exchange;
    if (has_failed(group)) return;
    const int64_t to = block.index / blocks, begin = block.index % blocks * tile;
    const int64_t end = least(begin + tile, group.head(group.rank, parity, to)[0]);
    if (begin >= end) return;  // nobody waits for these
    for (int64_t place = begin; place < end; ++place) {
      const uint32_t* const meta = group.meta(group.rank, parity, to, place);
      const Slot* const from = slots + (to * step_capacity + place) * group.top_k * group.hidden;
      const uint32_t token = meta[2 * group.top_k];
      if (group.is_fast) {
        add_up(meta, from, reinterpret_cast<Slot*>(group.back(to, parity, token, meta[2 * group.top_k + 1])), block);
        continue;
      }
      for (int64_t k = 0; k < group.top_k; ++k)
        if (meta[k] != ~0u)
          copy(group.back(to, parity, token, k), reinterpret_cast<const uint8_t*>(from + k * group.hidden),
               group.back_stride(), block);
    }
    block.sync();
    if (block.thread == 0) {
      publish();
      store_release(group.back_flag(to, group.rank, block.index % blocks), exchange);
    }
  }

  DEVICE void add_up(const uint32_t* meta, const Slot* from, Slot* to, const Block& block) const {
    for (int64_t i = block.thread; i < group.hidden / 8; i += block.threads) {
      float sum[8] = {};
      for (int64_t k = 0; k < group.top_k; ++k) {
        if (meta[k] == ~0u) continue;
        const auto some = load<8>(from + k * group.hidden + 8 * i);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += value_of(some.element[c]);
      }
      Pack<Slot, 8> values;
#pragma unroll
      for (int c = 0; c < 8; ++c) put(values.element[c], sum[c]);
      reinterpret_cast<Pack<Slot, 8>*>(to)[i] = values;
    }
  }
};

// A block adds up one of our own tokens: in ascending order of slots, or of ranks.
template <class Slot>
struct Reduce {
  Group group;
  int64_t tile;
  const int32_t *ids, *owners;
  float* out;  // [tokens, hidden]

  DEVICE void operator()(const Block& block) const {
    const uint32_t exchange = group.state[kArrived], parity = exchange & 1;
    const int64_t token = block.index, k = group.top_k;
    int64_t parts = 0;
    for (int64_t slot = 0; slot < k; ++slot) {
      const int32_t id = ids[token * k + slot];
      if (id < 0) continue;
      const int from = owners[id];
      bool is_new = true;
      for (int64_t other = 0; other < slot; ++other)
        is_new &= ids[token * k + other] < 0 || owners[ids[token * k + other]] != from;
      parts += group.is_fast ? is_new : 1;
      if (is_new && slot % block.threads == block.thread) {
        const int64_t tile_of = group.places[token * k + slot] / tile;
        wait(group, group.back_flag(group.rank, from, tile_of), exchange, from, tile_of);
      }
    }
    block.sync();
    const uint32_t failed = load_acquire(&group.state[kFailed]);
    const bool lost = failed != 0;
    const float nothing = failed == kApart ? 0.0f : NAN;
    for (int64_t i = block.thread; i < group.hidden / 8; i += block.threads) {
      float sum[8] = {};
      int64_t added = 0;
#pragma unroll 4
      for (int64_t slot = 0; slot < k && added < parts; ++slot) {
        if (!group.is_fast && ids[token * k + slot] < 0) continue;
        const auto some =
            load<8>(reinterpret_cast<const Slot*>(group.back(group.rank, parity, token, slot)) + 8 * i);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = added ? sum[c] + value_of(some.element[c]) : value_of(some.element[c]);
        added += 1;
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) out[token * group.hidden + 8 * i + c] = lost ? nothing : sum[c];
    }
  }
};

int64_t send_shared(const Group& group) { return (4 * group.ranks + 15) / 16 * 16 + group.row_stride(); }

}  // namespace

extern "C" int64_t exchange_window_bytes(const Group* group) { return group->window_bytes(); }

extern "C" int exchange_prepare(const Group* group) {
  const int64_t shared = send_shared(*group);
  for (const int error : {prepare<Send<float>>(shared), prepare<Send<uint16_t>>(shared), prepare<Receive<float>>(0),
                          prepare<Receive<uint16_t>>(0), prepare<Return<float>>(0), prepare<Return<uint16_t>>(0),
                          prepare<Reduce<float>>(0), prepare<Reduce<uint16_t>>(0)})
    if (error) return error;
  return 0;
}

extern "C" int exchange_send(const Group* group, int64_t tile, int64_t blocks, int64_t tokens, const void* x,
                             int64_t is_bf16, const int32_t* ids, const float* weights, const int32_t* owners,
                             void* stream) {
  const int64_t shared = send_shared(*group);
  if (is_bf16)
    return run_blocks(blocks, shared,
                      Send<uint16_t>{*group, tile, blocks, tokens, static_cast<const uint16_t*>(x), ids, weights, owners},
                      stream);
  return run_blocks(blocks, shared,
                    Send<float>{*group, tile, blocks, tokens, static_cast<const float*>(x), ids, weights, owners},
                    stream);
}

extern "C" int exchange_receive(const Group* group, int64_t tile, int64_t blocks, int64_t step_capacity, void* x,
                                int64_t is_bf16, int32_t* ids, float* weights, int32_t* counts, void* stream) {
  if (is_bf16)
    return run_blocks(
        group->ranks * blocks, 0,
        Receive<uint16_t>{*group, tile, blocks, step_capacity, static_cast<uint16_t*>(x), ids, weights, counts}, stream);
  return run_blocks(group->ranks * blocks, 0,
                    Receive<float>{*group, tile, blocks, step_capacity, static_cast<float*>(x), ids, weights, counts},
                    stream);
}

extern "C" int exchange_return(const Group* group, int64_t tile, int64_t blocks, int64_t step_capacity,
                               const void* slots, void* stream) {
  if (group->slot_bytes == 2)
    return run_blocks(group->ranks * blocks, 0,
                      Return<uint16_t>{*group, tile, blocks, step_capacity, static_cast<const uint16_t*>(slots)},
                      stream);
  return run_blocks(group->ranks * blocks, 0,
                    Return<float>{*group, tile, blocks, step_capacity, static_cast<const float*>(slots)}, stream);
}

extern "C" int exchange_reduce(const Group* group, int64_t tile, int64_t tokens, const int32_t* ids,
                               const int32_t* owners, float* out, void* stream) {
  if (group->slot_bytes == 2)
    return run_blocks(tokens, 0, Reduce<uint16_t>{*group, tile, ids, owners, out}, stream);
  return run_blocks(tokens, 0, Reduce<float>{*group, tile, ids, owners, out}, stream);
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
extern "C" int window_close(void* window) { return cudaIpcCloseMemHandle(window); }
#endif
