// State of requests by slot, and the index tensors of a decode step. Contract: kernels/step/slots_portable.py.

#ifndef __CUDACC__
#include <time.h>
#endif

#include "../../csrc/each.cuh"

namespace {

using namespace each;

constexpr int kRow = 3;  // of a step's row: slot, count, what it samples
enum Sampling : int32_t { kNothing = 0, kToken = 1, kMissed = 2 };
enum Flag : int32_t { kLive = 1, kFinite = 2, kDone = 4 };

BOTH int64_t now_ns() {
#ifdef __CUDA_ARCH__
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#elif !defined(__CUDACC__)
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
#else
  return 0;
#endif
}

// A slot of the pool for an entry of a table; -1 where there is none.
BOTH int32_t slot_of(const int32_t* blocks, int64_t entry, int64_t entries) {
  if (entry < 0) return -1;
  const int32_t block = blocks[entry / entries];
  return block < 0 ? -1 : static_cast<int32_t>(block * entries + entry % entries);
}

struct Stamp {
  int64_t* out;

  BOTH void operator()(int64_t) const { *out = now_ns(); }
};

struct Apply {
  const int32_t* changes;  // [count, 2]: where, what
  int32_t* state;

  BOTH void operator()(int64_t i) const { state[changes[2 * i]] = changes[2 * i + 1]; }
};

// Rows of a step that are still alive, with their first positions.
struct Begin {
  const int32_t *given, *done, *kv_len;
  int32_t *rows, *positions;
  int64_t* stamp;

  BOTH void operator()(int64_t i) const {
    if (i == 0 && stamp) *stamp = now_ns();
    int32_t slot = given[kRow * i];
    if (slot >= 0 && done[slot]) slot = -1;
    rows[kRow * i] = slot;
    rows[kRow * i + 1] = given[kRow * i + 1];
    rows[kRow * i + 2] = given[kRow * i + 2];
    positions[i] = slot < 0 ? -1 : kv_len[slot];
  }
};

struct Tokens {
  const int32_t *rows, *positions, *recent, *state_block, *global_blocks, *window_blocks;
  const int32_t *places, *drafts;  // null: no token stands behind a draft
  const int64_t* compressed_ids;
  const float *plain_cos, *plain_sin, *turned_cos, *turned_sin;
  int64_t num_drafts, first_spare, num_spare, order, max_blocks, block, window, half, width;
  int32_t* ids;
  int64_t* last_ids;
  int32_t *blocks, *state_blocks, *window_slots, *window_writes;
  float *plain_cos_out, *plain_sin_out, *turned_cos_out, *turned_sin_out;

  BOTH void operator()(int64_t i) const {
    const int64_t token = i / width, c = i % width, slot = rows[kRow * token], at = positions[token];
    const bool live = slot >= 0;
    const int64_t place = places && live ? places[token] : 0;
    const int32_t* window_table = window_blocks + slot * max_blocks;
    if (c == 0) {
      ids[token] = live ? newest(slot, place, 0) : 0;
      const int64_t pair = at / 2 - (at - place) / 2;  // each after the first one keeps to itself
      state_blocks[token] = !live ? -1 : pair ? first_spare + slot * num_spare + pair - 1 : state_block[slot];
      window_writes[token] = live ? slot_of(window_table, at, block) : -1;
    }
    if (c < order) {
      const int32_t id = live ? newest(slot, place, c) : -1;
      last_ids[token * order + c] = id < 0 ? -1 : compressed_ids[id];
    }
    if (c < max_blocks) blocks[token * max_blocks + c] = live && c <= at / block ? global_blocks[slot * max_blocks + c] : -1;
    if (c < window) window_slots[token * window + c] = live ? slot_of(window_table, at - window + 1 + c, block) : -1;
    if (c < half) {
      const int64_t to = token * half + c, from = at * half + c;
      plain_cos_out[to] = live ? plain_cos[from] : 0.0f;
      plain_sin_out[to] = live ? plain_sin[from] : 0.0f;
      turned_cos_out[to] = live ? turned_cos[from] : 0.0f;
      turned_sin_out[to] = live ? turned_sin[from] : 0.0f;
    }
  }
  // The id so far back from the one behind `place` drafts.
  BOTH int32_t newest(int64_t slot, int64_t place, int64_t back) const {
    return back < place ? drafts[slot * num_drafts + place - 1 - back] : recent[slot * order + back - place];
  }
};

struct Entries {
  const int32_t *rows, *positions, *global_blocks;
  const float *cos, *sin;
  int64_t max_blocks, block, ratio, top, half, width;
  int32_t *slots, *visible, *write_slots;
  float *cos_out, *sin_out;

