// Tree attention over a paged KV cache on CPUs.
//
// A task is (tree, KV head, rows, range of keys). Its rows are the query heads that share the KV
// head, so one load of K and V serves many rows. All sums are float32. Only products of queries and
// keys may be computed from bfloat16, which is exact. The softmax is online, tile by tile. If tasks
// split the keys of a tree, each task writes partial results (sum of p * v, max, sum), and the last
// task of the group merges them.
//
// The cache of one block and head is K transposed [head_size, block_size], then
// V [block_size, head_size]. The packed layout, for AMX, is
// K [block_size / 16, head_size / 2, 16 keys, 2 dimensions], then
// V [head_size / 16, block_size / 2, 16 dimensions, 2 keys].

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 12;  // floats per vector, rows per register tile (x 2 vectors)
#elif defined(__AVX__)
constexpr int VL = 8, MR = 6;
#elif defined(__aarch64__)
constexpr int VL = 4, MR = 8;
#else
constexpr int VL = 4, MR = 4;
#endif
constexpr int TILE = 128;      // keys per tile
constexpr int MAX_ROWS = 192;  // rows per task
constexpr int QUERY_ROW = 528;  // stride of query rows in floats; a constant for speed
constexpr float LOWEST = -FLT_MAX;

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

template <typename V, typename T>
inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const float* p) { return load_as<vf>(p); }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }
inline vf as_float(vu v) { return (vf)v; }

