// The last look at a row on sm_90, by a block: which ids its filters keep, the draw among them, and
// log-probabilities.

#pragma once

#include "logprobs.cuh"

namespace sampling {

constexpr int kBuckets = kThreads;
constexpr float kSpan = 40.0f;  // e^-40: what lies below weighs nothing
constexpr int kFew = 256;       // best ids that are looked for among those of the best units

struct Scratch {  // of a row; what lies before `most` is zero between two calls
  unsigned long long best, score;  // keys
  uint32_t largest, is_bad;
  unsigned long long weights[kBuckets];
  uint32_t counts[kBuckets];
};
static_assert(sizeof(Scratch) == 771 * 8, "as sample_cuda.py has it");

struct Space {
  Scratch* own;
  uint32_t* most;  // logit of each unit, as `ordered` has it
  uint32_t* tops;  // the same of adjusted logits, of rows with filters
  float* sums;     // of exponentials, of each kSummed ids
  uint8_t* may;    // bits of each group, of rows with bans and filters

  __device__ Space(const Arguments& a, int64_t r) {
    const int64_t n = a.num_ids, units = (n + kUnit - 1) / kUnit, sums = (n + kSummed - 1) / kSummed;
    const int64_t words = sizeof(Scratch) / 8 + units + 1 + (sums + 1) / 2 + (n + 63) / 64;
    uint64_t* at = a.scratch + r * words;
    own = reinterpret_cast<Scratch*>(at), at += sizeof(Scratch) / 8;
    most = reinterpret_cast<uint32_t*>(at), tops = most + units, at += units + 1;
    this->sums = reinterpret_cast<float*>(at), at += (sums + 1) / 2;
    may = reinterpret_cast<uint8_t*>(at);
  }
};

// A group's adjusted logits, behind `scan`.
__device__ __forceinline__ void load_adjusted(const Row& row, const Space& space, int64_t first, float (&v)[kGroup]) {
  load_group(row, first, v);
  adjust(row, first, row.bans() ? space.may[first / kGroup] : 0xffu, v);
}

struct Bucket {
  float best, scale;

  __device__ Bucket(const Row& row, float best_logit)
      : best(best_logit), scale(fminf(kBuckets / (kSpan * row.own.temperature), 1e30f)) {}
  __device__ __forceinline__ int operator()(float v) const {
    return static_cast<int>(fminf(fmaxf((best - v) * scale, 0.0f), static_cast<float>(kBuckets - 1)));
  }
};

// Whether the row's filters have something to do, behind `scan`.
__device__ __forceinline__ bool is_filtered(const Row& row, const Scratch& own) {
  return row.filters() && own.best && is_finite(key_logit(own.best));
}
// Whether they leave few ids, as a rule: then these are listed, and nothing is added up before.
__device__ __forceinline__ bool leaves_few(const Row& row) {
  return row.own.min_p > 0 || (row.own.top_k > 0 && row.own.top_k <= kFew);
}

class Finish {
 public:
  __device__ Finish(const Arguments& arguments, int64_t index, const Row& own, const Space& scratch, Shared& shared)
      : a(arguments), r(index), row(own), space(scratch), s(shared) {}

  // The id that is drawn; -1: none can be.
  __device__ int64_t token() {
    if (space.own->is_bad) return -1;
    const bool is_drawn = row.own.temperature > 0 && !row.filters();
    if (is_drawn) return space.own->score ? key_id(space.own->score) : -1;
    const uint64_t best = space.own->best;
    if (!best) return -1;
    if (!(row.own.temperature > 0)) return key_id(best);
    const float most = key_logit(best);
    if (!is_finite(most)) return draw(order_key(-INFINITY, kLastId));
    return draw(leaves_few(row) ? cut_few(most) : cut(most));
  }

  __device__ void logprobs(int64_t token) {
    const Scan scan{unordered(space.own->largest), space.most, space.sums};
    const double norm = log_sum(s, row, scan);
    const auto logprob = [&](int64_t id) { return static_cast<float>(static_cast<double>(row.x[id]) - norm); };
    const int num_top = min(static_cast<int>(row.n), min(row.own.num_top, kMaxTop));
    if (threadIdx.x == 0) write_logprob(a, r, logprob(token), num_top);
    if (num_top > 0)
      best_ids(s, row, scan, num_top, [&](int place, int32_t id) { write_top(a, r, place, id, logprob(id)); });
  }

 private:
  // Key of the last id that the filters keep, among ids that are listed.
  __device__ uint64_t cut_few(float best) {
    const Weights weights(row, best, a.unit);
    const int units = static_cast<int>((row.n + kUnit - 1) / kUnit), top_k = row.own.top_k;
    const uint64_t bound = top_k > 0 && top_k <= kFew ? unit_bound(s, space.tops, units, top_k) : 0;
    const float low = bound ? key_logit(bound) : -INFINITY;
    const auto keeps = [&](float v) { return v > -INFINITY && v >= low && weights.keeps(v); };
    const auto visit_all = [&](const auto& seen) {
      in_units(keeps, [&](const float(&v)[kGroup], int64_t first) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
          if (keeps(v[j])) seen(order_key(v[j], first + j), row.own.top_p < 1.0f ? weights(v[j]) : 0);
      });
    };
    gather(visit_all);
    const auto visit = [&](const auto& seen) {
      if (s.num > kList) {
        visit_all(seen);
      } else {
        visit_list(s, seen);
      }
    };
    const uint64_t last = top_k > 0 && top_k < s.num ? select(s, visit, false, top_k) : ~s.least;
    if (row.own.top_p >= 1.0f) return last;
    uint64_t kept = 0;
    visit([&](uint64_t key, uint64_t weight) { kept += key >= last ? weight : 0; });
    return select(s, visit, true, needed(row.own.top_p, block_sum(s, kept)));
  }

