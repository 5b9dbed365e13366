// Between two sublayers: the streams take the output of the one before, and give the input of the
// next. Contract: kernels/mhc/seam.py.
#pragma once

#include "gemm.h"
#include "rows.h"
#include "step.h"

constexpr int64_t MAX_STREAMS = 8;

// Streams of one token; `to` may be `x`. HC: number of streams, 0 for any.
template <int HC>
INLINE void expand_streams(const float* x, const float* y, const float* post, const float* comb,
                           int64_t any, int64_t hidden, bool bf16, float* to) {
    const int64_t hc = HC ? HC : any;
    for (int64_t c = 0; c < hidden; c += LANES) {
        const int64_t left = hidden - c;
        const F own = load_part(y + c, left);
        F in[HC ? HC : MAX_STREAMS];
        for (int64_t i = 0; i < hc; i++) in[i] = load_part(x + i * hidden + c, left);
        for (int64_t j = 0; j < hc; j++) {
            F sum = own * post[j];
            for (int64_t i = 0; i < hc; i++) sum = fma(in[i], splat(comb[i * hc + j]), sum);
            store_part(to + j * hidden + c, bf16 ? round_bf16(sum) : sum, left);
        }
    }
}
INLINE void expand_token(const float* x, const float* y, const float* post, const float* comb,
                         int64_t hc, int64_t hidden, bool bf16, float* to) {
    if (hc == 4) return expand_streams<4>(x, y, post, comb, hc, hidden, bf16, to);
    expand_streams<0>(x, y, post, comb, hc, hidden, bf16, to);
}

INLINE F collapse_at(const float* streams, const float* pre, int64_t hc, int64_t hidden, int64_t c) {
    const int64_t left = hidden - c;
    F sum = load_part(streams + c, left) * pre[0];
    for (int64_t i = 1; i < hc; i++)
        sum = fma(load_part(streams + i * hidden + c, left), splat(pre[i]), sum);
    return sum;
}
// weight null: the collapse alone; else the norm of the collapse.
INLINE void collapse_token(const float* streams, const float* pre, int64_t hc, int64_t hidden,
                           const float* weight, float eps, bool bf16, float* out) {
    for (int64_t c = 0; c < hidden; c += LANES) {
        F sum = collapse_at(streams, pre, hc, hidden, c);
        store_part(out + c, bf16 ? round_bf16(sum) : sum, hidden - c);
    }
    if (weight) norm_row(out, weight, hidden, eps, bf16, out);
}

// ---------------------------------------------------------------- mixing weights

// comb[source][destination], sixteen tokens in the lanes.
template <int HC>
static void sinkhorn(F* comb, int64_t any, int64_t iters, float eps) {
    const int64_t hc = HC ? HC : any;
    auto over_columns = [&](F* row, float offset) {
        F sum = row[0];
        for (int64_t j = 1; j < hc; j++) sum += row[j];
        sum = 1.0f / (sum + offset);
        for (int64_t j = 0; j < hc; j++) row[j] *= sum;
    };
    auto over_rows = [&](F* column) {
        F sum = column[0];
        for (int64_t i = 1; i < hc; i++) sum += column[i * hc];
        sum = 1.0f / (sum + eps);
        for (int64_t i = 0; i < hc; i++) column[i * hc] *= sum;
    };
    for (int64_t i = 0; i < hc; i++) {
        F* row = comb + i * hc;
        F most = row[0];
        for (int64_t j = 1; j < hc; j++) most = vmax(most, row[j]);
        for (int64_t j = 0; j < hc; j++) row[j] = vexp(row[j] - most);
        over_columns(row, 0.0f);
        for (int64_t j = 0; j < hc; j++) row[j] += eps;
    }
    for (int64_t j = 0; j < hc; j++) over_rows(comb + j);
    for (int64_t k = 1; k < iters; k++) {
        for (int64_t i = 0; i < hc; i++) over_columns(comb + i * hc, eps);
        for (int64_t j = 0; j < hc; j++) over_rows(comb + j);
    }
}

