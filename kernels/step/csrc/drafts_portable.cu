// Drafts by slot: which a step verifies, what of them holds, and the next ones. Contract:
// kernels/step/drafts_portable.py.

#ifndef __CUDACC__
#include <time.h>
#endif

#include "../../csrc/each.cuh"

namespace {

using namespace each;

constexpr int kRow = 3;   // of a step's row and of a token: slot, count, what it samples
constexpr int kBins = 16;  // of survival
constexpr int kFit = 8;    // of a place: scale, offset, curve of 3, said, was, weight
enum Sampling : int32_t { kNothing = 0, kToken = 1, kMissed = 2, kKept = 3, kWaits = 4 };
enum Flag : int32_t { kLive = 1, kFinite = 2, kDone = 4 };
enum Mask : int32_t { kMask = 1, kFree = 2 };

BOTH int64_t now_ns() {
#ifdef __CUDA_ARCH__
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#elif !defined(__CUDACC__)
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
#else
  return 0;
#endif
}

}  // namespace

// Named: nvcc exports no function that has a parameter of a type without a name outside.
namespace drafts {

using namespace each;

struct Slots {  // one element each, but for tables
  int32_t *kv_len, *max_len, *done, *recent, *stops, *state_block, *window_blocks;
  int32_t* drafted;    // length of the sequence that the drafts continue; -1: there are none
  int32_t* drafts;     // [slots, places]
  float* confidence;   // [slots, places], as the model gave it
  float* survival;     // [slots, places]
  double* fits;        // [places, kFit]
  int64_t places, order, num_stops, max_blocks, first_spare, num_spare, vocab_size;
};
static_assert(sizeof(Slots) == 19 * 8, "as drafts_portable.py packs it");

struct Tables {  // of a step's rows and tokens
  int32_t *rows, *positions;                     // [rows, 3], [rows]
  int32_t *most, *chosen, *widths, *firsts;      // [rows], [rows, places], [rows], [rows]
  int32_t *held, *from;                          // [rows]
  int32_t *tokens, *starts, *place_of, *row_of;  // [tokens, 3], [tokens] each
};
static_assert(sizeof(Tables) == 12 * 8, "as drafts_portable.py packs it");

}  // namespace drafts

namespace {

using drafts::Slots;
using drafts::Tables;

// ---------------------------------------------------------------- before the forward

struct Begin {
  Slots s;
  Tables t;
  const int32_t* given;
  int64_t num_rows, num_tokens, spare;
  int64_t* stamp;

  BOTH void operator()(int64_t i) const {
    if (i == 0 && stamp) *stamp = now_ns();
    if (i < num_tokens) {
      t.tokens[kRow * i] = -1, t.tokens[kRow * i + 1] = 1, t.tokens[kRow * i + 2] = kNothing;
      t.starts[i] = -1, t.place_of[i] = 0, t.row_of[i] = -1;
    }
    if (i >= num_rows) return;
    int32_t slot = given[kRow * i];
    if (slot >= 0 && s.done[slot]) slot = -1;
    const int32_t count = given[kRow * i + 1], what = given[kRow * i + 2];
    t.rows[kRow * i] = slot, t.rows[kRow * i + 1] = count, t.rows[kRow * i + 2] = what;
    t.positions[i] = slot < 0 ? -1 : s.kv_len[slot];
    t.most[i] = slot < 0 ? -1 : most(slot, count, what);
  }
  // Drafts that the row may verify: none stands behind the request's last token.
  BOTH int32_t most(int64_t slot, int32_t count, int32_t what) const {
    const int64_t at = s.kv_len[slot];
    if (what != kToken || spare <= 0 || s.drafted[slot] != at + 1) return 0;
    const int64_t room = least(least(count - 1, s.places), s.max_len[slot] - at - 2);
    return room < 0 ? 0 : static_cast<int32_t>(room);
  }
};

// Whether a draft is among the likeliest; of equals the nearer, then that of the earlier row.
struct Choose {
  Slots s;
  Tables t;
  int64_t num_rows, spare;

