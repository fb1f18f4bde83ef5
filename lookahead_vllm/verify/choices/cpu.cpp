// The largest logits of each row, found with integer comparisons.

#include <cstdint>

namespace {

constexpr int64_t kPart = 128;
constexpr int32_t kMost = 16;

// A signed integer that orders like the float with these bits. Floats are stored as sign and
// magnitude, so the magnitude of negative floats is inverted. A positive NaN is the largest.
template <typename Bits>
inline Bits key_of(Bits bits) {
  constexpr int shift = 8 * sizeof(Bits) - 1;
  constexpr Bits most = static_cast<Bits>(~(static_cast<Bits>(1) << shift));
  return bits ^ static_cast<Bits>((bits >> shift) & most);
}

// The k largest keys so far, in descending order; of equal keys, the first comes first.
template <typename Bits>
struct Best {
  Bits keys[kMost];
  int64_t places[kMost];
  int32_t k, size = 0;

  explicit Best(int32_t k) : k(k) {}

  inline void meet(Bits key, int64_t place) {
    if (size == k && key <= keys[k - 1]) return;
    int32_t at = size < k ? size++ : k - 1;
    for (; at > 0 && keys[at - 1] < key; --at) {
      keys[at] = keys[at - 1];
      places[at] = places[at - 1];
    }
    keys[at] = key;
    places[at] = place;
  }
};

template <typename Bits>
void largest(const Bits* logits, int64_t vocab, int32_t k, int32_t* tokens) {
  // The k largest logits are in the k parts with the largest maxima, or in the remainder.
  Best<Bits> parts(k);
  int64_t first = 0;
  for (; first + kPart <= vocab; first += kPart) {
    Bits most = key_of(logits[first]);
    for (int64_t i = 1; i < kPart; ++i) {
      const Bits key = key_of(logits[first + i]);
      most = key > most ? key : most;
    }
    parts.meet(most, first);
  }
  Best<Bits> best(k);
  for (int32_t part = 0; part < parts.size; ++part)
    for (int64_t i = 0; i < kPart; ++i)
      best.meet(key_of(logits[parts.places[part] + i]), parts.places[part] + i);
  for (; first < vocab; ++first) best.meet(key_of(logits[first]), first);
  for (int32_t rank = 0; rank < k; ++rank)
    tokens[rank] = static_cast<int32_t>(best.places[rank]);
}

template <typename Bits>
void all_largest(const Bits* logits, int64_t stride, int64_t vocab, int64_t num_rows,
                 const int64_t* rows, int32_t k, int32_t threads, int32_t* tokens) {
#pragma omp parallel for num_threads(threads) if (num_rows > 8)
  for (int64_t i = 0; i < num_rows; ++i)
    largest(logits + rows[i] * stride, vocab, k, tokens + i * k);
}

}  // namespace

extern "C" {

// Writes `tokens`, int32 [num_rows, k]; k is at most 16 and at most `vocab`. `element_size` is 4
// for float32, 2 for bfloat16 and float16. `stride` is in elements.
void lookahead_top_choices(const void* logits, int32_t element_size, int64_t stride, int64_t vocab,
                         int64_t num_rows, const int64_t* rows, int32_t k, int32_t threads,
                         int32_t* tokens) {
  if (element_size == 2)
    all_largest(static_cast<const int16_t*>(logits), stride, vocab, num_rows, rows, k, threads,
                tokens);
  else
    all_largest(static_cast<const int32_t*>(logits), stride, vocab, num_rows, rows, k, threads,
                tokens);
}

}  // extern "C"
