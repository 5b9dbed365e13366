// Ranks as threads through many exchanges, for ThreadSanitizer: tests/kernels/test_sanitizers.py.

#include <cstdio>
#include <random>
#include <thread>

#include "exchange.cu"

namespace {

constexpr int kRanks = 3, kCapacity = 9, kHidden = 96, kTopK = 3, kExperts = 10, kExchanges = 200;
const int32_t kOwners[kExperts] = {2, 0, 1, 1, 0, 2, 2, 1, 0, 0};

// Expert e gives e + 1 wherever it is. Returns how many sums were wrong.
int run(Group group, int rank, uint8_t* const* windows) {
  std::vector<uint32_t> state(4), status(6);
  group.rank = rank, group.windows = windows;
  group.state = state.data(), group.status = status.data();
  std::mt19937 draw(rank);
  int wrong = 0;
  for (int exchange = 0; exchange < kExchanges; ++exchange) {
    const int tokens = draw() % (kCapacity + 1), arrived = kRanks * kCapacity;
    std::vector<float> x(kCapacity * kHidden, 1.0f), weights(kCapacity * kTopK, 1.0f), out(kCapacity * kHidden);
    std::vector<int32_t> ids(kCapacity * kTopK), their_ids(arrived * kTopK);
    int32_t rows = 0, held = 0;
    std::vector<float> their_x(arrived * kHidden), their_weights(arrived * kTopK), slots(arrived * kTopK * kHidden);
    for (int token = 0; token < tokens; ++token) {
      const int first = draw() % (kExperts - kTopK + 1);
      for (int k = 0; k < kTopK; ++k) ids[token * kTopK + k] = first + k;
    }
    exchange_send(&group, kCapacity, tokens, x.data(), 0, ids.data(), weights.data(), kOwners, their_x.data(),
                  their_ids.data(), their_weights.data(), &rows, nullptr);
    exchange_receive(&group, kCapacity, their_x.data(), 0, their_ids.data(),
                     their_weights.data(), &rows, nullptr);
    for (const int32_t id : their_ids) held += id >= 0;
    wrong += rows != held;
    for (int i = 0; i < arrived * kTopK * kHidden; ++i) {
      const int32_t id = their_ids[i / kHidden];
      slots[i] = id < 0 ? NAN : id + 1.0f;
    }
    exchange_return(&group, kCapacity, slots.data(), nullptr);
    exchange_reduce(&group, tokens, kCapacity, ids.data(), kOwners, slots.data(), out.data(), nullptr);
    for (int token = 0; token < tokens; ++token)
      wrong += out[token * kHidden + kHidden - 1] != 3.0f * ids[token * kTopK] + 6.0f;
    wrong += status[kCode] != kFine;
  }
  return wrong;
}

}  // namespace

int main() {
  Group group{};
  group.ranks = kRanks, group.capacity = kCapacity, group.hidden = kHidden, group.top_k = kTopK;
  group.is_fp8 = 1, group.slot_bytes = 4, group.patience_ns = 60'000'000'000;
  const uint64_t bytes = exchange_window_bytes(&group);
  std::vector<std::vector<uint64_t>> memory(kRanks, std::vector<uint64_t>(bytes / 8));
  std::vector<uint8_t*> windows;
  for (auto& own : memory) windows.push_back(reinterpret_cast<uint8_t*>(own.data()));
  std::vector<int> wrong(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] { wrong[rank] = run(group, rank, windows.data()); });
  for (auto& rank : ranks) rank.join();
  for (const int count : wrong)
    if (count) return 1;
  std::puts("clean");
}
