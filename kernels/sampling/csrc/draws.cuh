// What the token of a row is drawn from: adjusted logits, their order and weights, noise. Scalar
// twins of sampling.cpp with its bits (the noise: but for the last bit of a double logarithm before
// it is rounded to float). Contract: kernels/sampling/sample_cuda.py.

#pragma once

#include "../../csrc/each.cuh"

namespace sampling {

constexpr int kMaxTop = 20;  // best ids beside the drawn one
constexpr int kOut = 4 + 2 * kMaxTop;
constexpr int kSummed = 1024;  // exponentials added in float before they join the total

enum Has : int32_t { kPenalties = 1, kBias = 2, kBans = 4, kStops = 8, kWords = 16 };
enum MaskState : int32_t { kMask = 1, kFree = 2 };
enum Sampling : int32_t { kToken = 1, kMissed = 2, kKept = 3 };  // what a row does behind its last position
constexpr int32_t kInPrompt = 1 << 30;  // beside the count in the output

struct Record {  // of a slot
  float temperature, top_p, min_p;
  int32_t top_k;
  float presence, frequency, repetition;
  int32_t has;
  uint64_t seed, sub_index;
  int32_t* table;    // allowed bits, stop bits, bias, counts, words: those that it has
  int32_t min_len;
  int32_t num_top;  // best ids; -1: no log-probabilities at all
};
static_assert(sizeof(Record) == 64, "as sample_cuda.py packs it");

struct Arguments {  // eight bytes each
  const float* logits;
  int64_t stride, num_ids, num_rows;
  int32_t* rows;  // [num_rows, 3]: slot, positions, Sampling
  const int32_t* starts;
  const Record* records;
  const int32_t* states;
  const uint32_t* masks;
  int64_t mask_words;
  double unit;   // weight of the best id
  int32_t* out;  // planes of out_rows: token, whether it is one, logprob, best ids; then these by row
  int64_t out_rows;
  uint64_t* scratch;
};
static_assert(sizeof(Arguments) == 14 * 8, "as sample_cuda.py packs it");

// ---------------------------------------------------------------- order

constexpr uint32_t kLastId = 0x7fffffffu;

BOTH uint32_t ordered(float x) {  // sorts like x
  const uint32_t bits = each::bits_of(x + 0.0f);  // -0 ties with 0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
BOTH float unordered(uint32_t bits) { return each::from_bits(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu)); }
// Sorts like (logit, then lower id first).
BOTH uint64_t order_key(float x, int64_t id) {
  return static_cast<uint64_t>(ordered(x)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
BOTH int64_t key_id(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }
BOTH float key_logit(uint64_t key) { return unordered(static_cast<uint32_t>(key >> 32)); }
BOTH bool is_finite(float x) { return (each::bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// ---------------------------------------------------------------- noise

BOTH uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Block `number` of Philox4x64-10: eight words.
BOTH void philox(const Record& own, uint64_t position, uint64_t number, uint32_t (&words)[8]) {
  uint64_t c0 = number, c1 = position, c2 = 0, c3 = 0, k0 = own.seed, k1 = own.sub_index;
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(k0), "+l"(k1));  // keys of rounds are cheaper to make again than to keep
#endif
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = high_product(c0, 0xD2E7470EE14C6C93u), first_low = c0 * 0xD2E7470EE14C6C93u;
    const uint64_t second = high_product(c2, 0xCA5A826395121157u), second_low = c2 * 0xCA5A826395121157u;
    c0 = second ^ c1 ^ k0, c1 = second_low;
    c2 = first ^ c3 ^ k1, c3 = first_low;
    k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
  }
  const uint64_t block[4] = {c0, c1, c2, c3};
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) words[2 * i] = static_cast<uint32_t>(block[i]), words[2 * i + 1] = static_cast<uint32_t>(block[i] >> 32);
}

BOTH float gumbel(uint32_t word) {
  return static_cast<float>(-log(-log((static_cast<double>(word) + 0.5) * 0x1p-32)));
}
constexpr float kLeastGumbel = -3.14f, kMostGumbel = 22.9f;

// ---------------------------------------------------------------- a row

struct Row {
  Record own;
  const float* x;
  int64_t n;
  int64_t position;  // of the token that is drawn
  const uint32_t *mask, *allowed, *stops;  // null: all ids, all ids, none
  const float* bias;
  int32_t *counts, *words;  // null: none
  bool draws;

  BOTH bool filters() const {
    return own.temperature > 0 && (own.top_k > 0 || own.top_p < 1.0f || own.min_p > 0);
  }
  BOTH bool bans() const { return mask || allowed || stops || words; }
  BOTH bool wants_logprobs() const { return own.num_top >= 0; }

  // A logit v after the penalties for an id that was there.
  BOTH float penalised(float v, int32_t found) const {
    const int32_t count = found & (kInPrompt - 1);
    v = v > 0 ? v / own.repetition : v * own.repetition;
    v = v - own.frequency * static_cast<float>(count);
    return v - own.presence * (count > 0 ? 1.0f : 0.0f);
  }
  // Id i's logit after penalties and bias; its bans come beside them.
  BOTH float adjusted(int64_t i, float v) const {
    if (counts && counts[i]) v = penalised(v, counts[i]);
    return bias ? v + bias[i] : v;
  }
  // Bits of the ids that may be sampled, of word i of the vocabulary, but for the words.
  BOTH uint32_t may(int64_t i) const {
    uint32_t bits = 0xffffffffu;
    if (mask) bits &= mask[i];
    if (allowed) bits &= allowed[i];
    if (stops) bits &= ~stops[i];
    return bits;
  }
  // words: how many, length of the ring, tokens that went into it; the ring; where each word
  // begins, and one more; their ids.
  BOTH int32_t num_words() const { return words ? words[0] : 0; }
  // The id that word w bans now; -1: none.
  BOTH int32_t banned_by(int32_t w) const {
    const int32_t num = words[0], ring = words[1], filled = words[2];
    const int32_t *recent = words + 3, *begins = recent + ring, *ids = begins + num + 1;
    const int32_t first = begins[w], before = begins[w + 1] - 1 - first;
    if (filled < before) return -1;
    for (int32_t i = 0; i < before; ++i)
      if (recent[(filled - before + i) % ring] != ids[first + i]) return -1;
    return ids[first + before];
  }
  BOTH void remember(int32_t token) const {  // what was drawn counts for the next draw
    if (counts) counts[token] += 1;
    if (words) words[3 + words[2] % words[1]] = token, words[2] += 1;
  }
};

BOTH Row row_of(const Arguments& a, int64_t r) {
  Row row{};
  const int32_t slot = a.rows[3 * r], state = a.states[r];
  row.draws = slot >= 0 && a.rows[3 * r + 2] == kToken && (state == kMask || state == kFree);
  if (!row.draws) return row;
  row.own = a.records[slot];
  row.x = a.logits + r * a.stride;
  row.n = a.num_ids;
  row.position = a.starts[r] + a.rows[3 * r + 1];
  if (state == kMask) row.mask = a.masks + r * a.mask_words;
  const int64_t bits = (a.num_ids + 31) / 32;
  int32_t* part = row.own.table;
  const int32_t has = row.own.has;
  if (has & kBans) row.allowed = reinterpret_cast<const uint32_t*>(part), part += bits;
  if (has & kStops) {
    if (row.position < row.own.min_len) row.stops = reinterpret_cast<const uint32_t*>(part);
    part += bits;
  }
  if (has & kBias) row.bias = reinterpret_cast<const float*>(part), part += a.num_ids;
  if (has & kPenalties) row.counts = part, part += a.num_ids;
  if (has & kWords) row.words = part;
  return row;
}

// ---------------------------------------------------------------- filters

// e^x for x <= 0 within 2e-15; 0 below -700.
BOTH double exp_down(double x) {
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shifted = clamped * 1.4426950408889634 + 0x1.8p52, whole = shifted - 0x1.8p52;
  const double r = fma(whole, -0x1.a39ef35793c76p-33, fma(whole, -0x1.62e42feep-1, clamped));
  double p = 1.0 / 479001600;
  p = fma(p, r, 1.0 / 39916800), p = fma(p, r, 1.0 / 3628800), p = fma(p, r, 1.0 / 362880);
  p = fma(p, r, 1.0 / 40320), p = fma(p, r, 1.0 / 5040), p = fma(p, r, 1.0 / 720), p = fma(p, r, 1.0 / 120);
  p = fma(p, r, 1.0 / 24), p = fma(p, r, 1.0 / 6), p = fma(p, r, 0.5), p = fma(p, r, 1.0), p = fma(p, r, 1.0);
  int64_t bits, power, magic;
  const double zero = 0x1.8p52;
  memcpy(&bits, &p, 8), memcpy(&power, &shifted, 8), memcpy(&magic, &zero, 8);
  bits += static_cast<int64_t>(static_cast<uint64_t>(power - magic) << 52);
  double y;
  memcpy(&y, &bits, 8);
  return x < -700.0 ? 0.0 : y;
}

// Weights are whole units, so that their sums depend on no order.
struct Weights {
  float best, reach;  // what lies further below weighs less than half a unit of any size
  double inverse, unit, min_p;

  BOTH Weights(const Row& row, float best_logit, double best_weight)
      : best(best_logit),
        reach(38.0f * row.own.temperature),
        inverse(1.0 / static_cast<double>(row.own.temperature)),
        unit(best_weight),
        min_p(row.own.min_p) {}

  BOTH double of(float v) const { return exp_down(-static_cast<double>(best - v) * inverse); }
  // Whether min_p keeps an adjusted logit that is not banned.
  BOTH bool keeps(float v) const { return min_p <= 0.0 || of(v) >= min_p; }
  BOTH uint64_t operator()(float v) const {
    return best - v > reach ? 0 : static_cast<uint64_t>(of(v) * unit + 0.5);
  }
};

// What top_p of `kept` units is: at least one, and no more than there are.
BOTH uint64_t needed(float top_p, uint64_t kept) {
  const double least = ceil(static_cast<double>(top_p) * static_cast<double>(kept));
  const uint64_t whole = static_cast<uint64_t>(least);
  return whole < 1 ? 1 : whole > kept ? kept : whole;
}

// ---------------------------------------------------------------- results

BOTH void write_nothing(const Arguments& a, int64_t r) {
  if (a.rows[3 * r + 2] == kKept && a.rows[3 * r] >= 0) return;  // what an earlier call wrote
  for (int64_t plane = 0; plane < 4; ++plane) a.out[plane * a.out_rows + r] = 0;
  int32_t& what = a.rows[3 * r + 2];
  const int32_t state = a.states[r];
  if (what == kToken && state != kMask && state != kFree) what = kMissed;
}
BOTH void write_token(const Arguments& a, int64_t r, int64_t token) {
  a.out[r] = static_cast<int32_t>(token), a.out[a.out_rows + r] = 1;
  a.out[2 * a.out_rows + r] = 0, a.out[3 * a.out_rows + r] = 0;
}
BOTH void write_logprob(const Arguments& a, int64_t r, float logprob, int32_t num_top) {
  a.out[2 * a.out_rows + r] = static_cast<int32_t>(each::bits_of(logprob));
  a.out[3 * a.out_rows + r] = num_top;
}
BOTH void write_top(const Arguments& a, int64_t r, int32_t place, int32_t id, float logprob) {
  a.out[4 * a.out_rows + r * kMaxTop + place] = id;
  a.out[(4 + kMaxTop) * a.out_rows + r * kMaxTop + place] = static_cast<int32_t>(each::bits_of(logprob));
}

}  // namespace sampling
