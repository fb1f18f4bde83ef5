// Moves of K and V between slots of a paged KV cache; one call moves them in all layers.
//
// The cache of one block and head is K transposed [head_size, block_size], then
// V [block_size, head_size]. The packed layout, for AMX, is
// K [block_size / 16, head_size / 2, 16 keys, 2 dimensions], then
// V [head_size / 16, block_size / 2, 16 dimensions, 2 keys].

#include <cstdint>
#include <cstring>

extern "C" {

struct LayerCache {
  char* data;
  int64_t block, head;  // strides in bytes
  int64_t heads, head_size;
};

}  // extern "C"

namespace {

template <typename T, bool PACKED = false>
void move_layer(const LayerCache& c, int64_t block_size, int64_t moves, const int64_t* src,
                const int64_t* dst) {
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < moves; ++i) {
      auto block = [&](int64_t slot) {
        return reinterpret_cast<T*>(c.data + slot / block_size * c.block + h * c.head);
      };
      const T* from = block(src[i]);
      T* to = block(dst[i]);
      const int64_t a = src[i] % block_size, b = dst[i] % block_size;
      const int64_t values = block_size * c.head_size;
      if (PACKED) {
        auto key = [&](int64_t at) { return at / 16 * 16 * c.head_size + at % 16 * 2; };
        auto value = [&](int64_t at) { return values + at / 2 * 32 + at % 2; };
        for (int64_t d = 0; d < c.head_size; d += 2)
          std::memmove(to + key(b) + d * 16, from + key(a) + d * 16, 2 * sizeof(T));
        for (int64_t d = 0; d < c.head_size; ++d) {
          const int64_t here = d / 16 * 16 * block_size + d % 16 * 2;
          to[value(b) + here] = from[value(a) + here];
        }
        continue;
      }
      for (int64_t d = 0; d < c.head_size; ++d) to[d * block_size + b] = from[d * block_size + a];
      std::memmove(to + values + b * c.head_size, from + values + a * c.head_size,
                   c.head_size * sizeof(T));
    }
}

}  // namespace

// Copies slot src[i] to slot dst[i] in every layer, in ascending order of i.
extern "C" void lookahead_move_kv(const LayerCache* layers, int64_t num_layers, int64_t block_size,
                                  int64_t element_size, int64_t moves, const int64_t* src,
                                  const int64_t* dst, int32_t threads, int32_t packed) {
  auto move = [&](int64_t i) {
    if (packed)
      move_layer<uint16_t, true>(layers[i], block_size, moves, src, dst);
    else if (element_size == 2)
      move_layer<uint16_t>(layers[i], block_size, moves, src, dst);
    else
      move_layer<uint32_t>(layers[i], block_size, moves, src, dst);
  };
  if (threads == 1 || num_layers == 1) {
    for (int64_t i = 0; i < num_layers; ++i) move(i);
  } else {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < num_layers; ++i) move(i);
  }
}
