// Sampling: noise, filters without a sort, the draw, log-probabilities, penalties, masks.
// Contracts: kernels/sampling/*.py. A row's results depend on that row alone.
#include "step.h"

#include <algorithm>

INLINE uint32_t lane_bits(I mask) {  // bit i: lane i is true
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    union {
        I whole;
        __m256 half[2];
    } m{mask};
    return _mm256_movemask_ps(m.half[0]) | _mm256_movemask_ps(m.half[1]) << 8;
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] != 0) << i;
    return bits;
#endif
}
constexpr I IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE F load_ids(const float* x, int64_t i, int64_t n) {  // what lies behind the row is banned
    if (i + LANES <= n) return load(x + i);
    return IOTA < splat_i((int32_t)(n - i)) ? load_part(x + i, n - i) : splat(-INFINITY);
}

static float row_max(const float* x, int64_t n) {
    F most = splat(-INFINITY);
    for (int64_t i = 0; i < n; i += LANES) most = vmax(load_ids(x, i, n), most);
    return max_lanes(most)[0];
}

// Sorts like (logit, then lower id first).
INLINE uint64_t order_key(float x, int64_t id) {
    x += 0.0f;  // -0 ties with 0
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);
}
constexpr int64_t LAST_ID = 0x7fffffff;
INLINE int64_t key_id(uint64_t key) { return 0xffffffffu - (uint32_t)key; }
INLINE float key_logit(uint64_t key) {
    uint32_t bits = key >> 32;
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// ---------------------------------------------------------------- noise

struct Stream {
    uint64_t seed, sub_index, position, purpose;
};

// Block `number` of Philox4x64-10: eight 32-bit words.
INLINE void philox(const Stream& s, uint64_t number, uint32_t* words) {
    uint64_t c0 = number, c1 = s.position, c2 = s.purpose, c3 = 0, k0 = s.seed, k1 = s.sub_index;
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 first = (unsigned __int128)c0 * 0xD2E7470EE14C6C93u;
        const unsigned __int128 second = (unsigned __int128)c2 * 0xCA5A826395121157u;
        c0 = (uint64_t)(second >> 64) ^ c1 ^ k0, c1 = (uint64_t)second;
        c2 = (uint64_t)(first >> 64) ^ c3 ^ k1, c3 = (uint64_t)first;
        k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
    }
    const uint64_t block[4] = {c0, c1, c2, c3};
    std::memcpy(words, block, 32);
}

INLINE float gumbel(uint32_t word) {
    return (float)-std::log(-std::log(((double)word + 0.5) * 0x1p-32));
}

// -log x for 2^-33 <= x < 1, within 1e-5.
INLINE F minus_log(F x) {
    const I bits = (I)x;
    I exponent = (bits - 0x3f3504f3) >> 23;  // so that the rest lies around 1
    const F m = (F)(bits - (exponent << 23));
    const F s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    const F series = s * fma(s2, fma(s2, splat(0.4f), splat(0.66666667f)), splat(2.0f));
    return -fma(__builtin_convertvector(exponent, F), splat(0.69314718f), series);
}

// ---------------------------------------------------------------- the draw

struct Filter {
    float temperature, top_p, min_p;
    int64_t top_k;
    bool is_on() const { return temperature > 0 && (top_k > 0 || top_p < 1 || min_p > 0); }
};

constexpr float MAX_GUMBEL = 22.9f;  // -log(-log(1 - 2^-33)) = 22.87

// argmax of logit + temperature · noise over the ids whose key is at least `cut`. Noise costs two
// logarithms, and hardly any id can win: since -log(-log u) <= -log(1 - u), a cheap bound sorts
// out all but a few dozen, and these are computed as the contract says.
static int64_t draw_row(const float* x, int64_t n, float best, float temperature, uint64_t cut,
                        const Stream& stream) {
    const float cut_logit = key_logit(cut), slack = 1e-3f * temperature + 1e-6f * std::fabs(best);
    const float reach = MAX_GUMBEL * temperature + slack;
    const I cut_id = splat_i((int32_t)key_id(cut));
    float top = -INFINITY;
    int64_t winner = -1;
    for (int64_t i = 0; i < n; i += LANES) {
        F v = load_ids(x, i, n);
        v = ((v > cut_logit) | ((v == cut_logit) & (IOTA + (int32_t)i <= cut_id))) ? v
                                                                                  : splat(-INFINITY);
        if (!lane_bits(~(v < top - reach))) continue;
        uint32_t words[LANES];
        philox(stream, i / 8 + 1, words);
        philox(stream, i / 8 + 2, words + 8);
        U w;
        std::memcpy(&w, words, 64);
        const F rest = (__builtin_convertvector(~w, F) + 0.5f) * 0x1p-32f;  // 1 - u
        const F bound = v + minus_log(rest) * temperature + slack;
        for (uint32_t left = lane_bits(~(bound < top)); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            const float score = v[lane] + gumbel(words[lane]) * temperature;
            if (score > top) top = score, winner = i + lane;
        }
    }
    return winner < 0 ? 0 : winner;
}