  // The same from what lies in buckets, of which only the last one is looked at.
  __device__ uint64_t cut(float best) {
    const Weights weights(row, best, a.unit);
    const Bucket bucket(row, best);
    const uint32_t own_count = space.own->counts[threadIdx.x];
    const uint64_t own_weight = space.own->weights[threadIdx.x];
    const uint64_t num = block_sum(s, own_count), top_k = row.own.top_k;
    uint64_t last = order_key(-INFINITY, kLastId), kept = 0, before;
    int end = kBuckets;
    const auto visit_all = [&](const auto& seen) { in_bucket(weights, bucket, end, seen); };
    const auto visit = [&](const auto& seen) {
      if (s.num > kList) {
        visit_all(seen);
      } else {
        visit_list(s, seen);
      }
    };
    const bool has_edge = row.own.top_k > 0 && top_k < num;
    if (has_edge) {
      end = first_to_reach(s, own_count, top_k, before);
      gather(visit_all);
      last = select(s, visit, false, top_k - before);
      uint64_t inside = 0;
      visit([&](uint64_t key, uint64_t weight) { inside += key >= last ? weight : 0; });
      kept = block_sum(s, static_cast<int>(threadIdx.x) < end ? own_weight + inside : inside);
    }
    if (row.own.top_p >= 1.0f) return last;
    if (!has_edge) kept = block_sum(s, own_weight);
    const uint64_t need = needed(row.own.top_p, kept);
    const uint64_t held = static_cast<int>(threadIdx.x) < end ? own_weight : 0;
    const int at = first_to_reach(s, held, need, before);
    if (at == kThreads) {  // inside the edge, which is still listed
      const uint64_t all = block_sum(s, held);
      return has_edge ? larger(last, select(s, visit, true, need - all)) : last;
    }
    end = at;
    gather(visit_all);
    return select(s, visit, true, need - before);
  }

  // Calls back, warp by warp, with the adjusted logits of the units whose best is wanted.
  template <class Wanted, class Seen>
  __device__ __forceinline__ void in_units(const Wanted& wanted, const Seen& seen) const {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t units = (row.n + kUnit - 1) / kUnit;
    for (int64_t base = warp; base < units; base += kThreads) {
      const int64_t own = base + lane * kWarps;
      const bool takes = own < units && wanted(unordered(space.tops[own]));
      unsigned todo = __ballot_sync(~0u, takes);
      float next[kGroup];
      int64_t first = 0;
      if (todo) load_group(row, first = unit_at(base, todo), next);
      while (todo) {
        float v[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v[j] = next[j];
        const int64_t now = first;
        todo &= todo - 1;
        if (todo) load_group(row, first = unit_at(base, todo), next);
        adjust(row, now, row.bans() && now < row.n ? space.may[now / kGroup] : 0xffu, v);
        seen(v, now);
      }
    }
  }
  __device__ __forceinline__ static int64_t unit_at(int64_t base, unsigned todo) {
    return (base + (__ffs(todo) - 1) * (kThreads / 32)) * kUnit + threadIdx.x % 32 * kGroup;
  }

  template <class Seen>
  __device__ __forceinline__ void in_bucket(const Weights& weights, const Bucket& bucket, int wanted,
                                            const Seen& seen) const {
    const auto reaches = [&](float top) { return top > -INFINITY && bucket(top) <= wanted; };
    in_units(reaches, [&](const float(&v)[kGroup], int64_t first) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (!(v[j] > -INFINITY) || bucket(v[j]) != wanted) continue;
        seen(order_key(v[j], first + j), row.own.top_p < 1.0f ? weights(v[j]) : 0);
      }
    });
  }

  // List what `visit` calls back with; only how much it is if that is too much.
  template <class Visit>
  __device__ void gather(const Visit& visit) {
    __syncthreads();
    if (threadIdx.x == 0) s.num = 0, s.most = s.least = 0;
    __syncthreads();
    uint64_t most = 0, least = 0;
    visit([&](uint64_t key, uint64_t weight) {
      const uint32_t at = atomicAdd(&s.num, 1u);
      if (at < kList) s.keys[at] = key, s.weights[at] = weight;
      most = larger(most, key), least = larger(least, ~key);
    });
    span(s, most, least);
  }

  __device__ int64_t draw(uint64_t last) {
    __syncthreads();
    if (threadIdx.x == 0) s.top = 0, s.most = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    Draw draw(row.own.temperature, -INFINITY);
    const float bound = key_logit(last);
    in_units([&](float top) { return top >= bound; }, [&](const float(&given)[kGroup], int64_t first) {
      float v[kGroup], most = -INFINITY;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        v[j] = order_key(given[j], first + j) < last ? -INFINITY : given[j];
        most = fmaxf(most, v[j]);
      }
      const uint32_t known = __shfl_sync(~0u, *static_cast<volatile uint32_t*>(&s.top), 0);
      if (known) draw.top = fmaxf(draw.top, unordered(known));
      draw.unit(row, v, most, first);
      if (lane == 0 && draw.top > -INFINITY) atomicMax(&s.top, ordered(draw.top));
    });
    const uint64_t key = draw.finish();
    if (lane == 0) atomicMax(&s.most, static_cast<unsigned long long>(key));
    __syncthreads();
    return s.most ? key_id(s.most) : -1;
  }

  const Arguments& a;
  const int64_t r;
  const Row& row;
  const Space& space;
  Shared& s;
};

}  // namespace sampling
