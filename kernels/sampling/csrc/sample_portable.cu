// Sampling, one thread a row: what sample.cu does, and what it is tested against. Contract:
// kernels/sampling/sample_cuda.py.

#include "draws.cuh"

namespace {

using namespace sampling;

struct Sample {
  Arguments a;

  BOTH void operator()(int64_t r) const {
    const Row row = row_of(a, r);
    write_nothing(a, r);
    if (!row.draws) return;
    bool finite = true;
    for (int64_t i = 0; i < row.n; ++i) finite &= is_finite(row.x[i]);
    const int64_t token = finite ? draw(row) : -1;
    if (token < 0) return;
    write_token(a, r, token);
    if (row.wants_logprobs()) logprobs(row, r, token);
    row.remember(static_cast<int32_t>(token));
  }

 private:
  BOTH static float logit(const Row& row, int64_t i) {
    if (row.bans()) {
      if (!(row.may(i / 32) >> (i % 32) & 1u)) return -INFINITY;
      for (int32_t w = 0; w < row.num_words(); ++w)
        if (row.banned_by(w) == i) return -INFINITY;
    }
    return row.adjusted(i, row.x[i]);
  }

  BOTH int64_t draw(const Row& row) const {
    uint64_t best = 0;
    for (int64_t i = 0; i < row.n; ++i) {
      const uint64_t key = order_key(logit(row, i), i);
      best = key > best ? key : best;
    }
    const float most = key_logit(best), temperature = row.own.temperature;
    if (!(most > -INFINITY)) return -1;
    if (!(temperature > 0)) return key_id(best);
    const uint64_t cut = row.filters() && is_finite(most) ? cut_key(row, most) : order_key(-INFINITY, kLastId);
    const float slack = 1e-3f * temperature + 1e-6f * fabsf(most);
    float top = -INFINITY;
    int64_t winner = -1;
    uint32_t words[8];
    for (int64_t i = 0; i < row.n; ++i) {
      if (i % 8 == 0) philox(row.own, row.position, i / 8 + 1, words);
      const float v = logit(row, i);
      if (order_key(v, i) < cut || v < top - (kMostGumbel * temperature + slack)) continue;
      const float score = v + gumbel(words[i % 8]) * temperature;
      if (score > top) top = score, winner = i;
    }
    return winner;
  }

  // The key of the last id that the filters keep.
  BOTH uint64_t cut_key(const Row& row, float best) const {
    const Weights weights(row, best, a.unit);
    uint64_t last = order_key(best, 0), num = 0, whole = 0;  // of what min_p keeps
    for (int64_t i = 0; i < row.n; ++i) {
      const float v = logit(row, i);
      if (!(v > -INFINITY) || !weights.keeps(v)) continue;
      num += 1, whole += weights(v);
      const uint64_t key = order_key(v, i);
      last = key < last ? key : last;
    }
    const int64_t top_k = row.own.top_k;
    if (top_k > 0 && static_cast<uint64_t>(top_k) < num) last = select(row, weights, last, false, top_k, whole);
    if (row.own.top_p < 1.0f) last = select(row, weights, last, true, needed(row.own.top_p, whole), whole);
    return last;
  }

  // The key of the last of the best ids that together are, or weigh, `need`, none of them below
  // `floor`. Digit by digit; `whole` becomes what they weigh.
  BOTH static uint64_t select(const Row& row, const Weights& weights, uint64_t floor, bool by_weight, uint64_t need,
                              uint64_t& whole) {
    uint64_t prefix = 0, above = 0;  // above: weight of the ids with larger digits
    for (int shift = 56; shift >= 0; shift -= 8) {
      uint64_t sums[256], counts[256];
      for (int d = 0; d < 256; ++d) sums[d] = counts[d] = 0;
      for (int64_t i = 0; i < row.n; ++i) {
        const float v = logit(row, i);
        const uint64_t key = order_key(v, i);
        if (key < floor || !(v > -INFINITY) || (shift < 56 && key >> (shift + 8) != prefix)) continue;
        sums[key >> shift & 255u] += weights(v), counts[key >> shift & 255u] += 1;
      }
      int d = 255;
      for (; d > 0; --d) {
        const uint64_t held = by_weight ? sums[d] : counts[d];
        if (held >= need) break;
        need -= held, above += sums[d];
      }
      prefix = prefix << 8 | static_cast<uint64_t>(d);
      if (shift == 0) whole = above + sums[d];
    }
    return prefix;
  }

  BOTH void logprobs(const Row& row, int64_t r, int64_t token) const {
    float best = row.x[0];
    for (int64_t i = 1; i < row.n; ++i) best = each::vmax(row.x[i], best);
    double total = 0.0;
    for (int64_t first = 0; first < row.n; first += kSummed) {
      float lanes[each::kLanes] = {};
      for (int64_t i = first; i < each::least(row.n, first + kSummed); ++i)
        lanes[i % each::kLanes] += each::exp_of(row.x[i] - best);
      total += each::sum_lanes(lanes);
    }
    const double norm = static_cast<double>(best) + log(total);
    const int32_t num_top = static_cast<int32_t>(each::least(row.own.num_top, each::least(row.n, kMaxTop)));
    write_logprob(a, r, static_cast<float>(static_cast<double>(row.x[token]) - norm), num_top);
    uint64_t last = ~0ull;
    for (int32_t place = 0; place < num_top; ++place) {
      uint64_t next = 0;
      for (int64_t i = 0; i < row.n; ++i) {
        const uint64_t key = order_key(row.x[i], i);
        if (key < last && key > next) next = key;
      }
      write_top(a, r, place, static_cast<int32_t>(key_id(next)),
                static_cast<float>(static_cast<double>(row.x[key_id(next)]) - norm));
      last = next;
    }
  }
};

struct Put {  // changed records into their places
  const int32_t* changes;  // [count, 17]: slot, record
  int32_t* records;

  BOTH void operator()(int64_t i) const {
    const int32_t* change = changes + i / 16 * 17;
    records[change[0] * 16 + i % 16] = change[1 + i % 16];
  }
};

}  // namespace

// `arguments`: sampling::Arguments, in host memory. Returns a cudaError_t.
extern "C" int sample(const void* logits, const Arguments* arguments, void* stream) {
  (void)logits;
  return for_each(arguments->num_rows, Sample{*arguments}, stream);
}

extern "C" int put_records(const void* changes, int64_t count, void* records, void* stream) {
  return for_each(count * 16, Put{static_cast<const int32_t*>(changes), static_cast<int32_t*>(records)}, stream);
}