// Single instructions for which GCC 12 emits several. vmax returns b if a or b is NaN.
#if defined(__AVX512F__)
inline vu widen(vh v) { return (vu)_mm512_cvtepu16_epi32((__m256i)v); }
inline vf widen_half(vh v) { return _mm512_cvtph_ps((__m256i)v); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
#elif defined(__AVX2__) && defined(__F16C__)
inline vu widen(vh v) { return (vu)_mm256_cvtepu16_epi32((__m128i)v); }
inline vf widen_half(vh v) { return _mm256_cvtph_ps((__m128i)v); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
#else
inline vu widen(vh v) { return __builtin_convertvector(v, vu); }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
#if defined(__aarch64__)
inline vf widen_half(vh v) { return (vf)vcvt_f32_f16((float16x4_t)v); }
#else
inline vf widen_half(vh v) {
  const vu h = widen(v);
  const vu sign = (h & 0x8000u) << 16;
  const vf scaled = as_float((h & 0x7fffu) << 13) * 0x1p112f;
  const vu special = (vu)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // inf, nan
  return as_float((vu)scaled | special | sign);
}
#endif
#endif

inline float hmax(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float m = v[0];
  for (int i = 1; i < VL; ++i) m = std::max(m, v[i]);
  return m;
#endif
}
inline float hsum(vf v) {
  float s = 0;
  for (int i = 0; i < VL; ++i) s += v[i];
  return s;
}

struct BF16 { uint16_t bits; };
struct FP16 { uint16_t bits; };

inline vf load_float(const float* p) { return load(p); }
inline vf load_float(const BF16* p) { return as_float(widen(load_as<vh>(p)) << 16); }
inline vf load_float(const FP16* p) { return widen_half(load_as<vh>(p)); }

inline void store_float(float* p, float x) { *p = x; }
inline void store_float(BF16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline void store_float(FP16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  uint32_t h;
  if (a > 0x7f800000) {
    h = 0x7e00;
  } else if (a >= 0x477ff000) {  // rounds to 65536 or more
    h = 0x7c00;
  } else if (a < 0x38800000) {  // subnormal: the addition rounds to the right bit
    float f;
    std::memcpy(&f, &a, 4);
    f += 0.5f;
    std::memcpy(&h, &f, 4);
    h -= 0x3f000000;
  } else {
    h = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  }
  p->bits = sign | h;
}

// exp(x) for x <= 0; -inf gives 0 and NaN stays NaN.
inline vf exp_neg(vf x) {
  const float log2e = 1.44269504088896341f;
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  x = vmax(splat(-88.f), x);
  const vf t = x * log2e + magic;
  const vf r = x * log2e - (t - magic);
  vf p = splat(1.5353362e-4f);  // 2^r
  p = p * r + 1.33988745e-3f;
  p = p * r + 9.61843736e-3f;
  p = p * r + 5.55033247e-2f;
  p = p * r + 2.40226479e-1f;
  p = p * r + 6.93147203e-1f;
  p = p * r + 1.f;
  return p * as_float(((vu)t << 23) + 0x3f800000u);  // 2^-127 is 0
}
inline float exp_neg1(float x) { return exp_neg(splat(x))[0]; }

inline vf tanh_vec(vf x) {
  const vf e = exp_neg(-2.f * (x < vf{} ? -x : x));
  const vf t = (1.f - e) / (1.f + e);
  return x < vf{} ? -t : t;
}

// How a matrix product reads its right operand, b: here one row at a time, as floats.
template <typename T>
struct ByRow {
  typedef T B;
  typedef float A;
  typedef vf V;
  static constexpr int ROWS = 1;
  static constexpr bool PACKED = false;
  static int64_t step(int64_t ldb) { return ldb; }
  static const T* column(const T* b, int n, int64_t) { return b + n; }
  static vf load(const T* b, int64_t) { return load_float(b); }
  static vf multiply_add(vf c, float a, vf b) { return c + a * b; }
};

#if defined(__AVX512BF16__)
// Two rows at a time, interleaved. Their products with two elements of a are exact and are summed
// in float32. Subnormal numbers are treated as 0.
struct ByRowPair {
  typedef BF16 B;
  typedef uint32_t A;
  typedef vu V;
  static constexpr int ROWS = 2;
  static constexpr bool PACKED = false;
  static int64_t step(int64_t ldb) { return 2 * ldb; }
  static const BF16* column(const BF16* b, int n, int64_t) { return b + n; }
  static vu load(const BF16* b, int64_t ldb) {
    return widen(load_as<vh>(b)) | widen(load_as<vh>(b + ldb)) << 16;
  }
  static vf multiply_add(vf c, uint32_t a, vu b) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
  }
};
// ByRowPair for a packed b: two rows of 16 columns are stored together; ldb is the stride of such
// groups of columns.
struct PackedKey : ByRowPair {
  static constexpr bool PACKED = true;
  static int64_t step(int64_t) { return 2 * VL; }
  static const BF16* column(const BF16* b, int n, int64_t ldb) { return b + n / VL * ldb; }
  static vu load(const BF16* b, int64_t) { return load_as<vu>(b); }
};
// The same for an a of floats.
struct PackedValue {
  struct A { float even, odd; };
  struct V { vf even, odd; };
  typedef BF16 B;
  static constexpr int ROWS = 2;
  static constexpr bool PACKED = true;
  static int64_t step(int64_t) { return 2 * VL; }
  static const BF16* column(const BF16* b, int n, int64_t ldb) { return b + n / VL * ldb; }
  static V load(const BF16* b, int64_t) {
    const vu pairs = load_as<vu>(b);
    return {as_float(pairs << 16), as_float(pairs & 0xffff0000u)};
  }
  static vf multiply_add(vf c, A a, V b) { return c + a.even * b.even + a.odd * b.odd; }
};
constexpr bool READS_PACKED = true;
template <typename T>
using QueryKey = std::conditional_t<std::is_same_v<T, BF16>, ByRowPair, ByRow<T>>;
#else
struct PackedKey : ByRow<BF16> {};  // never read
struct PackedValue : ByRow<BF16> {};
constexpr bool READS_PACKED = false;
template <typename T>
using QueryKey = ByRow<T>;
#endif

// c[M, N vectors] (+)= a[M, depth] b[depth, N vectors]; with ACC, c is first scaled by rescale[M].
// Prefetches the data `ahead` bytes after b.
template <typename P, int M, int N, int A_ROW, bool ACC>
inline void gemm_tile(const typename P::A* a, const typename P::B* b, int64_t ldb, int64_t ahead,
                      float* c, int64_t ldc, int depth, const float* rescale) {
  vf acc[M][N];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) acc[m][n] = ACC ? load(c + m * ldc + n * VL) * rescale[m] : vf{};
  for (int k = 0; k < depth; k += P::ROWS, b += P::step(ldb), ++a) {
    typename P::V bv[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const typename P::B* bn = P::column(b, n * VL, ldb);
      if (P::PACKED || n * VL * sizeof(*b) % 64 == 0)
        for (int i = 0; i < (P::PACKED ? 1 : P::ROWS); ++i)
          __builtin_prefetch((const char*)(bn + i * ldb) + ahead, 0, 2);
      bv[n] = P::load(bn, ldb);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) acc[m][n] = P::multiply_add(acc[m][n], a[m * A_ROW], bv[n]);
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) store(c + m * ldc + n * VL, acc[m][n]);
}

template <typename P, int N, int A_ROW, bool ACC, int M = MR>
inline void gemm_rows(int rows, const typename P::A* a, const typename P::B* b, int64_t ldb,
                      int64_t ahead, float* c, int64_t ldc, int depth, const float* rescale) {
  if (rows == M) return gemm_tile<P, M, N, A_ROW, ACC>(a, b, ldb, ahead, c, ldc, depth, rescale);
  if constexpr (M > 1)
    gemm_rows<P, N, A_ROW, ACC, M - 1>(rows, a, b, ldb, ahead, c, ldc, depth, rescale);
}

// c[rows, cols] (+)= a[rows, depth] b[depth, cols]
template <typename P, int A_ROW, bool ACC>
void gemm(int rows, int cols, const typename P::A* a, const typename P::B* b, int64_t ldb,
          int64_t ahead, float* c, int64_t ldc, int depth, const float* rescale) {
  const int tiles = (rows + MR - 1) / MR, step = (rows + tiles - 1) / tiles;
  for (int n = 0; n < cols; n += 2 * VL)
    for (int r = 0; r < rows; r += step) {
      const int m = std::min(step, rows - r);
      const typename P::A* ar = a + r * A_ROW;
      float* cr = c + r * ldc + n;
      const typename P::B* bn = P::column(b, n, ldb);
      if (cols - n >= 2 * VL)
        gemm_rows<P, 2, A_ROW, ACC>(m, ar, bn, ldb, ahead, cr, ldc, depth, rescale + r);
      else
        gemm_rows<P, 1, A_ROW, ACC>(m, ar, bn, ldb, ahead, cr, ldc, depth, rescale + r);
    }
}

// Memory that is kept between calls and only grows.
struct Buffer {
  char* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  char* reserve(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = static_cast<char*>(std::aligned_alloc(64, size));
    }
    return data;
  }
};

}  // namespace

