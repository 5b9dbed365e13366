// Recorded programs, and how a step begins. Contracts: kernels/step/*.py.
#include "step.h"

#include <ctime>

constexpr int64_t MAX_WORDS = 28;

struct Call {
    void (*op)(const Word*);
    const int64_t* when;    // left out where this is zero; null: always done
    uint64_t by_reference;  // words that hold the address of the argument
    int64_t count;
    Word words[MAX_WORDS];
};

static void run_call(const Call& call) {
    if (call.when && !*call.when) return;
    Word words[MAX_WORDS];
    std::memcpy(words, call.words, call.count * sizeof(Word));
    for (uint64_t left = call.by_reference; left; left &= left - 1) {
        Word& word = words[__builtin_ctzll(left)];
        std::memcpy(&word, word.address, sizeof(Word));
    }
    call.op(words);
}

EXPORT void run_calls(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) run_call(calls[i]);
}

static int64_t cpu_nanoseconds() {  // of this thread
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// Adds the CPU time that each call took of this thread: other work on the machine does not count.
EXPORT void time_calls(const Call* calls, int64_t count, int64_t* nanoseconds) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t start = cpu_nanoseconds();
        run_call(calls[i]);
        nanoseconds[i] += cpu_nanoseconds() - start;
    }
}

// Works out what the other operations look up.
EXPORT void step_begin(Step* s, int64_t top_k) {
    s->num_ending = s->is_crowded[0] = s->is_crowded[1] = 0;
    for (int64_t row = 0; row < s->num_rows; row++)
        for (int64_t t = s->row_starts[row]; t < s->row_starts[row + 1]; t++) {
            s->row_of[t] = row;
            if (s->positions[t] % 2) s->ending[s->num_ending++] = t;
            s->is_crowded[0] |= s->visible(t, 1) > top_k;
            s->is_crowded[1] |= s->visible(t, 2) > top_k;
        }
}

// Every stream begins as the embedding, and the first sublayer reads the first of them.
EXPORT void step_embed(const Step* s, const float* table, int64_t hc, int64_t hidden, float* streams,
                       float* pre) {
    parallel_ranges(s->num_tokens, s->threads, 16, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++)
            for (int64_t i = 0; i < hc; i++) {
                std::memcpy(streams + (t * hc + i) * hidden, table + s->ids[t] * hidden, hidden * 4);
                pre[t * hc + i] = i == 0;
            }
    });
}

// Of the chain of drafts, place by place: row r of place p is row p * num_rows + r of what has all of
// them. `before` [num_rows] is the token before the place: its row of `table` [rank], alone and behind
// the row of `hidden`.
EXPORT void step_chain_rows(const Step* s, int64_t place, const int64_t* before, const float* table,
                            int64_t rank, const float* hidden, int64_t width, float* embedded,
                            float* joined) {
    for (int64_t r = 0; r < s->num_rows; r++) {
        const int64_t at = place * s->num_rows + r;
        const float* row = table + before[r] * rank;
        float* both = joined + at * (width + rank);
        std::memcpy(embedded + r * rank, row, rank * sizeof(float));
        std::memcpy(both, hidden + at * width, width * sizeof(float));
        std::memcpy(both + width, row, rank * sizeof(float));
    }
}

// Adds `more` [num_rows, n] to the logits of a place.
EXPORT void step_chain_logits(const Step* s, int64_t place, int64_t n, const float* more) {
    float* logits = s->logits + place * s->num_rows * n;
    parallel_ranges(s->num_rows * n, s->threads, 1 << 14, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i += LANES) {
            const int64_t left = end - i;
            store_part(logits + i, load_part(logits + i, left) + load_part(more + i, left), left);
        }
    });
}

CALLABLE(step_begin)
CALLABLE(step_embed)
CALLABLE(step_chain_rows)
CALLABLE(step_chain_logits)
