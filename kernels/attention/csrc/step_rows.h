// Attention of a whole step: cache rows, compressed entries, index choice, attention over packed
// rows. Contracts: kernels/attention/step_rows.py.
#pragma once

#include "attend.h"
#include "attend_run.h"
#include "indexer.h"
#include "rotation.h"
#include "rows.h"
#include "step.h"

// Rotation of a step's positions: of layers with compressed rows, or of the others.
struct Angles {
    const float *cos, *sin;
    int64_t half;
    Angles(const Step& s, bool turned, int64_t half)
        : cos(turned ? s.turned_cos : s.plain_cos), sin(turned ? s.turned_sin : s.plain_sin), half(half) {}
    Turn at(int64_t position, bool inverse, float* space) const {
        return make_turn(cos + position * half, sin + position * half, half, inverse, space);
    }
};

INLINE void put_row(const float* x, int64_t dim, const float* weight, float eps, const Turn& turn,
                    bool bf16, RowFormat format, uint8_t* to) {
    float* row = scratch<1, float>(dim);
    if (weight) norm_row(x, weight, dim, eps, bf16, row), x = row;
    rotate_row(x, dim, turn, bf16, row);
    pack_row(row, dim, format, to);
}

// The norm of the low-rank query, if rank > 0, and rows of the pool's format behind it:
// x[token] = low-rank query [rank] | row [dim]; slot(token), negative: nowhere.
template <class Slot>
static void put_rows(const Step* s, const float* x, int64_t stride, int64_t rank, const float* q_norm,
                     float* low_rank, int64_t dim, const float* kv_norm, float eps, int64_t turned,
                     int64_t half, int64_t bf16, int64_t format, uint8_t* pool, const Slot& slot_of) {
    const Angles angles(*s, turned, half);
    const int64_t bytes = row_bytes((RowFormat)format, dim);
    parallel_ranges(s->num_tokens, s->threads, 8, [&](int64_t first, int64_t end) {
        float* space = scratch<0, float>(4 * half);
        for (int64_t t = first; t < end; t++) {
            const float* from = x + t * stride;
            if (rank) norm_row(from, q_norm, rank, eps, bf16, low_rank + t * rank);
            const int64_t slot = slot_of(t);
            if (slot < 0) continue;
            put_row(from + rank, dim, kv_norm, eps, angles.at(s->positions[t], false, space), bf16,
                    (RowFormat)format, pool + slot * bytes);
        }
    });
}

// Window rows of a layer.
EXPORT void step_window_rows(const Step* s, const float* x, int64_t stride, int64_t rank,
                             const float* q_norm, float* low_rank, int64_t dim, const float* kv_norm,
                             float eps, int64_t turned, int64_t half, int64_t bf16, int64_t format,
                             uint8_t* pool) {
    put_rows(s, x, stride, rank, q_norm, low_rank, dim, kv_norm, eps, turned, half, bf16, format, pool,
             [&](int64_t t) { return s->window_slot(s->row_of[t], s->positions[t]); });
}

// Rows of the blocks of a draft stage, which no later step reads: row t of `rows` is token t's.
EXPORT void step_block_rows(const Step* s, const float* x, int64_t stride, int64_t rank,
                            const float* q_norm, float* low_rank, int64_t dim, const float* kv_norm,
                            float eps, int64_t half, int64_t bf16, int64_t format, uint8_t* rows) {
    put_rows(s, x, stride, rank, q_norm, low_rank, dim, kv_norm, eps, false, half, bf16, format, rows,
             [](int64_t t) { return t; });
}

INLINE void pool_pair(const float* even, const float* even_gate, const float* odd,
                      const float* odd_gate, int64_t dim, bool bf16, float* out) {
    for (int64_t c = 0; c < dim; c += LANES) {
        const int64_t left = dim - c;
        F first = vsigmoid(load_part(even_gate + c, left) - load_part(odd_gate + c, left));
        F pooled = first * load_part(even + c, left) + (1.0f - first) * load_part(odd + c, left);
        store_part(out + c, bf16 ? round_bf16(pooled) : pooled, left);
    }
}

