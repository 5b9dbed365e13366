// Router and experts. Contracts: kernels/moe/gate.py and experts.py.
#include "mlp.h"
#include "program.h"

constexpr int64_t DEEP_ROWS = 12;    // of an expert, on average, from which on each runs as a whole
constexpr int64_t BLOCK_ROWS = 288;  // of an expert at once: they stay in the level-2 cache
constexpr int64_t UNIT_JOB = 2, PANEL_JOB = 8;  // units, panels at once, at least
constexpr int64_t FEW_TOKENS = 32;
constexpr std::chrono::microseconds LONG{500}, NAP{50};  // for a thread that lost its core

// Slots of a call: token · top_k + k.
struct Slots {
    const int64_t* ids;
    const float* shares;
    int64_t tokens, top_k, first_expert, num_local;
    float* out;
    int64_t count() const { return tokens * top_k; }
    int64_t local(int64_t i) const { return ids[i] - first_expert; }
    bool is_local(int64_t i) const { return local(i) >= 0 && local(i) < num_local; }
};

// Slots of the experts held here, by expert, in order.
static void sort_slots(const Slots& s, std::vector<int64_t>& ends, std::vector<int64_t>& order) {
    ends.assign(s.num_local + 1, 0), order.resize(s.count());
    for (int64_t i = 0; i < s.count(); i++)
        if (s.is_local(i)) ends[s.local(i) + 1]++;
    for (int64_t e = 0; e < s.num_local; e++) ends[e + 1] += ends[e];
    std::vector<int64_t> starts(ends.begin(), ends.end());
    for (int64_t i = 0; i < s.count(); i++)
        if (s.is_local(i)) order[starts[s.local(i)]++] = i;
}

// emit(first, end) over [0, count) in pieces: large ones first, so that weights are read in long
// stretches, small ones last, so that threads end together. `left`: items that there are to share
// out, these and later ones.
template <class Emit>
static void shrinking_pieces(int64_t count, int64_t left, int64_t threads, int64_t least,
                             const Emit& emit) {
    for (int64_t first = 0; first < count;) {
        int64_t size = threads <= 1 ? count : std::max(least, (left - first) / (2 * threads));
        if (first + size + least > count) size = count - first;
        emit(first, first + size);
        first += size;
    }
}

// Few rows an expert: weights stream once, in pieces that all threads share.
static void run_wide(std::vector<Part>& parts, int64_t threads) {
    int64_t floats = 0, halves = 0;
    for (const Part& part : parts) {
        if (part.halves)
            halves += part.input_halves() + part.middle_halves();
        else
            floats += part.rows * part.middle.stride;
    }
    float* rows = scratch<3, float>(floats);
    uint16_t* tiles = scratch<4, uint16_t>(halves);
    for (Part& part : parts) {
        if (part.halves) {
            part.fill_tiles(tiles), tiles += part.input_halves();
            part.middle.tiles = tiles, tiles += part.middle_halves();
        } else {
            part.middle.rows = rows, rows += part.rows * part.middle.stride;
        }
    }
    struct Job {
        int64_t part, first, end;
        bool is_second;  // of the two products
    };
    std::vector<Job> jobs;
    const auto split = [&](bool is_second, int64_t least, auto items, auto words) {
        int64_t left = 0;
        for (const Part& part : parts) left += items(part) * words(part);
        for (int64_t i = 0; i < (int64_t)parts.size(); i++) {
            shrinking_pieces(items(parts[i]), left / words(parts[i]), threads, least,
                             [&](int64_t first, int64_t end) {
                                 jobs.push_back({i, first, end, is_second});
                             });
            left -= items(parts[i]) * words(parts[i]);
        }
    };
    split(false, UNIT_JOB, [](const Part& part) { return part.mlp.units(); },
          [](const Part& part) { return part.mlp.w13.words() / part.mlp.units(); });
    split(true, PANEL_JOB, [](const Part& part) { return part.mlp.w2.panels(); },
          [](const Part& part) { return part.mlp.w2.panel_words(); });
    // One list for both: who finds no more of the first product begins with the second of an expert
    // whose first is done. Jobs are taken in order, so those waited for are being worked on.
    std::vector<std::atomic<int64_t>> missing(parts.size());
    for (size_t i = 0; i < parts.size(); i++) missing[i] = parts[i].mlp.units();
    parallel((int64_t)jobs.size(), threads, [&](int64_t i) {
        const Job& job = jobs[i];
        std::atomic<int64_t>& units = missing[job.part];
        if (job.is_second) {
            for (Patience patience; units.load(std::memory_order_acquire);) {
                patience.pass();
                if (!patience.lasts(LONG)) std::this_thread::sleep_for(NAP);
            }
            down(parts[job.part], job.first, job.end);
        } else {
            gate_up(parts[job.part], job.first, job.end);
            units.fetch_sub(job.end - job.first, std::memory_order_release);
        }
    });
}

