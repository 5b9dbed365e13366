// Hash of the last ids and the table's rows, of any shape. Contract: kernels/engram/gather_portable.py.

#include "../../csrc/each.cuh"

namespace {

using namespace each;

constexpr int kPiece = 16;  // channels of an element

struct Gather {
  const int64_t* last_ids;  // [tokens, order], newest first
  int64_t order, pad_id;
  const int64_t *multipliers, *primes, *offsets;
  int64_t heads;
  const uint8_t *table, *scales;
  int64_t dim;
  bool bf16;
  void* out;

  BOTH int64_t row_of(int64_t token, int64_t column) const {
    uint64_t mixed = 0;
    bool is_dead = false;
    for (int64_t back = 0; back <= column / heads + 1; ++back) {
      const int64_t found = is_dead ? -1 : last_ids[token * order + back];
      is_dead = found < 0;
      mixed ^= static_cast<uint64_t>(is_dead ? pad_id : found) * static_cast<uint64_t>(multipliers[back]);
    }
    const int64_t left = static_cast<int64_t>(mixed) % primes[column];
    return (left < 0 ? left + primes[column] : left) + offsets[column];
  }
  BOTH void operator()(int64_t i) const {
    struct Codes {
      uint64_t halves[2];
    };
    const int64_t pieces = dim / kPiece, columns = (order - 1) * heads, at = i % pieces;
    const int64_t row = row_of(i / pieces / columns, i / pieces % columns);
    const Codes codes = *reinterpret_cast<const Codes*>(table + row * dim + at * kPiece);
    const float scale = from_ue8m0(scales[row * (dim / kGroup) + at * kPiece / kGroup]);
    for (int c = 0; c < kPiece; ++c) {
      const float value = from_e4m3(static_cast<uint32_t>(codes.halves[c / 8] >> (c % 8 * 8)) & 255u) * scale;
      if (bf16)
        static_cast<uint16_t*>(out)[i * kPiece + c] = static_cast<uint16_t>(bits_of(value) >> 16);
      else
        static_cast<float*>(out)[i * kPiece + c] = value;
    }
  }
};

}  // namespace

// `table` and `scales` may lie in host memory that the device can read.
extern "C" int gather(const int64_t* last_ids, int64_t tokens, int64_t order, int64_t pad_id,
                      const int64_t* multipliers, const int64_t* primes, const int64_t* offsets, int64_t heads,
                      const uint8_t* table, const uint8_t* scales, int64_t dim, int64_t bf16, void* out,
                      void* stream) {
  const Gather each{last_ids, order, pad_id, multipliers, primes, offsets, heads, table, scales, dim, !!bf16, out};
  return for_each(tokens * (order - 1) * heads * (dim / kPiece), each, stream);
}