  BOTH float survival(int64_t r, int64_t place) const { return s.survival[t.rows[kRow * r] * s.places + place]; }
  BOTH void operator()(int64_t i) const {
    const int64_t r = i / s.places, place = i % s.places;
    t.chosen[i] = 0;
    if (place >= t.most[r]) return;
    const float own = survival(r, place);
    int64_t before = 0;
    if (spare < num_rows * s.places)
      for (int64_t other = 0; other < num_rows; ++other)
        for (int64_t p = 0; p < t.most[other]; ++p) {
          const float its = survival(other, p);
          before += its > own || (its == own && (p < place || (p == place && other < r)));
        }
    t.chosen[i] = before < spare;
  }
};

struct Lay {  // the rows' tokens, one behind the other
  Slots s;
  Tables t;
  int64_t num_tokens;

  BOTH int32_t width(int64_t r) const {
    if (t.most[r] < 0) return 0;
    int32_t found = 1;
    for (int64_t place = 0; place < t.most[r]; ++place) found += t.chosen[r * s.places + place];
    return found;
  }
  BOTH void operator()(int64_t r) const {
    int32_t first = 0;
    for (int64_t other = 0; other < r; ++other) first += width(other);
    const int32_t own = static_cast<int32_t>(least(width(r), num_tokens - first));
    t.widths[r] = own, t.firsts[r] = first;
    for (int32_t place = 0; place < own; ++place) {
      const int64_t at = first + place;
      t.tokens[kRow * at] = t.rows[kRow * r], t.tokens[kRow * at + 2] = t.rows[kRow * r + 2];
      t.starts[at] = t.positions[r] + place, t.place_of[at] = place, t.row_of[at] = static_cast<int32_t>(r);
    }
  }
};

// ---------------------------------------------------------------- sampling

struct PlaceMasks {
  Tables t;
  const int32_t *given, *states;  // [rows, width, words], [rows, width]
  int64_t width, words;
  int32_t *masks, *flags;

  BOTH void operator()(int64_t i) const {
    const int64_t token = i / words, word = i % words, row = t.row_of[token];
    const int64_t from = row * width + t.place_of[token];
    const int32_t state = row < 0 ? static_cast<int32_t>(kFree) : states[from];
    if (word == 0) flags[token] = state;
    if (state == kMask) masks[i] = given[from * words + word];
  }
};

// Tokens behind so many drafts sample now, if all before them were drawn.
struct Turn {
  Slots s;
  Tables t;
  const int32_t *tokens, *found;
  int64_t now;

  BOTH void operator()(int64_t i) const {
    const int32_t slot = t.tokens[kRow * i], place = t.place_of[i];
    int32_t& what = t.tokens[kRow * i + 2];
    if (slot < 0 || t.rows[kRow * t.row_of[i] + 2] != kToken) return;
    if (place < now) {
      if (what == kToken) what = kKept;
    } else if (place > now) {
      what = kWaits;
    } else {
      const bool holds = place == 0 || (found[i - 1] && tokens[i - 1] == s.drafts[slot * s.places + place - 1]);
      what = holds ? kToken : kNothing;
    }
  }
};

// ---------------------------------------------------------------- behind it

struct Accept {
  Slots s;
  Tables t;
  const int32_t *tokens, *found;
  int32_t *flags, *ends, *counts, *firsts, *widths;  // of the host
  int64_t* stamp;