extern "C" {

struct TreeBatchView {
  int64_t trees, words;
  const int32_t *rows, *starts, *sizes, *contexts, *depths, *masks;
};

struct AttentionCall {
  const void* query;
  int64_t query_token, query_head;  // strides in elements, here and below
  const void* cache;
  int64_t cache_block, cache_head;
  void* output;
  int64_t output_token, output_head;
  const int32_t* block_table;
  int64_t table_row;
  int32_t heads, kv_heads, head_size, block_size;
  float scale;
  int32_t window;
  float soft_cap;
  const float *alibi, *sinks;
  int32_t threads, packed;
};

}  // extern "C"

namespace {

struct Group {  // rows of one tree that share a KV head; tasks may split their keys
  int tree, head, row0, rows;
  int parts, left;  // number of tasks, and of those not finished
  int64_t partial;  // offset of the partial results
};
struct Task {
  int group, part, tile0, tile1;
};
struct Tree {
  int context, size, key0, tile0, tiles;
  const int32_t *depths, *masks, *table;
  int64_t start;
};

struct Work {
  explicit Work(char* p, int hs) {
    auto take = [&](size_t n) {
      float* f = reinterpret_cast<float*>(p);
      p += (n * sizeof(float) + 63) / 64 * 64;
      return f;
    };
    q = take(MAX_ROWS * QUERY_ROW);
    acc = take(MAX_ROWS * hs);
    scores = take(MAX_ROWS * TILE);
    max = take(MAX_ROWS);
    top = take(MAX_ROWS);
    rescale = take(MAX_ROWS);
    sum = take(MAX_ROWS * VL);
    positions = take(TILE);
    end = p;
  }
  static size_t bytes(int hs) { return Work(nullptr, hs).end - static_cast<char*>(nullptr); }
  float *q, *acc, *scores, *max, *top, *rescale, *sum, *positions;
  char* end;
};

template <typename T, bool PACKED>
struct Kernel {
  typedef std::conditional_t<PACKED, PackedKey, QueryKey<T>> Key;
  typedef std::conditional_t<PACKED, PackedValue, ByRow<T>> Value;
  const AttentionCall& call;
  const std::vector<Tree>& trees;
  float* partials;
  int64_t words;
  int hs, group_size;