typedef double D __attribute__((vector_size(64)));
typedef int64_t L __attribute__((vector_size(64)));
typedef float H __attribute__((vector_size(32)));

// e^x for x <= 0 within 2e-15; 0 below -700.
INLINE D exp_down(D x) {
    const D zero{};
    const D low = zero - 700.0;
    const D clamped = x < low ? low : x;
    const D shifted = clamped * 1.4426950408889634 + 0x1.8p52;
    const D whole = shifted - 0x1.8p52;
    D r = clamped - whole * 0x1.62e42feep-1;  // exact: a short ln 2, and the rest of it
    r -= whole * 0x1.a39ef35793c76p-33;
    D p = zero + 1.0 / 479001600;
    const double terms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                            1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,     0.5,
                            1.0,            1.0};
    for (double term : terms) p = p * r + term;
    const D magic = zero + 0x1.8p52;
    const D y = (D)((L)p + (((L)shifted - (L)magic) << 52));
    return x < low ? zero : y;
}

struct Candidate {
    uint64_t key;
    double weight;
};
INLINE bool is_better(const Candidate& a, const Candidate& b) { return a.key > b.key; }

// How many ids lie how far below the best, and what they weigh: the bound of a filter lies in one
// bucket, and only that one has to be looked at id by id.
class Buckets {
   public:
    static constexpr int COUNT = 1024;
    static constexpr float SPAN = 40.0f;  // e^-40: what lies below weighs nothing

    Buckets(const float* x, int64_t n, float best, const Filter& f)
        : x_(x), n_(n), best_(best), f_(f) {
        scale_ = std::min(COUNT / (SPAN * f.temperature), 1e30f);
        lowest_ = f.min_p > 0 ? INFINITY : -INFINITY;
        std::memset(num_, 0, sizeof num_), std::memset(mass_, 0, sizeof mass_);
        int32_t at[LANES];
        double weights[LANES];
        for (int64_t i = 0; i < n; i += LANES) {
            for (uint32_t left = look(i, at, weights); left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                num_[at[lane]]++, mass_[at[lane]] += weights[lane];
            }
        }
        for (int b = 0; b < COUNT; b++) total_ += num_[b], whole_ += mass_[b];
    }

    // The key of the last id that the filters keep.
    uint64_t cut() {
        int64_t end = COUNT;  // buckets from here on are left out
        std::vector<Candidate> edge;  // what is kept of bucket `end`
        double kept = whole_;
        uint64_t last = order_key(lowest_, LAST_ID);
        if (f_.top_k > 0 && f_.top_k < total_) {
            int64_t before = 0;
            kept = 0.0;
            for (end = 0; before + num_[end] < f_.top_k; end++) before += num_[end], kept += mass_[end];
            edge = gather(end);
            const int64_t room = f_.top_k - before;
            std::nth_element(edge.begin(), edge.begin() + (room - 1), edge.end(), is_better);
            edge.resize(room);
            for (const Candidate& c : edge) kept += c.weight;
            last = edge.back().key;
        }
        if (f_.top_p >= 1) return last;
        double need = (double)f_.top_p * kept;
        for (int64_t b = 0; b < end; b++) {
            if (mass_[b] >= need) {
                std::vector<Candidate> inside = gather(b);
                return reach(inside, need);
            }
            need -= mass_[b];
        }
        return edge.empty() ? last : reach(edge, need);
    }