// Mixing weights of the streams [tokens, hc · hidden].
struct Mix {
    const float *scale, *base;
    int64_t hc, iters;
    float hc_eps, norm_eps;
    Weight fn;
    int64_t width() const { return (2 + hc) * hc; }
};

// Up to sixteen tokens: lanes are tokens from here on. `raw` [width][LANES] is scaled already.
static void mix_lanes(const Mix& m, const F* raw, int64_t tokens, float* pre, float* post, float* comb) {
    const int64_t hc = m.hc;
    F* c = scratch<5, F>(hc * hc);
    float lanes[LANES];
    auto put = [&](float* to, int64_t stride, F v) {
        store(lanes, v);
        for (int64_t t = 0; t < tokens; t++) to[t * stride] = lanes[t];
    };
    for (int64_t j = 0; j < hc; j++) {
        put(pre + j, hc, vsigmoid(raw[j] * m.scale[0] + m.base[j]) + m.hc_eps);
        put(post + j, hc, vsigmoid(raw[hc + j] * m.scale[1] + m.base[hc + j]) * 2.0f);
    }
    for (int64_t j = 0; j < hc * hc; j++) c[j] = raw[2 * hc + j] * m.scale[2] + m.base[2 * hc + j];
    if (hc == 4)
        sinkhorn<4>(c, hc, m.iters, m.hc_eps);
    else
        sinkhorn<0>(c, hc, m.iters, m.hc_eps);
    for (int64_t j = 0; j < hc * hc; j++) put(comb + j, hc * hc, c[j]);
}

// Panels [first, end) of the projection of `count` tokens: raw[token, width].
INLINE void project(const Mix& m, const float* streams, int64_t count, int64_t first, int64_t end,
                    float* raw) {
    const int64_t inner = m.fn.inner, stride = row_stride(inner);
    float* to = raw + first * LANES;
    if (stride == inner) {
        multiply_panels({streams, inner}, count, m.fn, first, end, to, m.width(), false);
        return;
    }
    float* padded = scratch<0, float>(count * stride);
    for (int64_t r = 0; r < count; r++)
        prepare_row(streams + r * inner, inner, NONE, padded + r * stride);
    multiply_panels({padded, stride}, count, m.fn, first, end, to, m.width(), false);
}

// From the projection to the weights, for up to sixteen tokens.
INLINE void mix_projected(const Mix& m, const float* streams, const float* raw, int64_t count,
                          float* pre, float* post, float* comb) {
    const int64_t inner = m.fn.inner, width = m.width();
    F* lanes = scratch<2, F>(width);
    std::memset((void*)lanes, 0, width * sizeof(F));
    for (int64_t i = 0; i < count; i++) {
        const float factor = rms_scale(streams + i * inner, inner, m.norm_eps);
        for (int64_t j = 0; j < width; j++) ((float*)(lanes + j))[i] = raw[i * width + j] * factor;
    }
    mix_lanes(m, lanes, count, pre, post, comb);
}

constexpr int64_t MIX_TOKENS = 48;  // a job: the projection is read once for all of them

// Before the projection of tokens [first, end): prepare(first, end).
template <class Prepare>
static void mix_tokens(const Mix& m, const float* streams, int64_t tokens, int64_t threads,
                       float* pre, float* post, float* comb, const Prepare& prepare) {
    const int64_t inner = m.fn.inner, hc = m.hc, width = m.width();
    const auto finish = [&](int64_t first, int64_t end, const float* raw) {
        for (int64_t t = first; t < end; t += LANES)
            mix_projected(m, streams + t * inner, raw + (t - first) * width,
                          std::min(LANES, end - t), pre + t * hc, post + t * hc, comb + t * hc * hc);
    };
    if (tokens < MIX_TOKENS * threads && threads > 1) {  // too few blocks: share out the projection
        float* raw = scratch<1, float>(tokens * width);
        parallel_ranges(tokens, threads, 1, prepare);
        parallel(m.fn.panels(), threads,
                 [&](int64_t panel) { project(m, streams, tokens, panel, panel + 1, raw); });
        parallel((tokens + LANES - 1) / LANES, threads, [&](int64_t block) {
            const int64_t first = block * LANES;
            finish(first, std::min(tokens, first + LANES), raw + first * width);
        });
        return;
    }
    parallel((tokens + MIX_TOKENS - 1) / MIX_TOKENS, threads, [&](int64_t block) {
        const int64_t first = block * MIX_TOKENS, end = std::min(tokens, first + MIX_TOKENS);
        prepare(first, end);
        float* raw = scratch<1, float>((end - first) * width);
        project(m, streams + first * inner, end - first, 0, m.fn.panels(), raw);
        finish(first, end, raw);
    });
}