  // Bit i is set if row `token` attends to key `key` + i, for VL keys.
  uint32_t allowed(const Tree& t, int token, int key) const {
    int lo = 0;
    if (call.window > 0) lo = std::max(0, t.context + t.depths[token] - call.window + 1);
    lo = std::clamp(lo - key, 0, VL);
    const int j = key - t.context;  // index in the draft block
    const int hi = std::clamp(-j, 0, VL);
    uint32_t bits = hi > lo ? ((1u << hi) - 1) & ~((1u << lo) - 1) : 0;
    if (j > -VL) {
      const uint32_t* mask = reinterpret_cast<const uint32_t*>(t.masks) + token * words;
      if (j < 0) {
        bits |= mask[0] << -j;
      } else if (j / 32 < words) {
        const int word = j / 32, bit = j % 32;
        bits |= mask[word] >> bit;
        if (bit && word + 1 < words) bits |= mask[word + 1] << (32 - bit);
      }
    }
    return bits;
  }

  // The block that holds a key.
  const T* block(const Tree& t, int head, int key) const {
    return static_cast<const T*>(call.cache) +
           t.table[key / call.block_size] * call.cache_block + head * call.cache_head;
  }

  // Calls part(first, count, block, offset in block) for each block of the tile's keys [lo, hi).
  template <typename F>
  void by_block(const Tree& t, int head, int key, int lo, int hi, F part) const {
    for (int i = lo, n; i < hi; i += n) {
      const int off = (key + i) % call.block_size;
      n = std::min(call.block_size - off, hi - i);
      part(i, n, block(t, head, key + i), off);
    }
  }

  // The start of the value at an offset in its block; the offset is even if packed.
  const T* value(const T* block, int off) const {
    return block + (int64_t)call.block_size * hs + (int64_t)off * (PACKED ? VL : hs);
  }
  // The offset of dimension d of the i-th value from `value`.
  int64_t element(int i, int d) const {
    if (!PACKED) return (int64_t)i * hs + d;
    return (int64_t)(d / VL) * VL * call.block_size + i / 2 * 2 * VL + d % VL * 2 + i % 2;
  }

  // Dimensions [d, d + VL) of the i-th value.
  vf load_value(const T* v, int i, int d) const {
    if constexpr (PACKED && READS_PACKED) {
      const auto pairs = PackedValue::load(v + element(i & ~1, d), 0);
      return i % 2 ? pairs.odd : pairs.even;
    } else {
      return load_float(v + element(i, d));
    }
  }

  bool finite(const T* v, int n) const {
    vu special{};
    const int run = PACKED ? n * VL : n * hs;
    for (int d = 0; d < hs; d += PACKED ? VL : hs)
      for (int i = 0; i < run; i += VL)
        special |= (vu)(((vu)load_float(v + element(0, d) + i) & 0x7f800000u) == 0x7f800000u);
    uint32_t any = 0;
    for (int i = 0; i < VL; ++i) any |= special[i];
    return any == 0;
  }