// Entries that this step's tokens complete, normed. At ratio 1 x[token] is the value [dim]; at ratio
// 2 value | gate, and `states` keeps the same of each row's last even token, also where its group is
// complete: the last position of a row that could not sample is computed again. Row `block` of it
// is `state_stride` floats behind the one before.
EXPORT void step_compress(const Step* s, const float* x, int64_t ratio, int64_t dim,
                          const float* norm, float eps, int64_t bf16, float* states,
                          int64_t state_stride, float* entries) {
    parallel_ranges(s->completing(ratio), s->threads, 8, [&](int64_t first, int64_t end) {
        for (int64_t g = first; g < end; g++) {
            const int64_t t = s->completing_token(ratio, g);
            float* entry = entries + g * dim;
            if (ratio == 1) {
                norm_row(x + t * dim, norm, dim, eps, bf16, entry);
                continue;
            }
            const int64_t row = s->row_of[t];
            const bool is_resumed = s->row_starts[row] == t;  // its even token was in an earlier step
            const float* odd = x + t * 2 * dim;
            const float* even = is_resumed ? states + s->state_blocks[row] * state_stride : odd - 2 * dim;
            pool_pair(even, even + dim, odd, odd + dim, dim, bf16, entry);
            norm_row(entry, norm, dim, eps, bf16, entry);
        }
    });
    for (int64_t row = 0; ratio == 2 && row < s->num_rows; row++) {
        const int64_t last = s->row_starts[row + 1] - 1;
        if (last < s->row_starts[row]) continue;
        const int64_t even = last - s->positions[last] % 2;
        if (even >= s->row_starts[row])
            std::memcpy(states + s->state_blocks[row] * state_stride, x + even * 2 * dim, 8 * dim);
    }
}

// Entries and their index keys, into the pools.
EXPORT void step_store_entries(const Step* s, int64_t ratio, const float* entries, int64_t dim,
                               const float* keys, int64_t key_dim, const float* key_norm, float eps,
                               int64_t half, int64_t bf16, int64_t format, uint8_t* pool,
                               int64_t key_format, uint8_t* key_pool) {
    const Angles angles(*s, true, half);
    const int64_t bytes = row_bytes((RowFormat)format, dim);
    const int64_t key_bytes = row_bytes((RowFormat)key_format, key_dim);
    parallel_ranges(s->completing(ratio), s->threads, 8, [&](int64_t first, int64_t end) {
        float* space = scratch<0, float>(4 * half);
        for (int64_t g = first; g < end; g++) {
            const int64_t t = s->completing_token(ratio, g), entry = s->visible(t, ratio) - 1;
            const int64_t slot = s->entry_slot(s->row_of[t], entry, ratio);
            if (slot < 0) continue;
            const Turn turn = angles.at(entry * ratio, false, space);
            put_row(entries + g * dim, dim, nullptr, eps, turn, bf16, (RowFormat)format,
                    pool + slot * bytes);
            put_row(keys + g * key_dim, key_dim, key_norm, eps, turn, bf16, (RowFormat)key_format,
                    key_pool + slot * key_bytes);
        }
    });
}

// The choice of tokens that see no more than `top_k` entries: all of them.
EXPORT void step_choose_all(const Step* s, int64_t ratio, int64_t top_k, int32_t* chosen,
                            int32_t* counts) {
    parallel_ranges(s->num_tokens, s->threads, 64, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            const int64_t visible = s->visible(t, ratio);
            counts[t] = (int32_t)std::min(visible, top_k);
            for (int64_t i = 0; visible <= top_k && i < visible; i++) chosen[t * top_k + i] = (int32_t)i;
        }
    });
}

enum Candidates : int64_t { IGNORE = 0, PUBLISH = 1, OBEY = 2 };
constexpr int64_t RUN_TOKENS = 16;  // of one row that share the keys that they look at