// Many rows: each block of an expert's rows by one thread, which keeps it in its cache.
static void run_deep(std::vector<Part>& parts, int64_t threads) {
    std::vector<Part> blocks;
    for (const Part& part : parts) {
        const int64_t pieces = (part.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t size = (part.rows + pieces * TILE_ROWS - 1) / (pieces * TILE_ROWS) * TILE_ROWS;
        for (int64_t first = 0; first < part.rows; first += size)
            blocks.push_back(part.block(first, std::min(size, part.rows - first)));
    }
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const Part& a, const Part& b) { return a.cost() > b.cost(); });
    parallel((int64_t)blocks.size(), threads, [&](int64_t i) {
        Part part = blocks[i];
        if (part.halves) {
            part.fill_tiles(scratch<1, uint16_t>(part.input_halves()));
            part.middle.tiles = scratch<2, uint16_t>(part.middle_halves());
        } else {
            part.middle.rows = scratch<2, float>(part.rows * part.middle.stride);
        }
        gate_up(part, 0, part.mlp.units());
        down(part, 0, part.mlp.w2.panels());
    });
}

// Routed experts into slots (top_k 0: none) and the shared one into `shared_out` (null: none). If
// `may_halve`, all of these may be stored in bfloat16 from where they begin, which is returned.
static bool run_experts(const float* x, const Slots& slots, const Mlp& routed, const Mlp& shared,
                        float* shared_out, bool may_halve, int64_t threads) {
    const int64_t tokens = slots.tokens, hidden = routed.w13.inner, stride = row_stride(hidden);
    std::vector<int64_t> ends, order, token_of;
    sort_slots(slots, ends, order);
    token_of.resize(ends[slots.num_local]);
    for (size_t i = 0; i < token_of.size(); i++) token_of[i] = order[i] / slots.top_k;

    std::vector<Part> parts;
    int64_t rows = 0, blocks = 0, work = 0;
    auto add = [&](const Mlp& mlp, int64_t first, int64_t count, bool is_shared) {
        Part part;
        part.mlp = mlp, part.rows = count;
        part.x = {nullptr, stride, is_shared ? nullptr : token_of.data() + first};
        part.order = is_shared ? nullptr : order.data() + first;
        part.shares = slots.shares, part.out = is_shared ? shared_out : slots.out;
        part.middle.stride = row_stride(mlp.w2.inner);
        parts.push_back(part);
        rows += count, blocks += (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
        work += 3 * hidden * mlp.w2.inner / LANES * (1 + std::min(count, TILE_ROWS));
    };
    if (shared_out && tokens) add(shared, 0, tokens, true);
    for (int64_t e = 0; e < slots.num_local; e++)
        if (ends[e + 1] > ends[e]) add(routed.part(e), ends[e], ends[e + 1] - ends[e], false);
    if (work < MIN_WORK) threads = 1;

    const bool deep = rows >= DEEP_ROWS * (int64_t)parts.size() &&
                      (threads == 1 || blocks >= 2 * threads);
    auto takes_tiles = [&](const Part& part) {
        return part.mlp.bf16 && (deep ? part.mlp.tiles_fit() && tiles_ready()
                                      : tiles_pay(part.rows, part.mlp.w13) && part.mlp.tiles_fit());
    };
    const bool any = std::any_of(parts.begin(), parts.end(), takes_tiles);
    const bool all = std::all_of(parts.begin(), parts.end(), takes_tiles);
    const bool in_halves = may_halve && deep && all && hidden % GROUP == 0;
    const int64_t bytes = hidden * (in_halves ? sizeof(uint16_t) : sizeof(float));
    for (int64_t i = 0; i < slots.count(); i++)
        if (!slots.is_local(i)) std::memset((char*)slots.out + i * bytes, 0, bytes);
    uint16_t* halves = any ? scratch<0, uint16_t>(tokens * stride) : nullptr;
    float* floats = all ? nullptr : scratch<0, float>(tokens * stride);
    const Rounding rounding = routed.bf16 ? TO_FP8 : NONE;
    parallel(tokens, tokens > FEW_TOKENS ? threads : 1, [&](int64_t t) {
        const float* row = x + t * hidden;
        if (halves) prepare_halves(row, hidden, rounding, GROUP, halves + t * stride);
        if (floats) prepare_row(row, hidden, rounding, floats + t * stride);
    });
    for (Part& part : parts) {
        if (takes_tiles(part))
            part.halves = halves;
        else
            part.x.data = floats;
        if (in_halves) part.out_halves = (uint16_t*)part.out;
    }
    if (deep)
        run_deep(parts, threads);
    else
        run_wide(parts, threads);
    return in_halves;
}

// `combine` of slots and shared rows in bfloat16, many of them.
static void combine_halves(const uint16_t* slots, int64_t tokens, int64_t top_k, int64_t hidden,
                           const uint16_t* shared, float* out, int64_t threads) {
    parallel((tokens + LANES - 1) / LANES, threads, [&](int64_t some) {
        for (int64_t t = some * LANES; t < std::min(tokens, (some + 1) * LANES); t++) {
            const uint16_t* from = slots + t * top_k * hidden;
            for (int64_t c = 0; c < hidden; c += LANES) {
                F sum = from_halves(from + c);
                for (int64_t k = 1; k < top_k; k++) sum += from_halves(from + k * hidden + c);
                sum += from_halves(shared + t * hidden + c);
                store_past(out + t * hidden + c, round_bf16(sum));
            }
        }
        end_of_stores_past();
    });
}

// out[token] = slots added in order of k (ascending expert id), then `shared`, if any.
static void combine(const float* slots, int64_t tokens, int64_t top_k, int64_t hidden,
                    const float* shared, bool bf16, float* out, int64_t threads) {
    parallel(tokens, threads, [&](int64_t t) {
        const float* from = slots + t * top_k * hidden;
        for (int64_t c = 0; c < hidden; c += LANES) {
            const int64_t left = hidden - c;
            F sum = load_part(from + c, left);
            for (int64_t k = 1; k < top_k; k++) sum += load_part(from + k * hidden + c, left);
            if (shared) sum += load_part(shared + t * hidden + c, left);
            store_part(out + t * hidden + c, bf16 ? round_bf16(sum) : sum, left);
        }
    });
}

EXPORT void expert_mlp(const float* x, int64_t rows, const uint32_t* w13, int64_t kind13,
                       const uint32_t* w2, int64_t kind2, int64_t hidden, int64_t inter,
                       float limit, int64_t bf16, float* out, int64_t threads) {
    const Mlp mlp = make_mlp(w13, kind13, w2, kind2, hidden, inter, limit, bf16);
    run_experts(x, {nullptr, nullptr, rows, 0, 0, 0, nullptr}, mlp, mlp, out, false, threads);
}

// slots[token, k] = the share-weighted output of expert ids[token, k]; zero if it is not here.
EXPORT void routed_experts(const float* x, const int64_t* ids, const float* shares, int64_t tokens,
                           int64_t top_k, const uint32_t* w13, int64_t kind13, const uint32_t* w2,
                           int64_t kind2, int64_t first_expert, int64_t num_local, int64_t hidden,
                           int64_t inter, float limit, int64_t bf16, float* slots, int64_t threads) {
    const Mlp mlp = make_mlp(w13, kind13, w2, kind2, hidden, inter, limit, bf16);
    run_experts(x, {ids, shares, tokens, top_k, first_expert, num_local, slots}, mlp, mlp, nullptr,
                false, threads);
}

// Both in one pass over the weights, added up. `slots` and `shared_rows` are room to work in.
EXPORT void all_experts(const float* x, const int64_t* ids, const float* shares, int64_t tokens,
                        int64_t top_k, const uint32_t* w13, int64_t kind13, const uint32_t* w2,
                        int64_t kind2, int64_t num_local, int64_t inter, const uint32_t* shared13,
                        int64_t shared_kind13, const uint32_t* shared2, int64_t shared_kind2,
                        int64_t shared_inter, int64_t hidden, float limit, int64_t bf16,
                        float* slots, float* shared_rows, float* out, int64_t threads) {
    const Mlp routed = make_mlp(w13, kind13, w2, kind2, hidden, inter, limit, bf16);
    const Mlp shared =
        make_mlp(shared13, shared_kind13, shared2, shared_kind2, hidden, shared_inter, limit, bf16);
    const bool in_halves = run_experts(x, {ids, shares, tokens, top_k, 0, num_local, slots}, routed,
                                       shared, shared_rows, top_k > 0 && bf16, threads);
    if (in_halves)
        return combine_halves((const uint16_t*)slots, tokens, top_k, hidden,
                              (const uint16_t*)shared_rows, out, threads);
    combine(slots, tokens, top_k, hidden, shared_rows, bf16, out, tokens > FEW_TOKENS ? threads : 1);
}

EXPORT void combine_slots(const float* slots, int64_t tokens, int64_t top_k, int64_t hidden,
                          float* out) {
    combine(slots, tokens, top_k, hidden, nullptr, false, out, 1);
}

constexpr int64_t ROUTE_TOKENS = 32;  // a job

// The experts of one token, ascending, and their weights; `room` for twice as many floats as there
// are experts, in whole lanes.
static void route_token(const float* scores, const float* bias, int64_t experts, int64_t top_k,
                        float scaling, float temperature, float* room, int64_t* ids, float* weights) {
    float *affinity = room, *choice = room + (experts + LANES - 1) / LANES * LANES;
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

EXPORT void route(const float* scores, const float* bias, int64_t tokens, int64_t experts,
                  int64_t top_k, float scaling, float temperature, int64_t* ids, float* weights,
                  int64_t threads) {
    parallel((tokens + ROUTE_TOKENS - 1) / ROUTE_TOKENS, threads, [&](int64_t job) {
        float* room = scratch<0, float>(2 * (experts + LANES));
        for (int64_t t = job * ROUTE_TOKENS; t < std::min(tokens, (job + 1) * ROUTE_TOKENS); t++)
            route_token(scores + t * experts, bias, experts, top_k, scaling, temperature, room,
                        ids + t * top_k, weights + t * top_k);
    });
}

CALLABLE(expert_mlp)
CALLABLE(routed_experts)
CALLABLE(all_experts)
CALLABLE(combine_slots)
CALLABLE(route)
