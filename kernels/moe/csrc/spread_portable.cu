// Experts of several ranks: which copy of an expert computes a row. Contract:
// kernels/moe/spread_portable.py.

#include "../../csrc/each.cuh"

namespace {

constexpr int64_t kRun = 64;  // ids that one thread counts

BOTH void count(int32_t* counter, int32_t by) {
#ifdef __CUDA_ARCH__
  atomicAdd(counter, by);
#else
  *counter += by;
#endif
}

struct Choose {
  const int32_t *ids, *table, *copies;
  int64_t top_k, width, rank;
  int32_t *counts, *slots;

  BOTH void operator()(int64_t i) const {
    const int32_t id = ids[i];
    if (id < 0) {
      slots[i] = -1;
      return;
    }
    count(&counts[id], 1);
    slots[i] = table[id * width + (i / top_k + rank) % copies[id]];
  }
};

struct CountHeld {
  const int32_t* slots;
  int64_t num, first, held;
  int32_t* total;

  BOTH void operator()(int64_t run) const {
    int32_t found = 0;
    for (int64_t i = run * kRun; i < each::least((run + 1) * kRun, num); ++i)
      found += slots[i] >= first && slots[i] < first + held;
    if (found) count(total, found);
  }
};

}  // namespace

extern "C" int choose_slots(const int32_t* ids, const int32_t* table, const int32_t* copies, int64_t num,
                            int64_t top_k, int64_t width, int64_t rank, int32_t* counts, int32_t* slots,
                            void* stream) {
  return for_each(num, Choose{ids, table, copies, top_k, width, rank, counts, slots}, stream);
}

extern "C" int count_held(const int32_t* slots, int64_t num, int64_t first, int64_t held, int32_t* total,
                          void* stream) {
  return for_each((num + kRun - 1) / kRun, CountHeld{slots, num, first, held, total}, stream);
}