   private:
    // Bucket and weight of each lane; bits of those that min_p keeps.
    uint32_t look(int64_t i, int32_t* at, double* weights) {
        const F v = load_ids(x_, i, n_), below = best_ - v;
        const F place = vmin(vmax(below * scale_, splat(0.0f)), splat((float)(COUNT - 1)));
        const I bucket = __builtin_convertvector(place, I);
        std::memcpy(at, &bucket, 64);
        const I is_near = bucket < splat_i(COUNT - 1);
        if (lane_bits(is_near)) {
            float distance[LANES];
            store(distance, below);
            for (int half = 0; half < 2; half++) {
                H narrow;
                std::memcpy(&narrow, distance + 8 * half, 32);
                const D w = exp_down(-__builtin_convertvector(narrow, D) / (double)f_.temperature);
                std::memcpy(weights + 8 * half, &w, 64);
            }
        }
        uint32_t kept = 0;
        for (uint32_t left = lane_bits(v > -INFINITY); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (at[lane] == COUNT - 1) weights[lane] = 0.0;
            if (weights[lane] < (double)f_.min_p) continue;
            kept |= 1u << lane;
        }
        if (f_.min_p > 0 && kept)
            for (uint32_t left = kept; left; left &= left - 1)
                lowest_ = std::min(lowest_, x_[i + __builtin_ctz(left)]);
        return kept;
    }
    std::vector<Candidate> gather(int64_t bucket) {
        std::vector<Candidate> found;
        found.reserve(num_[bucket]);
        int32_t at[LANES];
        double weights[LANES];
        const float nearest = (float)bucket, next = (float)(bucket + 1);
        for (int64_t i = 0; i < n_; i += LANES) {
            const F place = (best_ - load_ids(x_, i, n_)) * scale_;
            I inside = place >= nearest;
            if (bucket + 1 < COUNT) inside &= place < next;
            if (!lane_bits(inside)) continue;
            for (uint32_t left = look(i, at, weights); left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                if (at[lane] == bucket) found.push_back({order_key(x_[i + lane], i + lane), weights[lane]});
            }
        }
        return found;
    }
    // The last of the best candidates that together hold `need`: halves instead of a sort.
    static uint64_t reach(std::vector<Candidate>& from, double need) {
        auto first = from.begin(), end = from.end();
        while (end - first > 1) {
            const auto middle = first + (end - first) / 2;
            std::nth_element(first, middle, end, is_better);
            double upper = 0.0;
            for (auto c = first; c != middle; c++) upper += c->weight;
            if (upper >= need) {
                end = middle;
            } else {
                need -= upper, first = middle;
            }
        }
        return first->key;
    }

    const float* x_;
    const int64_t n_;
    const float best_;
    const Filter f_;
    float scale_, lowest_;  // lowest logit that min_p keeps
    int64_t num_[COUNT], total_ = 0;
    double mass_[COUNT], whole_ = 0.0;
};

EXPORT void sample_tokens(const float* logits, int64_t rows, int64_t n, const float* temperature,
                          const int64_t* top_k, const float* top_p, const float* min_p,
                          const int64_t* seed, const int64_t* sub_index, const int64_t* position,
                          int64_t purpose, int64_t* ids, int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        const float* x = logits + r * n;
        const Filter filter{temperature[r], top_p[r], min_p[r], top_k[r]};
        const Stream stream{(uint64_t)seed[r], (uint64_t)sub_index[r], (uint64_t)position[r],
                            (uint64_t)purpose};
        const float best = row_max(x, n);
        uint64_t cut = order_key(-INFINITY, LAST_ID);
        if (filter.is_on() && std::isfinite(best)) cut = Buckets(x, n, best, filter).cut();
        ids[r] = draw_row(x, n, best, filter.temperature, cut, stream);
    });
}

// A place of a chain of drafts: see step.cpp.
EXPORT void step_draw(const Step* s, int64_t place, int64_t n, const float* temperature,
                      const int64_t* top_k, const float* top_p, const float* min_p,
                      const int64_t* seed, const int64_t* sub_index, const int64_t* position,
                      int64_t purpose, int64_t* ids) {
    sample_tokens(s->logits + place * s->num_rows * n, s->num_rows, n, temperature, top_k, top_p, min_p,
                  seed, sub_index, position, purpose, ids, s->threads);
}
CALLABLE(step_draw)

EXPORT void gumbel_noise(int64_t seed, int64_t sub_index, int64_t position, int64_t purpose,
                         int64_t num, float* out) {
    const Stream stream{(uint64_t)seed, (uint64_t)sub_index, (uint64_t)position, (uint64_t)purpose};
    for (int64_t i = 0; i < num; i += 8) {
        uint32_t words[8];
        philox(stream, i / 8 + 1, words);
        for (int64_t j = 0; j < std::min<int64_t>(8, num - i); j++) out[i + j] = gumbel(words[j]);
    }
}

// ---------------------------------------------------------------- log-probabilities

// The best ids in order; few, so that a new one finds its place by insertion.
static void best_ids(const float* x, int64_t n, int64_t num, uint64_t* best) {
    int64_t have = 0;
    float last = -INFINITY;
    for (int64_t i = 0; i < n; i += LANES) {
        const F v = load_ids(x, i, n);
        const uint32_t inside = i + LANES <= n ? 0xffffu : (1u << (n - i)) - 1;
        uint32_t left = have < num ? inside : lane_bits(v > last);
        for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            const uint64_t key = order_key(v[lane], i + lane);
            if (have == num && key <= best[num - 1]) continue;
            int64_t place = have < num ? have++ : num - 1;
            for (; place > 0 && best[place - 1] < key; place--) best[place] = best[place - 1];
            best[place] = key;
        }
        if (have == num) last = key_logit(best[num - 1]);
    }
}