  void run(const Task& task, Group& g, Work& w) const {
    const Tree& t = trees[g.tree];
    const int bs = call.block_size, rows = g.rows;
    const int first_token = g.row0 / group_size, last_token = (g.row0 + rows - 1) / group_size;
    int deepest = 0;
    for (int i = first_token; i <= last_token; ++i) deepest = std::max(deepest, t.depths[i]);
    const int window0 = call.window > 0 ? t.context + deepest - call.window + 1 : 0;

    for (int r = 0; r < rows; ++r) {
      const int token = (g.row0 + r) / group_size, head = (g.row0 + r) % group_size;
      const T* q = static_cast<const T*>(call.query) + (t.start + token) * call.query_token +
                   (g.head * group_size + head) * call.query_head;
      float* row = w.q + r * QUERY_ROW;
      if constexpr (Key::ROWS == 2)
        std::memcpy(row, q, sizeof(T) * hs);
      else
        for (int d = 0; d < hs; d += VL) store(row + d, load_float(q + d));
    }
    std::memset(w.acc, 0, sizeof(float) * rows * hs);
    std::memset(w.sum, 0, sizeof(float) * rows * VL);
    std::fill_n(w.max, rows, LOWEST);

    const int end = t.context + t.size;
    for (int tile = task.tile0; tile < task.tile1; ++tile) {
      const int key = tile * TILE;
      const int lo = std::max(0, t.key0 - key), hi = std::min(TILE, end - key);
      const bool masked = lo > 0 || key + TILE > t.context || window0 > key;
      const int count = (hi + VL - 1) / VL * VL;
      const int next = tile + 1 < task.tile1 ? key + TILE : key;
      const auto ahead = [&](int i, const T* here) {  // bytes to the same key of the next tile
        return (intptr_t)block(t, g.head, std::min(next + i, end - 1)) - (intptr_t)here;
      };
      by_block(t, g.head, key, 0, count, [&](int i, int n, const T* block, int off) {
        gemm<Key, QUERY_ROW, false>(rows, n, (const typename Key::A*)w.q,
                                    block + (int64_t)off * (PACKED ? hs : 1), PACKED ? VL * hs : bs,
                                    ahead(i, block), w.scores + i, TILE, hs, w.rescale);
      });
      softmax(t, g, key, count, masked, w);
      // Packed values come in pairs of keys; a key outside [lo, hi) has weight 0.
      const int first = PACKED ? lo & ~1 : lo, last = PACKED ? (hi + 1) & ~1 : hi;
      by_block(t, g.head, key, first, last, [&](int i, int n, const T* block, int off) {
        const T* v = value(block, off);
        if (masked && !finite(v, n))
          weigh_values_one_by_one(rows, n, w.scores + i, v, w);
        else
          gemm<Value, TILE / Value::ROWS, true>(
              rows, hs, (const typename Value::A*)(w.scores + i), v, PACKED ? VL * bs : hs,
              ahead(i, block), w.acc, hs, n, w.rescale);
        std::fill_n(w.rescale, rows, 1.f);
      });
    }
    finish(task, g, w);
  }

  // Replaces a tile's scores by p = exp(score - max); w.rescale becomes the factor of older sums.
  void softmax(const Tree& t, const Group& g, int key, int count, bool masked, Work& w) const {
    const float scale = call.scale, soft_cap = call.soft_cap;
    const bool alibi = call.alibi;
    if (alibi)
      for (int i = 0; i < count; ++i) {
        const int j = key + i - t.context;
        w.positions[i] = j < 0 ? key + i : t.context + (j < t.size ? t.depths[j] : 0);
      }
    vu lane;
    for (int i = 0; i < VL; ++i) lane[i] = 1u << i;
    uint32_t bits[TILE / VL];
    int bits_token = -1;
    for (int r = 0; r < g.rows; ++r) {
      float* s = w.scores + r * TILE;
      const int token = (g.row0 + r) / group_size, head = (g.row0 + r) % group_size;
      if (masked && token != bits_token) {
        for (int i = 0; i < count; i += VL) bits[i / VL] = allowed(t, token, key + i);
        bits_token = token;
      }
      vf top = splat(w.max[r]);
      const float slope = call.alibi ? call.alibi[g.head * group_size + head] : 0;
      const float position = t.context + t.depths[token];
      for (int i = 0; i < count; i += VL) {
        vf x = load(s + i) * scale;
        if (soft_cap > 0) x = soft_cap * tanh_vec(x / soft_cap);
        if (alibi) x += slope * (load(w.positions + i) - position);
        if (masked) x = ((bits[i / VL] + vu{}) & lane) != 0 ? x : splat(-INFINITY);
        top = vmax(x, top);
        store(s + i, x);
      }
      w.top[r] = hmax(top);
    }
    for (int r = 0; r < g.rows; r += VL) {
      const vf top = load(w.top + r);
      store(w.rescale + r, exp_neg(load(w.max + r) - top));
      store(w.max + r, top);
    }
    for (int r = 0; r < g.rows; ++r) {
      float* s = w.scores + r * TILE;
      const float max = w.max[r], rescale = w.rescale[r];
      vf sum = load(w.sum + r * VL) * rescale;
      for (int i = 0; i < count; i += VL) {
        const vf p = exp_neg(load(s + i) - max);
        sum += p;
        store(s + i, p);
      }
      store(w.sum + r * VL, sum);
    }
  }