// Whether token t follows the one before it in one request: rows of the same blocks, too, since a
// request whose drafts are verified is cut into rows.
INLINE bool follows(const Step& s, int64_t t) {
    const int64_t before = s.row_of[t - 1], row = s.row_of[t];
    if (s.positions[t - 1] + 1 != s.positions[t]) return false;
    const auto same = [&](const int32_t* blocks, int64_t width) {
        return !std::memcmp(blocks + before * width, blocks + row * width, width * sizeof(int32_t));
    };
    return before == row ||
           (same(s.window_blocks, s.window_width) && same(s.global_blocks, s.global_width));
}

// Consecutive tokens of one request. `within_rows`: those of one row alone.
struct Run {
    int64_t first, count;
};
static std::vector<Run> crowded_runs(const Step& s, int64_t ratio, int64_t top_k, bool within_rows) {
    std::vector<Run> runs;
    for (int64_t t = 0; t < s.num_tokens; t++) {
        if (s.visible(t, ratio) <= top_k) continue;
        const bool joins = !runs.empty() && runs.back().first + runs.back().count == t &&
                           runs.back().count < RUN_TOKENS && follows(s, t) &&
                           (!within_rows || s.row_of[t - 1] == s.row_of[t]);
        if (joins)
            runs.back().count++;
        else
            runs.push_back({t, 1});
    }
    return runs;
}

// The choice of all other tokens, by score. `candidates[token]` are up to `num_blocks` blocks of
// `block_size` entries: a source publishes them, layers above choose among their entries.
EXPORT void step_choose(const Step* s, int64_t ratio, const float* queries, const float* weights,
                        int64_t heads, int64_t dim, float factor, int64_t half, int64_t bf16,
                        int64_t rounds, int64_t format, const uint8_t* pool, int64_t top_k,
                        int32_t* chosen, int32_t* counts, int64_t role, int64_t block_size,
                        int64_t num_blocks, int32_t* candidates, int32_t* candidate_counts) {
    const Angles angles(*s, true, half);
    const RowPool keys(pool, format, dim);
    const std::vector<Run> runs = crowded_runs(*s, ratio, top_k, role == OBEY);
    parallel((int64_t)runs.size(), s->threads, [&](int64_t job) {
        const Run run = runs[job];
        const int64_t row = s->row_of[run.first], last = run.first + run.count - 1;
        float* turned = scratch<6, float>(run.count * heads * dim);
        float* per_head = scratch<8, float>(run.count * heads);
        for (int64_t i = 0; i < run.count; i++) {
            const int64_t t = run.first + i;
            const Turn turn = angles.at(s->positions[t], false, scratch<0, float>(4 * half));
            for (int64_t h = 0; h < heads; h++) {
                float* to = turned + (i * heads + h) * dim;
                rotate_row(queries + (t * heads + h) * dim, dim, turn, bf16, to);
                if (rounds) round_row(to, dim, ROW_FP4_UE8M0);
                const float weight = weights[t * heads + h] * factor;
                per_head[i * heads + h] = bf16 ? round_bf16(splat(weight))[0] : weight;
            }
        }
        const IndexQueries query{turned, per_head, run.count, heads, dim, !!bf16};
        // One token looks at the entries of its candidate blocks alone; several look at all.
        const int32_t* blocks = candidates + run.first * num_blocks;
        const bool is_sparse = role == OBEY && run.count == 1;
        const auto entry = [&](int64_t i) {
            return is_sparse ? blocks[i / block_size] * block_size + i % block_size : i;
        };
        int64_t count = is_sparse ? candidate_counts[run.first] * block_size : s->visible(last, ratio);
        while (count > 0 && entry(count - 1) >= s->visible(last, ratio)) count--;
        float* scores = scratch<7, float>(run.count * count);
        score_keys(query, keys, count,
                   [&](int64_t i) { return std::max<int64_t>(0, s->entry_slot(row, entry(i), ratio)); },
                   scores, count);
        for (int64_t i = 0; i < run.count; i++) {
            const int64_t t = run.first + i, visible = s->visible(t, ratio);
            float* own = scores + i * count;
            int32_t* best = candidates + t * num_blocks;
            int64_t found = 0;
            if (role == PUBLISH) {
                select_blocks(own, visible, visible, block_size, num_blocks,
                              [&](int64_t b) { best[found++] = (int32_t)b; });
                candidate_counts[t] = (int32_t)found;
            } else if (role == OBEY && !is_sparse) {  // hide what lies between the blocks
                int64_t next = 0;
                for (int64_t b = 0; b <= candidate_counts[t]; b++) {
                    const bool is_end = b == candidate_counts[t];
                    const int64_t first = is_end ? visible : best[b] * block_size;
                    for (; next < std::min(first, visible); next++) own[next] = -INFINITY;
                    next = first + block_size;
                }
            }
            int32_t* picked = chosen + t * top_k;
            found = 0;
            select_best(own, is_sparse ? count : visible, top_k,
                        [&](int64_t k) { picked[found++] = (int32_t)entry(k); });
            counts[t] = (int32_t)found;
        }
    });
}