  BOTH void operator()(int64_t i) const {
    const int64_t token = i / width, c = i % width, slot = rows[kRow * token], at = positions[token];
    const bool live = slot >= 0;
    const int64_t seen = live ? (at + 1) / ratio : 0, entries = block / ratio;
    const bool ends = live && (at + 1) % ratio == 0;
    const int32_t* table = global_blocks + slot * max_blocks;
    if (c == 0) {
      visible[token] = static_cast<int32_t>(seen);
      write_slots[token] = ends ? slot_of(table, seen - 1, entries) : -1;
    }
    if (c < top) slots[token * top + c] = c < seen ? slot_of(table, c, entries) : -1;
    if (c < half) {
      const int64_t to = token * half + c, from = (seen - 1) * ratio * half + c;
      cos_out[to] = ends ? cos[from] : 0.0f;
      sin_out[to] = ends ? sin[from] : 0.0f;
    }
  }
};

struct Advance {
  const int32_t *rows, *tokens, *finite, *max_len, *stops;
  int64_t order, num_stops, vocab_size;
  int32_t *kv_len, *done, *recent, *flags, *ends;
  int64_t* stamp;

  BOTH void operator()(int64_t i) const {
    const int32_t slot = rows[kRow * i], sampling = rows[kRow * i + 2];
    flags[i] = 0, ends[i] = 0;
    if (slot >= 0) {
      const int32_t end = kv_len[slot] + rows[kRow * i + 1];
      kv_len[slot] = sampling == kMissed ? end - 1 : end;  // the last position comes again
      flags[i] = kLive | (sampling == kToken ? take(slot, end, tokens[i], finite[i] != 0) : 0);
      ends[i] = kv_len[slot];
    }
    if (i == 0 && stamp) *stamp = now_ns();
  }
  BOTH int32_t take(int64_t slot, int32_t end, int32_t token, bool usable) const {
    if (!usable || token < 0 || token >= vocab_size) {
      done[slot] = 1;
      return kDone;
    }
    int32_t* ids = recent + slot * order;
    for (int64_t c = order - 1; c > 0; --c) ids[c] = ids[c - 1];
    ids[0] = token;
    bool is_over = end + 1 >= max_len[slot];
    for (int64_t c = 0; c < num_stops; ++c) is_over |= stops[slot * num_stops + c] == token;
    if (is_over) done[slot] = 1;
    return kFinite | (is_over ? kDone : 0);
  }
};

}  // namespace

// `on`: anything on the device whose clock it is.
extern "C" int stamp(const void* on, int64_t* out, void* stream) {
  (void)on;
  return for_each(1, Stamp{out}, stream);
}

extern "C" int apply_changes(int32_t* state, const int32_t* changes, int64_t count, void* stream) {
  return for_each(count, Apply{changes, state}, stream);
}

extern "C" int begin_rows(int32_t* rows, int32_t* positions, const int32_t* given, int64_t count, const int32_t* done,
                          const int32_t* kv_len, int64_t* stamp, void* stream) {
  return for_each(count, Begin{given, done, kv_len, rows, positions, stamp}, stream);
}

extern "C" int plan_tokens(const int32_t* rows, const int32_t* positions, int64_t count, const int32_t* recent,
                           const int32_t* state_block, const int32_t* global_blocks, const int32_t* window_blocks,
                           const int32_t* places, const int32_t* drafts, int64_t num_drafts, int64_t first_spare,
                           int64_t num_spare, const int64_t* compressed_ids, const float* plain_cos, const float* plain_sin,
                           const float* turned_cos, const float* turned_sin, int64_t order, int64_t max_blocks,
                           int64_t block, int64_t window, int64_t half, int64_t width, int32_t* ids, int64_t* last_ids,
                           int32_t* blocks, int32_t* state_blocks, int32_t* window_slots, int32_t* window_writes,
                           float* plain_cos_out, float* plain_sin_out, float* turned_cos_out, float* turned_sin_out,
                           void* stream) {
  return for_each(count * width,
                  Tokens{rows, positions, recent, state_block, global_blocks, window_blocks, places, drafts,
                         compressed_ids, plain_cos, plain_sin, turned_cos, turned_sin, num_drafts, first_spare,
                         num_spare, order, max_blocks, block, window, half, width, ids, last_ids, blocks, state_blocks,
                         window_slots, window_writes, plain_cos_out, plain_sin_out, turned_cos_out, turned_sin_out},
                  stream);
}

extern "C" int plan_entries(const int32_t* rows, const int32_t* positions, int64_t count, const int32_t* global_blocks,
                            const float* cos, const float* sin, int64_t max_blocks, int64_t block, int64_t ratio,
                            int64_t top, int64_t half, int64_t width, int32_t* slots, int32_t* visible,
                            int32_t* write_slots, float* cos_out, float* sin_out, void* stream) {
  return for_each(count * width,
                  Entries{rows, positions, global_blocks, cos, sin, max_blocks, block, ratio, top, half, width, slots,
                          visible, write_slots, cos_out, sin_out},
                  stream);
}

extern "C" int advance_rows(const int32_t* rows, int64_t count, const int32_t* tokens, const int32_t* finite,
                            const int32_t* max_len, const int32_t* stops, int64_t order, int64_t num_stops,
                            int64_t vocab_size, int32_t* kv_len, int32_t* done, int32_t* recent, int32_t* flags,
                            int32_t* ends, int64_t* stamp, void* stream) {
  return for_each(count,
                  Advance{rows, tokens, finite, max_len, stops, order, num_stops, vocab_size, kv_len, done, recent,
                          flags, ends, stamp},
                  stream);
}
