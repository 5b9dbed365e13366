// What all operations of one step of the model share. Members are eight bytes each and lie in the
// order of `kernels.step.step.FIELDS`.
#pragma once

#include <algorithm>

#include "program.h"

constexpr int64_t BLOCK_TOKENS = 64;

struct Step {
    int64_t threads, num_tokens, num_rows;
    int64_t num_wanted;     // of `wanted`
    int64_t num_ending;     // of `ending`
    int64_t is_crowded[2];  // by ratio - 1: some token sees more entries than are selected
    const int64_t *ids, *positions;  // [num_tokens]
    const int64_t* row_starts;       // [num_rows + 1]
    const int64_t* context;          // [num_rows, num_context]: ids before each row, -1 for none
    int64_t num_context;
    const int64_t* wanted;  // [num_wanted]: tokens whose logits are wanted
    const int32_t* global_blocks;
    int64_t global_width;
    const int32_t* window_blocks;
    int64_t window_width;
    const int32_t* state_blocks;
    const float *plain_cos, *plain_sin;    // by position
    const float *turned_cos, *turned_sin;  // of layers with compressed rows
    float *logits, *features;
    int64_t* row_of;  // [num_tokens]
    int64_t* ending;  // tokens at odd positions, ascending: they complete an entry at ratio 2

    // Tokens that complete an entry of `ratio`, and how many there are.
    int64_t completing(int64_t ratio) const { return ratio == 2 ? num_ending : num_tokens; }
    int64_t completing_token(int64_t ratio, int64_t i) const { return ratio == 2 ? ending[i] : i; }
    int64_t visible(int64_t token, int64_t ratio) const { return (positions[token] + 1) / ratio; }
    // Pool rows; negative if there is none.
    int64_t window_slot(int64_t row, int64_t position) const {
        const int64_t block = window_blocks[row * window_width + position / BLOCK_TOKENS];
        return block < 0 ? -1 : block * BLOCK_TOKENS + position % BLOCK_TOKENS;
    }
    int64_t entry_slot(int64_t row, int64_t entry, int64_t ratio) const {
        const int64_t per_block = BLOCK_TOKENS / ratio;
        const int64_t block = global_blocks[row * global_width + entry / per_block];
        return block < 0 ? -1 : block * per_block + entry % per_block;
    }
};
static_assert(sizeof(Step) == 26 * 8);

// body(first, end) over [0, count) in pieces of at least `grain`.
template <class Body>
INLINE void parallel_ranges(int64_t count, int64_t threads, int64_t grain, const Body& body) {
    const int64_t even = (count + 4 * threads - 1) / (4 * threads);
    const int64_t piece = threads <= 1 ? std::max<int64_t>(count, 1) : std::max(grain, even);
    parallel((count + piece - 1) / piece, threads, [&](int64_t job) {
        body(job * piece, std::min(count, (job + 1) * piece));
    });
}