// All tokens in runs; those of several have whole windows.
static std::vector<Run> attention_runs(const Step& s, int64_t window_size) {
    std::vector<Run> runs;
    for (int64_t t = 0; t < s.num_tokens; t++) {
        const bool joins = !runs.empty() && runs.back().count < RUN_TOKENS &&
                           s.positions[runs.back().first] >= window_size - 1 &&
                           follows(s, t);
        if (joins)
            runs.back().count++;
        else
            runs.push_back({t, 1});
    }
    return runs;
}

// What attention of a step reads.
struct Attended {
    const Step& s;
    const RowPool recent, entries;
    int64_t window_size, ratio, top_k;
    const int32_t *chosen, *counts;

    // False: some position of the window has no slot.
    bool add_window(int64_t t, int64_t first, PoolRows& rows) const {
        bool is_whole = true;
        for (int64_t p = std::max<int64_t>(0, first); p <= s.positions[t]; p++) {
            const int64_t slot = s.window_slot(s.row_of[t], p);
            if (slot >= 0) rows.add(recent, slot);
            is_whole = is_whole && slot >= 0;
        }
        return is_whole;
    }
    void add_entries(int64_t t, PoolRows& rows) const {
        for (int64_t i = 0; ratio && i < counts[t]; i++) {
            const int64_t slot = s.entry_slot(s.row_of[t], chosen[t * top_k + i], ratio);
            if (slot >= 0) rows.add(entries, slot);
        }
    }
    int64_t window_start(int64_t t) const { return s.positions[t] - window_size + 1; }
};

// Entries of rows whose tokens look at each of them several times, unpacked once: as halves.
class SharedEntries {
   public:
    SharedEntries(const Attended& from, const std::vector<Run>& runs, int64_t dim)
        : dim_(dim), groups_(whole_groups(dim) / GROUP), first_(from.s.num_rows, -1) {
        const Step& s = from.s;
        int64_t count = 0;
        std::vector<int64_t> looks(s.num_rows, 0);
        for (const Run& run : runs)
            for (int64_t t = run.first; from.ratio && run.count > 1 && t < run.first + run.count; t++)
                looks[s.row_of[t]] += from.counts[t];
        for (int64_t row = 0; row < s.num_rows; row++) {
            const int64_t tokens = s.row_starts[row + 1] - s.row_starts[row];
            const int64_t visible = tokens && from.ratio ? s.visible(s.row_starts[row + 1] - 1, from.ratio) : 0;
            if (!visible || looks[row] < MIN_LOOKS * visible) continue;
            bool is_whole = true;
            for (int64_t e = 0; e < visible; e += BLOCK_TOKENS / from.ratio)
                is_whole = is_whole && s.entry_slot(row, e, from.ratio) >= 0;
            if (is_whole) first_[row] = count, count += visible;
        }
        if (!count) return;
        halves_ = scratch<15, uint16_t>(count * groups_ * GROUP);
        for (int64_t row = 0; row < s.num_rows; row++) {
            if (first_[row] < 0) continue;
            const int64_t visible = s.visible(s.row_starts[row + 1] - 1, from.ratio);
            parallel_ranges(visible, s.threads, 64, [&](int64_t begin, int64_t end) {
                for (int64_t e = begin; e < end; e++)
                    unpack_halves(from.entries.at(s.entry_slot(row, e, from.ratio)), dim_,
                                  from.entries.format, GROUP, at(row, e));
            });
        }
    }
    bool has(int64_t row) const { return first_[row] >= 0; }
    // Those that a token has chosen, as rows of tiles.
    template <int Tag>
    Operand gather(int64_t row, const int32_t* chosen, int64_t count) const {
        const Operand x = Operand::make<Tag>(count, dim_, true);
        for (int64_t i = 0; i < count; i++) {
            const uint16_t* from = at(row, chosen[i]);
            for (int64_t g = 0; g < groups_; g++)
                std::memcpy(x.halves(i, g), from + g * GROUP, GROUP * sizeof(uint16_t));
        }
        x.end();
        return x;
    }