// ---------------------------------------------------------------- of a step

// y, what the sublayer before gave, null: there is none. u null: none follows directly; norm, fn and
// all behind it are unused then. pre, post, comb: of the sublayer before, then of the next one.
EXPORT void step_seam(const Step* s, float* streams, int64_t hc, int64_t hidden, const float* y,
                      int64_t bf16, float* pre, float* post, float* comb, float* u,
                      const float* norm, float eps, const uint32_t* fn, int64_t kind,
                      const float* scale, const float* base, int64_t iters, float hc_eps) {
    const int64_t inner = hc * hidden;
    const auto prepare = [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            float* x = streams + t * inner;
            if (y)
                expand_token(x, y + t * hidden, post + t * hc, comb + t * hc * hc, hc, hidden, bf16, x);
            if (u) collapse_token(x, pre + t * hc, hc, hidden, norm, eps, bf16, u + t * hidden);
        }
    };
    if (!u) return parallel_ranges(s->num_tokens, s->threads, 1, prepare);
    const Mix m{scale, base, hc, iters, hc_eps, eps, {fn, (Kind)kind, inner, (2 + hc) * hc}};
    mix_tokens(m, streams, s->num_tokens, s->threads, pre, post, comb, prepare);
}

// The normed collapse behind the last sublayer, of the tokens whose logits are wanted.
EXPORT void step_last(const Step* s, const float* streams, int64_t hc, int64_t hidden,
                      const float* y, int64_t bf16, const float* pre, const float* post,
                      const float* comb, const float* norm, float eps, float* out) {
    parallel_ranges(s->num_wanted, s->threads, 1, [&](int64_t first, int64_t end) {
        float* x = scratch<0, float>(hc * hidden);
        for (int64_t i = first; i < end; i++) {
            const int64_t t = s->wanted[i];
            expand_token(streams + t * hc * hidden, y + t * hidden, post + t * hc,
                         comb + t * hc * hc, hc, hidden, bf16, x);
            collapse_token(x, pre + t * hc, hc, hidden, norm, eps, bf16, out + i * hidden);
        }
    });
}

// The mean of the streams, into columns [at, at + hidden) of the step's features.
EXPORT void step_feature(const Step* s, const float* streams, int64_t hc, int64_t hidden,
                         int64_t bf16, int64_t at, int64_t stride) {
    float share[MAX_STREAMS];
    std::fill(share, share + hc, 1.0f / (float)hc);
    parallel_ranges(s->num_tokens, s->threads, 8, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++)
            collapse_token(streams + t * hc * hidden, share, hc, hidden, nullptr, 0.0f, bf16,
                           s->features + t * stride + at);
    });
}

// rms_norm of each token: [num_tokens, n].
EXPORT void step_norm(const Step* s, const float* x, int64_t n, const float* weight, float eps,
                      int64_t bf16, float* out) {
    parallel_ranges(s->num_tokens, s->threads, 8, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++)
            norm_row(x + t * n, weight, n, eps, bf16, out + t * n);
    });
}

CALLABLE(step_seam)
CALLABLE(step_last)
CALLABLE(step_feature)
CALLABLE(step_norm)
