// Hyper-connections and norms. Contracts: kernels/mhc/*.py.
#include "gemm.h"
#include "rows.h"

constexpr int64_t BLOCK = 48;  // tokens a job: the projection is read once for all of them

EXPORT void rms_norm(const float* x, int64_t stride, int64_t rows, int64_t n, const float* weight,
                     float eps, int64_t bf16, float* out) {
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * stride, weight, n, eps, bf16, out + r * n);
}

INLINE F collapse_at(const float* streams, const float* pre, int64_t hc, int64_t hidden, int64_t c) {
    const int64_t left = hidden - c;
    F sum = load_part(streams + c, left) * pre[0];
    for (int64_t i = 1; i < hc; i++)
        sum = fma(load_part(streams + i * hidden + c, left), splat(pre[i]), sum);
    return sum;
}

// weight null: the collapse alone; else the norm of the collapse.
EXPORT void collapse(const float* streams, const float* pre, int64_t tokens, int64_t hc,
                     int64_t hidden, const float* weight, float eps, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++, streams += hc * hidden, pre += hc, out += hidden) {
        for (int64_t c = 0; c < hidden; c += LANES) {
            F sum = collapse_at(streams, pre, hc, hidden, c);
            store_part(out + c, bf16 ? round_bf16(sum) : sum, hidden - c);
        }
        if (weight) norm_row(out, weight, hidden, eps, bf16, out);
    }
}

// out[j] = post[j] · y + Σ_i comb[i, j] · streams[i]
EXPORT void expand(const float* streams, const float* y, const float* post, const float* comb,
                   int64_t tokens, int64_t hc, int64_t hidden, int64_t bf16, float* out) {
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t c = 0; c < hidden; c += LANES) {
            const int64_t left = hidden - c;
            const F own = load_part(y + c, left);
            for (int64_t j = 0; j < hc; j++) {
                F sum = own * post[j];
                for (int64_t i = 0; i < hc; i++)
                    sum = fma(load_part(streams + i * hidden + c, left), splat(comb[i * hc + j]), sum);
                store_part(out + j * hidden + c, bf16 ? round_bf16(sum) : sum, left);
            }
        }
        streams += hc * hidden, out += hc * hidden, y += hidden, post += hc, comb += hc * hc;
    }
}

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

struct Mix {
    const float *scale, *base;
    int64_t hc, iters;
    float hc_eps;
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

EXPORT void hyper_mix(const float* streams, const uint32_t* fn, int64_t kind, const float* scale,
                      const float* base, int64_t tokens, int64_t hc, int64_t hidden, int64_t iters,
                      float hc_eps, float norm_eps, float* pre, float* post, float* comb,
                      int64_t threads) {
    const Mix m{scale, base, hc, iters, hc_eps};
    const int64_t inner = hc * hidden, width = m.width(), stride = row_stride(inner);
    const Weight w{fn, (Kind)kind, inner, width};
    parallel((tokens + BLOCK - 1) / BLOCK, threads, [&](int64_t block) {
        const int64_t first = block * BLOCK, count = std::min(BLOCK, tokens - first);
        const float* rows = streams + first * inner;
        float* raw = scratch<1, float>(count * width);
        if (stride == inner) {
            multiply_panels({rows, inner}, count, w, 0, w.panels(), raw, width, false);
        } else {
            float* padded = scratch<0, float>(count * stride);
            for (int64_t r = 0; r < count; r++)
                prepare_row(rows + r * inner, inner, NONE, padded + r * stride);
            multiply_panels({padded, stride}, count, w, 0, w.panels(), raw, width, false);
        }
        F* lanes = scratch<2, F>(width);
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t some = std::min(LANES, count - t);
            std::memset(lanes, 0, width * sizeof(F));
            for (int64_t i = 0; i < some; i++) {
                const float factor = rms_scale(rows + (t + i) * inner, inner, norm_eps);
                for (int64_t j = 0; j < width; j++)
                    ((float*)(lanes + j))[i] = raw[(t + i) * width + j] * factor;
            }
            const int64_t at = first + t;
            mix_lanes(m, lanes, some, pre + at * hc, post + at * hc, comb + at * hc * hc);
        }
    });
}