   private:
    static constexpr int64_t MIN_LOOKS = 4;  // at an entry, on average
    uint16_t* at(int64_t row, int64_t entry) const {
        return halves_ + (first_[row] + entry) * groups_ * GROUP;
    }
    int64_t dim_, groups_;
    std::vector<int64_t> first_;  // of each row; negative: not here
    uint16_t* halves_ = nullptr;
};

constexpr int64_t MIN_SHARED = 4;  // tokens of a run, from which on they share their windows' rows

// A run in which each token has its whole window. False: it must go the other way.
template <class Turned, class Done>
static bool share_run(const Run& run, const Attended& from, const SharedEntries& shared, int64_t heads,
                      int64_t dim, const float* sinks, const Turned& turned, const Done& done) {
#if defined(HAVE_TILES)
    const int64_t window = from.window_size;
    if (!can_share(heads, dim, window)) return false;
    PoolRows recent(window + run.count, dim);
    if (!from.add_window(run.first + run.count - 1, from.window_start(run.first), recent)) return false;
    float* query = scratch<6, float>(run.count * heads * dim);
    for (int64_t i = 0; i < run.count; i++) turned(run.first + i, 0, heads, query + i * heads * dim);
    if (!are_halves(query, dim, run.count * heads, dim)) return false;
    const auto entries = [&](int64_t i) {
        const int64_t t = run.first + i, row = from.s.row_of[t];
        if (from.ratio && shared.has(row))
            return shared.gather<2>(row, from.chosen + t * from.top_k, from.counts[t]);
        PoolRows rows(from.top_k, dim);
        from.add_entries(t, rows);
        return rows.unpack<2>(true);
    };
    attend_run(query, run.count, heads, dim, recent, window, entries, sinks,
               [&](int64_t i, const float* result) { done(run.first + i, 0, heads, result); });
    return true;
#else
    return false;
#endif
}

