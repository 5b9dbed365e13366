// Router and experts. Contracts: kernels/moe/gate.py and experts.py.
#include "gemm.h"

constexpr int64_t BLOCK_ROWS = 48;  // rows of an expert at once: they stay in the level-2 cache

struct Expert {
    Weight w13, w2;
    float limit;
    bool bf16;
    int64_t inter() const { return w2.inner; }
    Rounding input() const { return bf16 ? TO_FP8 : NONE; }
};

// silu(min(gate, limit)) · clamp(up, ±limit) · share, ready for w2; gate and up side by side.
static void activate(const Expert& e, const float* gate_up, float share, bool has_share, float* to) {
    const int64_t inter = e.inter();
    const F limit = splat(e.limit);
    float hidden[32];
    for (int64_t k = 0; k < inter; k += 32) {
        for (int64_t j = k; j < k + 32; j += LANES) {
            const int64_t left = inter - j;
            if (left <= 0) break;
            F gate = load_part(gate_up + j, left), up = load_part(gate_up + inter + j, left);
            gate = keep_nan(gate, vmin(gate, limit));
            up = keep_nan(up, vmin(vmax(up, -limit), limit));
            F h = vsigmoid(gate) * gate * up;
            if (has_share) h = h * share;
            store(hidden + (j - k), e.bf16 ? round_bf16(h) : h);
        }
        prepare_row(hidden, inter - k < 32 ? inter - k : 32, e.input(), to + k);
    }
}

// Rows of one expert through both linears; `x` is prepared, results go to out(row).
template <class Share, class Out>
static void run_expert(const Expert& e, const Rows& x, int64_t rows, bool has_share,
                       const Share& share, const Out& out) {
    const int64_t wide = e.w13.outer, stride = row_stride(e.inter()), hidden = e.w2.outer;
    float* gate_up = scratch<1, float>(rows * wide);
    float* middle = scratch<2, float>(rows * stride);
    float* result = scratch<3, float>(rows * hidden);
    multiply_panels(x, rows, e.w13, 0, e.w13.panels(), gate_up, wide, e.bf16);
    for (int64_t r = 0; r < rows; r++)
        activate(e, gate_up + r * wide, has_share ? share(r) : 1.0f, has_share, middle + r * stride);
    multiply_panels({middle, stride}, rows, e.w2, 0, e.w2.panels(), result, hidden, e.bf16);
    for (int64_t r = 0; r < rows; r++) std::memcpy(out(r), result + r * hidden, hidden * 4);
}

static Expert make_expert(const uint32_t* w13, int64_t kind13, const uint32_t* w2, int64_t kind2,
                          int64_t hidden, int64_t inter, float limit, int64_t bf16) {
    return {{w13, (Kind)kind13, hidden, 2 * inter}, {w2, (Kind)kind2, inter, hidden}, limit, !!bf16};
}