constexpr int64_t SUMMED = 64 * LANES;  // exponentials added in float before they join the total

static double log_sum_exp(const float* x, int64_t n) {
    const float best = row_max(x, n);
    double total = 0.0;
    for (int64_t first = 0; first < n; first += SUMMED) {
        F sum{};
        for (int64_t i = first; i < std::min(n, first + SUMMED); i += LANES)
            sum += vexp(load_ids(x, i, n) - best);
        total += sum_lanes(sum)[0];
    }
    return (double)best + std::log(total);
}

EXPORT void token_logprobs(const float* logits, int64_t rows, int64_t n, const int64_t* ids,
                           int64_t num_top, float* logprobs, int64_t* top_ids, float* top_logprobs,
                           int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        const float* x = logits + r * n;
        const double norm = log_sum_exp(x, n);
        logprobs[r] = (float)((double)x[ids[r]] - norm);
        if (!num_top) return;
        uint64_t* best = scratch<0, uint64_t>(num_top);
        best_ids(x, n, num_top, best);
        for (int64_t k = 0; k < num_top; k++) {
            const int64_t id = key_id(best[k]);
            top_ids[r * num_top + k] = id;
            top_logprobs[r * num_top + k] = (float)((double)x[id] - norm);
        }
    });
}

// 1 for the best id of a row; a tie goes to the lower id.
EXPORT void token_ranks(const float* logits, int64_t rows, int64_t n, const int64_t* ids,
                        int64_t* ranks, int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        const float* x = logits + r * n;
        const int64_t id = ids[r];
        const F own = splat(x[id]);
        I before{};  // each lane that is true counts -1
        for (int64_t i = 0; i < n; i += LANES) {
            const F v = load_ids(x, i, n);
            before += (v > own) | ((v == own) & (IOTA < splat_i((int32_t)(id - i))));
        }
        int64_t rank = 1;
        for (int lane = 0; lane < LANES; lane++) rank -= before[lane];
        ranks[r] = rank;
    });
}

EXPORT void finite_rows(const float* logits, int64_t rows, int64_t n, uint8_t* finite,
                        int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        I bad{};
        for (int64_t i = 0; i < n; i += LANES) {
            const I bits = (I)load_part(logits + r * n + i, n - i);
            bad |= (bits & 0x7f800000) == splat_i(0x7f800000);
        }
        finite[r] = !lane_bits(bad);
    });
}

// ---------------------------------------------------------------- changes of the logits

constexpr int32_t IN_PROMPT = 1 << 30;  // beside the count in the output

// In place. `tokens` of row r: [starts[r], starts[r + 1]), the first prompt_lens[r] of the prompt.
EXPORT void apply_penalties(float* logits, int64_t rows, int64_t n, const int32_t* tokens,
                            const int64_t* starts, const int64_t* prompt_lens, const float* presence,
                            const float* frequency, const float* repetition, int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        float* x = logits + r * n;
        int32_t* seen = scratch<1, int32_t>(n);  // all zero between calls
        const int32_t *first = tokens + starts[r], *end = tokens + starts[r + 1];
        const int32_t* output = first + prompt_lens[r];
        if (repetition[r] == 1.0f) first = output;  // nobody asks for the prompt
        for (const int32_t* t = first; t < output; t++) seen[*t] = IN_PROMPT;
        for (const int32_t* t = output; t < end; t++) seen[*t]++;
        for (const int32_t* t = first; t < end; t++) {
            const int32_t found = seen[*t], count = found & (IN_PROMPT - 1);
            if (!found) continue;  // done already
            seen[*t] = 0;
            float v = x[*t];
            v = v > 0 ? v / repetition[r] : v * repetition[r];
            v = v - frequency[r] * (float)count;
            x[*t] = v - presence[r] * (count > 0 ? 1.0f : 0.0f);
        }
    });
}

// In place: an id whose bit is 0 in its row's mask is banned.
EXPORT void apply_masks(float* logits, int64_t rows, int64_t n, const int32_t* masks,
                        int64_t words, int64_t threads) {
    parallel(rows, threads, [&](int64_t r) {
        for (int64_t i = 0; i < n; i += LANES) {
            const int32_t bits = (uint32_t)masks[r * words + i / 32] >> i % 32;
            const I allowed = (splat_i(bits) >> IOTA) & 1;
            float* x = logits + r * n + i;
            store_part(x, allowed != 0 ? load_part(x, n - i) : splat(-INFINITY), n - i);
        }
    });
}