  BOTH void operator()(int64_t r) const {
    const int32_t slot = t.rows[kRow * r];
    flags[r] = ends[r] = counts[r] = 0, firsts[r] = t.firsts[r], widths[r] = t.widths[r];
    t.held[r] = 0, t.from[r] = -1;
    if (slot >= 0) {
      flags[r] = kLive | (t.rows[kRow * r + 2] == kToken ? take(r, slot) : pass(slot));
      ends[r] = s.kv_len[slot];
    }
    if (r == 0 && stamp) *stamp = now_ns();
  }
  BOTH int32_t pass(int64_t slot) const {
    s.kv_len[slot] += 1;
    return 0;
  }
  BOTH int32_t take(int64_t r, int64_t slot) const {
    const int64_t first = t.firsts[r], start = s.kv_len[slot];
    if (t.tokens[kRow * first + 2] == kMissed) return 0;  // the position comes again
    int32_t taken = 0;
    bool is_over = false;
    for (int64_t place = 0; place < t.widths[r]; ++place) {
      const int32_t token = tokens[first + place];
      if (!found[first + place] || token < 0 || token >= s.vocab_size) break;
      t.held[r] = static_cast<int32_t>(place) + 1;
      if (!is_over) {
        push(slot, token);
        taken += 1;
        is_over = start + taken + 1 >= s.max_len[slot];
        for (int64_t c = 0; c < s.num_stops; ++c) is_over |= s.stops[slot * s.num_stops + c] == token;
      }
      if (place + 1 < t.widths[r] && token != s.drafts[slot * s.places + place]) break;
    }
    counts[r] = taken;
    s.kv_len[slot] = static_cast<int32_t>(start + (taken ? taken : 1));
    const int64_t pair = (start + taken - 1) / 2 - start / 2;
    if (taken && pair > 0) t.from[r] = static_cast<int32_t>(s.first_spare + slot * s.num_spare + pair - 1);
    if (!taken || is_over) s.done[slot] = 1;
    return (taken ? kFinite : 0) | (!taken || is_over ? kDone : 0);
  }
  BOTH void push(int64_t slot, int32_t token) const {
    int32_t* ids = s.recent + slot * s.order;
    for (int64_t c = s.order - 1; c > 0; --c) ids[c] = ids[c - 1];
    ids[0] = token;
  }
};

struct KeepPairs {  // the open pair of the last position that holds becomes the request's
  Slots s;
  Tables t;
  float* pairs;
  int64_t size;

  BOTH void operator()(int64_t i) const {
    const int64_t r = i / size, at = i % size;
    if (t.from[r] < 0) return;
    pairs[s.state_block[t.rows[kRow * r]] * size + at] = pairs[t.from[r] * size + at];
  }
};

// A Newton step of a place's logistic regression: services/executor/calibration.py.
struct Learn {
  Slots s;
  Tables t;
  int64_t num_rows;

  BOTH static double logit(float confidence) {
    double x = static_cast<double>(confidence);
    x = x < 1e-6 ? 1e-6 : x > 1 - 1e-6 ? 1 - 1e-6 : x;
    return log(x / (1 - x));
  }
  BOTH static double clipped(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
  BOTH void operator()(int64_t place) const {
    double* fit = s.fits + place * kFit;
    double up = 0, tilt = 0, curve[3] = {0, 0, 0}, said = 0, was = 0, num = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
      const int32_t slot = t.rows[kRow * r], verified = t.widths[r] - 1, accepted = t.held[r] - 1;
      if (slot < 0 || accepted < 0 || place >= verified || place > accepted) continue;
      const double right = place < accepted, x = logit(s.confidence[slot * s.places + place]);
      const double chance = 1 / (1 + exp(-(x * fit[0] + fit[1]))), bend = chance * (1 - chance);
      up += right - chance, tilt += (right - chance) * x;
      curve[0] += bend, curve[1] += bend * x, curve[2] += bend * x * x;
      said += chance, was += right, num += 1;
    }
    if (num == 0) return;
    const double left = exp(-num / 1000.0);
    for (int i = 0; i < 3; ++i) fit[2 + i] = fit[2 + i] * left + curve[i];
    const double one = fit[2] + 1.0, x = fit[3], xx = fit[4] + 4.0, whole = one * xx - x * x;
    fit[1] = clipped(fit[1] + (xx * up - x * tilt) / whole, -4.0, 4.0);
    fit[0] = clipped(fit[0] + (one * tilt - x * up) / whole, 0.05, 4.0);
    fit[5] = fit[5] * 0.98 + said, fit[6] = fit[6] * 0.98 + was, fit[7] = fit[7] * 0.98 + num;
  }
};

// ---------------------------------------------------------------- the draft pass

struct Anchors {
  Slots s;
  const int32_t* given;  // slots
  int64_t num_rows, size, window, half, block, noise, width;
  const float *cos, *sin;
  int32_t *rows, *starts, *ids, *positions, *window_slots;  // [places, rows, 3], [rows], [rows, size] twice, …
  float *cos_out, *sin_out;
  int64_t* stamp;