  // The slow path, if a value is inf or NaN: skips the keys that a row does not attend to.
  void weigh_values_one_by_one(int rows, int n, const float* p, const T* v, Work& w) const {
    for (int r = 0; r < rows; ++r, p += TILE) {
      float* acc = w.acc + r * hs;
      for (int d = 0; d < hs; ++d) acc[d] *= w.rescale[r];
      for (int i = 0; i < n; ++i)
        if (p[i] != 0)
          for (int d = 0; d < hs; d += VL)
            store(acc + d, load(acc + d) + p[i] * load_value(v, i, d));
    }
  }

  void finish(const Task& task, Group& g, Work& w) const {
    if (g.parts == 1) {
      for (int r = 0; r < g.rows; ++r)
        write(g, r, w.acc + r * hs, w.max[r], hsum(load(w.sum + r * VL)));
      return;
    }
    const int64_t part_size = (int64_t)g.rows * (hs + 2);
    float* mine = partials + g.partial + task.part * part_size;
    std::memcpy(mine, w.acc, sizeof(float) * g.rows * hs);
    for (int r = 0; r < g.rows; ++r) {
      mine[g.rows * hs + r] = w.max[r];
      mine[g.rows * (hs + 1) + r] = hsum(load(w.sum + r * VL));
    }
    if (__atomic_sub_fetch(&g.left, 1, __ATOMIC_ACQ_REL) != 0) return;
    for (int r = 0; r < g.rows; ++r) {
      float max = LOWEST, sum = 0;
      for (int i = 0; i < g.parts; ++i)
        max = std::max(max, partials[g.partial + i * part_size + g.rows * hs + r]);
      std::memset(w.acc, 0, sizeof(float) * hs);
      for (int i = 0; i < g.parts; ++i) {
        const float* part = partials + g.partial + i * part_size;
        const float part_sum = part[g.rows * (hs + 1) + r];
        if (part_sum == 0) continue;  // the row attends to no key of this part
        const float weight = exp_neg1(part[g.rows * hs + r] - max);
        sum += weight * part_sum;
        for (int d = 0; d < hs; d += VL)
          store(w.acc + d, load(w.acc + d) + weight * load(part + r * hs + d));
      }
      write(g, r, w.acc, max, sum);
    }
  }

