// Attention and index scores of any shape. Contract: kernels/attention/sparse_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

struct Rows {
  const uint8_t* data;
  int64_t format, dim;
  BOTH float at(int64_t slot, int64_t c) const { return stored(data + slot * row_bytes(format, dim), format, dim, c); }
};

struct Source {
  Rows rows;
  const int64_t* slots;  // [tokens, width]
  int64_t width, none;
};

// The rows that a token has, without the ones that are not there: slot · 2 + (1 of the compressed).
struct List {
  Source window, compressed;
  int64_t* found;  // [tokens, width of both]
  int64_t* counts;

  BOTH void operator()(int64_t t) const {
    int64_t count = 0, width = window.width + compressed.width;
    for (int64_t i = 0; i < width; ++i) {
      const bool second = i >= window.width;
      const Source& from = second ? compressed : window;
      const int64_t slot = from.slots[t * from.width + (second ? i - window.width : i)];
      if (slot >= 0 && slot != from.none) found[t * width + count++] = slot * 2 + second;
    }
    counts[t] = count;
  }
};

struct Attention {
  const float* queries;
  int64_t heads, dim;
  Rows window, compressed;
  const int64_t *found, *counts;
  int64_t width;
  const float* sinks;
  bool bf16;
  float *weights, *totals, *out;  // weights [tokens, heads, width]

  BOTH float at(int64_t row, int64_t c) const { return (row & 1 ? compressed : window).at(row / 2, c); }
};

struct Scores : Attention {
  BOTH void operator()(int64_t i) const {
    const int64_t r = i % width, h = i / width % heads, t = i / width / heads;
    if (r >= counts[t]) return;
    const float* q = queries + (t * heads + h) * dim;
    const int64_t row = found[t * width + r];
    weights[i] = dot(dim, [&](int64_t c) { return q[c]; }, [&](int64_t c) { return at(row, c); });
  }
};

struct Weigh : Attention {
  BOTH void operator()(int64_t i) const {
    const int64_t count = counts[i / heads];
    float* own = weights + i * width;
    const float scale = 1.0f / sqrtf(static_cast<float>(dim)), sink = sinks[i % heads];
    float most = sink;
    for (int64_t r = 0; r < count; ++r) {
      own[r] *= scale;
      most = vmax(own[r], most);
    }
    float total = exp_of(sink - most);
    for (int64_t r = 0; r < count; ++r) {
      const float w = exp_of(own[r] - most);
      total += w;
      own[r] = rounded(w, bf16);
    }
    totals[i] = total;
  }
};

struct Values : Attention {
  BOTH void operator()(int64_t i) const {
    const int64_t c = i % dim, head = i / dim, t = head / heads;
    const float* own = weights + head * width;
    const int64_t* rows = found + t * width;
    const float sum = dot(counts[t], [&](int64_t r) { return own[r]; }, [&](int64_t r) { return at(rows[r], c); });
    out[i] = sum / totals[head];
  }
};

struct IndexScores {
  const float *queries, *head_weights;
  int64_t heads, dim;
  Rows keys;
  const int64_t* table;
  int64_t max_blocks, entries;
  const int64_t *rows, *visible;
  int64_t num_keys;
  bool bf16;
  float* scores;

  BOTH void operator()(int64_t i) const {
    const int64_t key = i % num_keys, t = i / num_keys;
    if (key >= visible[t]) {
      scores[i] = -INFINITY;
      return;
    }
    const int64_t block = table[rows[t] * max_blocks + key / entries];
    const int64_t slot = block < 0 ? 0 : block * entries + key % entries;
    float sum = 0.0f;
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = queries + (t * heads + h) * dim;
      float p = dot(dim, [&](int64_t c) { return q[c]; }, [&](int64_t c) { return keys.at(slot, c); });
      p = rounded(p, bf16);
      p = rounded(keep_nan(p, vmax(p, 0.0f)) * head_weights[t * heads + h], bf16);
      sum = h ? sum + p : p;
    }
    scores[i] = sum;
  }
};

}  // namespace

extern "C" int attend(const float* queries, int64_t tokens, int64_t heads, int64_t dim, const uint8_t* window,
                      int64_t window_format, int64_t window_none, const int64_t* window_slots, int64_t window_width,
                      const uint8_t* compressed, int64_t compressed_format, int64_t compressed_none,
                      const int64_t* compressed_slots, int64_t compressed_width, const float* sinks, int64_t bf16,
                      int64_t* found, int64_t* counts, float* weights, float* totals, float* out, void* stream) {
  const Source first{{window, window_format, dim}, window_slots, window_width, window_none};
  const Source second{{compressed, compressed_format, dim}, compressed_slots, compressed_width, compressed_none};
  const int64_t width = window_width + compressed_width;
  const Attention all{queries, heads,   dim,   first.rows, second.rows, found, counts,
                      width,   sinks, !!bf16, weights,    totals,      out};
  int error = for_each(tokens, List{first, second, found, counts}, stream);
  if (!error) error = for_each(tokens * heads * width, Scores{all}, stream);
  if (!error) error = for_each(tokens * heads, Weigh{all}, stream);
  if (!error) error = for_each(tokens * heads * dim, Values{all}, stream);
  return error;
}

extern "C" int index_scores(const float* queries, const float* head_weights, int64_t tokens, int64_t heads,
                            int64_t dim, const uint8_t* keys, int64_t format, const int64_t* table,
                            int64_t max_blocks, int64_t entries, const int64_t* rows, const int64_t* visible,
                            int64_t num_keys, int64_t bf16, float* scores, void* stream) {
  return for_each(tokens * num_keys,
                  IndexScores{queries, head_weights, heads, dim, {keys, format, dim}, table, max_blocks, entries, rows,
                              visible, num_keys, !!bf16, scores},
                  stream);
}
