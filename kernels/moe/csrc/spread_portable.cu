// Experts of several ranks: which copy of an expert computes a row. Contract:
// kernels/moe/spread_portable.py.

#include "../../csrc/each.cuh"

namespace {

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

}  // namespace

extern "C" int choose_slots(const int32_t* ids, const int32_t* table, const int32_t* copies, int64_t num,
                            int64_t top_k, int64_t width, int64_t rank, int32_t* counts, int32_t* slots,
                            void* stream) {
  return for_each(num, Choose{ids, table, copies, top_k, width, rank, counts, slots}, stream);
}