  void write(const Group& g, int r, const float* acc, float max, float sum) const {
    const Tree& t = trees[g.tree];
    const int token = (g.row0 + r) / group_size;
    const int head = g.head * group_size + (g.row0 + r) % group_size;
    float weight = 1;
    if (call.sinks) {
      const float sink = call.sinks[head], top = std::max(max, sink);
      weight = exp_neg1(max - top);
      sum = sum * weight + exp_neg1(sink - top);
    }
    weight /= sum;
    T* out = static_cast<T*>(call.output) + (t.start + token) * call.output_token +
             head * call.output_head;
    for (int d = 0; d < hs; ++d) store_float(out + d, acc[d] * weight);
  }
};

// The masks without the draft tokens outside each row's window.
const int32_t* windowed_masks(const TreeBatchView& b, int window, std::vector<int32_t>& copy) {
  int64_t n = 0;
  for (int64_t i = 0; i < b.trees; ++i) n += b.sizes[i];
  if (std::none_of(b.depths, b.depths + n, [&](int32_t d) { return d >= window; })) return b.masks;
  copy.assign(b.masks, b.masks + n * b.words);
  for (int64_t i = 0, row0 = 0; i < b.trees; row0 += b.sizes[i++])
    for (int64_t r = row0; r < row0 + b.sizes[i]; ++r)
      for (int j = 0; j < b.sizes[i]; ++j)
        if (b.depths[row0 + j] <= b.depths[r] - window)
          copy[r * b.words + j / 32] &= ~(1u << (j % 32));
  return copy.data();
}

template <typename T, bool PACKED = false>
void attend(const TreeBatchView& b, const AttentionCall& call) {
  static thread_local std::vector<Tree> trees;
  static thread_local std::vector<Group> groups;
  static thread_local std::vector<Task> tasks;
  static thread_local std::vector<int32_t> masks_copy;
  static thread_local Buffer partial_buffer;
  trees.clear(), groups.clear(), tasks.clear();

  const int hs = call.head_size, group_size = call.heads / call.kv_heads;
  const int32_t* masks = call.window > 0 ? windowed_masks(b, call.window, masks_copy) : b.masks;
  int64_t work = 0;
  for (int64_t i = 0, row = 0; i < b.trees; row += b.sizes[i++]) {
    Tree t;
    t.context = b.contexts[i], t.size = b.sizes[i], t.start = b.starts[i];
    t.depths = b.depths + row, t.masks = masks + row * b.words;
    t.table = call.block_table + b.rows[i] * call.table_row;
    t.key0 = call.window > 0 ? std::max(0, t.context - call.window + 1) : 0;  // the root's
    t.tile0 = t.key0 / TILE;
    t.tiles = (t.context + t.size + TILE - 1) / TILE - t.tile0;
    work += (int64_t)t.size * group_size * call.kv_heads * t.tiles;
    trees.push_back(t);
  }
  const int64_t grain = std::max<int64_t>(1, work / (call.threads * 4));
  int64_t partial = 0;
  for (int i = 0; i < (int)trees.size(); ++i) {
    const Tree& t = trees[i];
    const int rows = t.size * group_size, chunks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int step = ((rows + chunks - 1) / chunks + MR - 1) / MR * MR;
    for (int head = 0; head < call.kv_heads; ++head)
      for (int row0 = 0; row0 < rows; row0 += step) {
        Group g{i, head, row0, std::min(step, rows - row0), 1, 0, partial};
        if (call.threads > 1) {
          const int64_t parts = ((int64_t)g.rows * t.tiles + grain / 2) / grain;
          g.parts = std::clamp<int64_t>(parts, 1, t.tiles);
        }
        g.left = g.parts;
        for (int p = 0; p < g.parts; ++p)
          tasks.push_back({(int)groups.size(), p, t.tile0 + t.tiles * p / g.parts,
                           t.tile0 + t.tiles * (p + 1) / g.parts});
        if (g.parts > 1) partial += (int64_t)g.parts * g.rows * (hs + 2);
        groups.push_back(g);
      }
  }
  float* partials = reinterpret_cast<float*>(partial_buffer.reserve(partial * sizeof(float)));
  const Kernel<T, PACKED> kernel{call, trees, partials, b.words, hs, group_size};
  const Task* task = tasks.data();
  Group* group = groups.data();
  const int n = tasks.size();
  auto run = [&](int i) {
    static thread_local Buffer scratch;
    Work work(scratch.reserve(Work::bytes(hs)), hs);
    kernel.run(task[i], group[task[i].group], work);
  };
  if (n <= 1 || call.threads == 1) {
    for (int i = 0; i < n; ++i) run(i);
  } else {
    // Always the caller's number of threads: OpenMP rebuilds its pool for another number.
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int i = 0; i < n; ++i) run(i);
  }
}

}  // namespace

extern "C" int32_t lookahead_reads_packed() { return READS_PACKED; }

// dtype is 0 for float32, 1 for bfloat16, 2 for float16, and applies to query, cache and output. A
// packed cache is bfloat16.
extern "C" void lookahead_tree_attention(const TreeBatchView* batch, const AttentionCall* call,
                                         int32_t dtype) {
  if (dtype == 0) attend<float>(*batch, *call);
  if (dtype == 1 && call->packed) attend<BF16, true>(*batch, *call);
  if (dtype == 1 && !call->packed) attend<BF16>(*batch, *call);
  if (dtype == 2) attend<FP16>(*batch, *call);
}