// Queries turned, attention over the window and the chosen entries, the result turned back.
// ratio 0: no entries.
EXPORT void step_attention(const Step* s, const float* queries, int64_t heads, int64_t dim,
                           int64_t half, const float* sinks, int64_t bf16, int64_t window_size,
                           int64_t window_format, const uint8_t* window, int64_t ratio,
                           int64_t format, const uint8_t* compressed, int64_t top_k,
                           const int32_t* chosen, const int32_t* counts, float* out) {
    const Angles angles(*s, ratio != 0, half);
    const Attended from{*s, RowPool(window, window_format, dim), RowPool(compressed, format, dim),
                        window_size, ratio, ratio ? top_k : 0, chosen, counts};
    const auto turned = [&](int64_t t, int64_t first, int64_t some, float* to) {
        const Turn there = angles.at(s->positions[t], false, scratch<0, float>(4 * half));
        for (int64_t h = 0; h < some; h++)
            rotate_row(queries + (t * heads + first + h) * dim, dim, there, bf16, to + h * dim);
    };
    const auto turn_back = [&](int64_t t, int64_t first, int64_t some, const float* result) {
        const Turn back = angles.at(s->positions[t], true, scratch<0, float>(4 * half));
        for (int64_t h = 0; h < some; h++)
            rotate_row(result + h * dim, dim, back, bf16, out + (t * heads + first + h) * dim);
    };
    const auto attend_heads = [&](int64_t t, int64_t first, int64_t some) {
        PoolRows rows(window_size + from.top_k, dim);
        from.add_window(t, from.window_start(t), rows);
        from.add_entries(t, rows);
        float* query = scratch<6, float>(some * dim);
        float* to = out + (t * heads + first) * dim;
        turned(t, first, some, query);
        attend(query, some, dim, rows, sinks + first, bf16, to);
        turn_back(t, first, some, to);
    };
    if (s->num_tokens < s->threads) {  // heads are shared out; every part unpacks the rows anew
        const int64_t parts = (heads + LANES - 1) / LANES;
        return parallel(s->num_tokens * parts, s->threads, [&](int64_t job) {
            const int64_t first = job % parts * LANES;
            attend_heads(job / parts, first, std::min(LANES, heads - first));
        });
    }
    const std::vector<Run> runs = attention_runs(*s, window_size);
    const bool is_packed = tiles_ready() && bf16 && window_format != ROW_FLOAT && (!ratio || format != ROW_FLOAT);
    const SharedEntries shared(from, is_packed ? runs : std::vector<Run>(), dim);
    parallel((int64_t)runs.size(), s->threads, [&](int64_t job) {
        const Run run = runs[job];
        if (!is_packed || run.count < MIN_SHARED || !share_run(run, from, shared, heads, dim, sinks, turned, turn_back))
            for (int64_t t = run.first; t < run.first + run.count; t++) attend_heads(t, 0, heads);
    });
}

// Attention of draft blocks, `size` tokens each: all of them see the window's rows before the first
// one, and the rows of the whole block. sinks [size, heads].
EXPORT void step_block_attention(const Step* s, const float* queries, int64_t heads, int64_t dim,
                                 int64_t half, const float* sinks, int64_t bf16, int64_t window_size,
                                 int64_t format, const uint8_t* window, const uint8_t* block,
                                 int64_t size, float* out) {
    const Angles angles(*s, false, half);
    const RowPool recent(window, format, dim), own(block, format, dim);
    const int64_t parts = s->num_rows < s->threads ? size : 1, some = size / parts;
    parallel(s->num_rows * parts, s->threads, [&](int64_t job) {
        const int64_t row = job / parts, first = row * size, from = first + job % parts * some;
        PoolRows rows(window_size + size, dim);
        const int64_t anchor = s->positions[first];
        for (int64_t p = std::max<int64_t>(0, anchor - window_size); p < anchor; p++) {
            const int64_t slot = s->window_slot(row, p);
            if (slot >= 0) rows.add(recent, slot);
        }
        for (int64_t t = first; t < first + size; t++) rows.add(own, t);
        float* query = scratch<6, float>(some * heads * dim);
        const auto turn = [&](const float* x, bool inverse, float* to) {
            for (int64_t t = from; t < from + some; t++) {
                const Turn at = angles.at(s->positions[t], inverse, scratch<0, float>(4 * half));
                for (int64_t h = 0; h < heads; h++, x += dim, to += dim) rotate_row(x, dim, at, bf16, to);
            }
        };
        turn(queries + from * heads * dim, false, query);
        float* result = out + from * heads * dim;
        attend(query, some * heads, dim, rows, sinks, bf16, result);
        turn(result, true, result);
    });
}

CALLABLE(step_window_rows)
CALLABLE(step_block_rows)
CALLABLE(step_block_attention)
CALLABLE(step_compress)
CALLABLE(step_store_entries)
CALLABLE(step_choose_all)
CALLABLE(step_choose)
CALLABLE(step_attention)