EXPORT void expert_mlp(const float* x, int64_t rows, const uint32_t* w13, int64_t kind13,
                       const uint32_t* w2, int64_t kind2, int64_t hidden, int64_t inter,
                       float limit, int64_t bf16, float* out, int64_t threads) {
    const Expert e = make_expert(w13, kind13, w2, kind2, hidden, inter, limit, bf16);
    const int64_t stride = row_stride(hidden);
    parallel((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, threads, [&](int64_t block) {
        const int64_t first = block * BLOCK_ROWS;
        const int64_t count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        float* prepared = scratch<0, float>(count * stride);
        for (int64_t r = 0; r < count; r++)
            prepare_row(x + (first + r) * hidden, hidden, e.input(), prepared + r * stride);
        run_expert(e, {prepared, stride}, count, false, [](int64_t) { return 1.0f; },
                   [&](int64_t r) { return out + (first + r) * hidden; });
    });
}

// slots[token, k] = the share-weighted output of expert ids[token, k]; zero if it is not here.
EXPORT void routed_experts(const float* x, const int64_t* ids, const float* shares, int64_t tokens,
                           int64_t top_k, const uint32_t* w13, int64_t kind13, const uint32_t* w2,
                           int64_t kind2, int64_t first_expert, int64_t num_local, int64_t hidden,
                           int64_t inter, float limit, int64_t bf16, float* slots, int64_t threads) {
    const Expert all = make_expert(w13, kind13, w2, kind2, hidden, inter, limit, bf16);
    const int64_t stride = row_stride(hidden), num_slots = tokens * top_k;
    // Slots by expert, in order: a counting sort.
    std::vector<int64_t> ends(num_local + 1, 0), order(num_slots);
    for (int64_t s = 0; s < num_slots; s++) {
        const int64_t local = ids[s] - first_expert;
        if (local >= 0 && local < num_local)
            ends[local + 1]++;
        else
            std::memset(slots + s * hidden, 0, hidden * 4);
    }
    for (int64_t e = 0; e < num_local; e++) ends[e + 1] += ends[e];
    std::vector<int64_t> starts(ends.begin(), ends.end());
    for (int64_t s = 0; s < num_slots; s++) {
        const int64_t local = ids[s] - first_expert;
        if (local >= 0 && local < num_local) order[starts[local]++] = s;
    }
    struct Job {
        int64_t expert, first, end;
    };
    std::vector<Job> jobs;
    for (int64_t e = 0; e < num_local; e++)
        for (int64_t first = ends[e]; first < ends[e + 1]; first += BLOCK_ROWS)
            jobs.push_back({e, first, std::min(first + BLOCK_ROWS, ends[e + 1])});
    std::vector<float> prepared(tokens * stride);
    for (int64_t t = 0; t < tokens; t++)
        prepare_row(x + t * hidden, hidden, all.input(), prepared.data() + t * stride);
    parallel((int64_t)jobs.size(), threads, [&](int64_t index) {
        const Job job = jobs[index];
        const int64_t count = job.end - job.first;
        float* rows = scratch<0, float>(count * stride);
        for (int64_t r = 0; r < count; r++)
            std::memcpy(rows + r * stride, prepared.data() + order[job.first + r] / top_k * stride,
                        stride * 4);
        Expert e = all;
        e.w13 = all.w13.part(job.expert), e.w2 = all.w2.part(job.expert);
        run_expert(e, {rows, stride}, count, true,
                   [&](int64_t r) { return shares[order[job.first + r]]; },
                   [&](int64_t r) { return slots + order[job.first + r] * hidden; });
    });
}

// sum[token] = slots added in order of k: ascending expert id.
EXPORT void combine_slots(const float* slots, int64_t tokens, int64_t top_k, int64_t hidden,
                          float* out) {
    for (int64_t t = 0; t < tokens; t++, slots += top_k * hidden, out += hidden)
        for (int64_t c = 0; c < hidden; c += LANES) {
            const int64_t left = hidden - c;
            F sum = load_part(slots + c, left);
            for (int64_t k = 1; k < top_k; k++) sum += load_part(slots + k * hidden + c, left);
            store_part(out + c, sum, left);
        }
}

EXPORT void route(const float* scores, const float* bias, int64_t tokens, int64_t experts,
                  int64_t top_k, float scaling, float temperature, int64_t* ids, float* weights) {
    const int64_t padded = (experts + LANES - 1) / LANES * LANES;
    float* affinity = scratch<0, float>(2 * padded);
    float* choice = affinity + padded;
    for (int64_t t = 0; t < tokens; t++, scores += experts, ids += top_k, weights += top_k) {
        for (int64_t e = 0; e < experts; e += LANES) {
            F a = vsqrt(vsoftplus(load_part(scores + e, experts - e) / temperature));
            F c = a + load_part(bias + e, experts - e);
            store(affinity + e, a);
            store(choice + e, c == c ? c : splat(0.0f));  // not finite: still needs experts
        }
        std::vector<bool> taken(experts, false);
        for (int64_t k = 0; k < top_k; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
            taken[best] = true;
        }
        int64_t k = 0;
        float total = 0.0f;
        for (int64_t e = 0; e < experts; e++)
            if (taken[e]) {
                ids[k] = e, weights[k] = affinity[e];
                total = k ? total + affinity[e] : affinity[e];
                k++;
            }
        for (k = 0; k < top_k; k++) weights[k] = weights[k] / (total + 1e-20f) * scaling;
    }
}