  BOTH void operator()(int64_t i) const {
    if (i == 0 && stamp) *stamp = now_ns();
    const int64_t r = i / width, c = i % width;
    int64_t slot = given[r];
    if (slot >= 0 && s.done[slot]) slot = -1;
    const int64_t at = slot < 0 ? -1 : s.kv_len[slot];
    if (c == 0) starts[r] = static_cast<int32_t>(at);
    if (c < s.places) {
      int32_t* row = rows + kRow * (c * num_rows + r);
      row[0] = static_cast<int32_t>(slot), row[1] = static_cast<int32_t>(1 + c), row[2] = kToken;
    }
    if (c < size) {
      ids[r * size + c] = static_cast<int32_t>(slot < 0 || c ? noise : s.recent[slot * s.order]);
      positions[r * size + c] = slot < 0 ? -1 : static_cast<int32_t>(at + c);
    }
    if (c < window) {
      const int64_t seen = at - window + c;
      int32_t found = -1;
      if (slot >= 0 && seen >= 0) found = s.window_blocks[slot * s.max_blocks + seen / block];
      window_slots[r * window + c] = found < 0 ? -1 : static_cast<int32_t>(found * block + seen % block);
    }
    if (c < size * half) {
      const int64_t from = (at + c / half) * half + c % half;
      cos_out[r * size * half + c] = slot < 0 ? 0.0f : cos[from];
      sin_out[r * size * half + c] = slot < 0 ? 0.0f : sin[from];
    }
  }
};

struct Store {
  Slots s;
  const int32_t *rows, *ids;  // [rows, 3]; [places, rows]
  const float* chances;       // [places, rows], before the sigmoid
  int64_t num_rows;
  int32_t *ids_out, *lengths_out;  // of the host, [rows, places] and [rows]

  BOTH void operator()(int64_t r) const {
    const int32_t slot = rows[kRow * r];
    lengths_out[r] = -1;
    if (slot < 0) return;
    float alive = 1.0f;
    for (int64_t place = 0; place < s.places; ++place) {
      const int64_t to = slot * s.places + place;
      const float confidence = sigmoid(chances[place * num_rows + r]);
      const double* fit = s.fits + place * kFit;
      const double x = Learn::logit(confidence) * fit[0] + fit[1];
      alive *= static_cast<float>(1 / (1 + exp(-x)));
      s.drafts[to] = ids_out[r * s.places + place] = ids[place * num_rows + r];
      s.confidence[to] = confidence, s.survival[to] = alive;
    }
    s.drafted[slot] = lengths_out[r] = s.kv_len[slot] + 1;
  }
};

struct Report {  // to the host: how many drafts survive how likely, and how wrong confidences are
  Slots s;
  const int32_t* rows;
  int64_t num_rows;
  int32_t* bins;
  float* errors;
  int64_t* stamp;

  BOTH void operator()(int64_t i) const {
    if (i < kBins) {
      int32_t found = 0;
      for (int64_t r = 0; r < num_rows; ++r) {
        const int32_t slot = rows[kRow * r];
        for (int64_t place = 0; slot >= 0 && place < s.places; ++place)
          found += least(static_cast<int64_t>(s.survival[slot * s.places + place] * kBins), kBins - 1) == i;
      }
      bins[i] = found;
    } else {
      const double* fit = s.fits + (i - kBins) * kFit;
      const double seen = fit[7] > 1e-6 ? fit[7] : 1e-6;
      errors[i - kBins] = static_cast<float>((fit[5] - fit[6]) / seen);
    }
    if (i == 0 && stamp) *stamp = now_ns();
  }
};

}  // namespace

// `on`: anything on the device; Slots and Tables lie in host memory.

extern "C" int begin_drafted(const void* on, const Slots* s, const Tables* t, const int32_t* given, int64_t num_rows,
                             int64_t num_tokens, int64_t spare, int64_t* stamp, void* stream) {
  (void)on;
  const int64_t all = num_rows > num_tokens ? num_rows : num_tokens;
  int error = for_each(all, Begin{*s, *t, given, num_rows, num_tokens, spare, stamp}, stream);
  if (error) return error;
  if (spare > 0) error = for_each(num_rows * s->places, Choose{*s, *t, num_rows, spare}, stream);
  if (error) return error;
  return for_each(num_rows, Lay{*s, *t, num_tokens}, stream);
}

extern "C" int place_masks(const int32_t* given, const Tables* t, const int32_t* states, int64_t width, int64_t words,
                           int64_t num_tokens, int32_t* masks, int32_t* flags, void* stream) {
  return for_each(num_tokens * words, PlaceMasks{*t, given, states, width, words, masks, flags}, stream);
}

extern "C" int take_turns(const int32_t* tokens, const Slots* s, const Tables* t, const int32_t* found, int64_t now,
                          int64_t num_tokens, void* stream) {
  return for_each(num_tokens, Turn{*s, *t, tokens, found, now}, stream);
}

extern "C" int accept_drafts(const int32_t* tokens, const Slots* s, const Tables* t, const int32_t* found,
                             int64_t num_rows, int32_t* flags, int32_t* ends, int32_t* counts, int32_t* firsts,
                             int32_t* widths, float* pairs, int64_t pair_size, int64_t verifies, int64_t* stamp,
                             void* stream) {
  int error = for_each(num_rows, Accept{*s, *t, tokens, found, flags, ends, counts, firsts, widths, stamp}, stream);
  if (error || !verifies) return error;
  error = for_each(num_rows * pair_size, KeepPairs{*s, *t, pairs, pair_size}, stream);
  if (error) return error;
  return for_each(s->places, Learn{*s, *t, num_rows}, stream);
}

extern "C" int plan_drafts(const float* cos, const Slots* s, const float* sin, const int32_t* given, int64_t num_rows,
                           int64_t size, int64_t window, int64_t half, int64_t block, int64_t noise, int32_t* rows,
                           int32_t* starts, int32_t* ids, int32_t* positions, int32_t* window_slots, float* cos_out,
                           float* sin_out, int64_t* stamp, void* stream) {
  int64_t width = size * half > window ? size * half : window;
  width = width > s->places ? width : s->places;
  return for_each(num_rows * width,
                  Anchors{*s, given, num_rows, size, window, half, block, noise, width, cos, sin, rows, starts, ids,
                          positions, window_slots, cos_out, sin_out, stamp},
                  stream);
}

extern "C" int store_drafts(const int32_t* rows, const Slots* s, const int32_t* ids, const float* chances,
                            int64_t num_rows, int32_t* ids_out, int32_t* lengths_out, int32_t* bins, float* errors,
                            int64_t* stamp, void* stream) {
  const int error = for_each(num_rows, Store{*s, rows, ids, chances, num_rows, ids_out, lengths_out}, stream);
  if (error) return error;
  return for_each(kBins + s->places, Report{*s, rows, num_rows, bins, errors, stamp}, stream);
}
