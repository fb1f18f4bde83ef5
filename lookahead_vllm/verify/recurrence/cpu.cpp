// Recurrent layers at the nodes of draft trees, and causal convolutions along their paths.
//
// A task is (request, head), or (request, channels) for a convolution. It walks the request's rows
// in list order, in which parents come first. Row j reads its parent's state slot, which the task
// wrote, and writes its own. States are rounded when they are stored, as in plain decode.
//
// Sums have the order, and products the fused additions, of vLLM's kernels for one token: Mamba 2
// sums over the state in 8 partial sums, gated delta nets one key dimension after the other.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

extern "C" {

// `StateRows` of `__init__.py`, and the limits of the caller's tensors.
struct Forest {
  int64_t requests, rows, slots;
  const int32_t *starts, *parents, *columns;
  int64_t num_columns, column_row, column_step;  // strides
  const int32_t* accepted;
};

struct Mamba2Call {
  void* state;
  int64_t slot;  // strides in elements; states are contiguous within a slot
  const void *x, *B, *C;
  int64_t x_row, bc_row;
  const float *dt, *A, *D, *dt_bias;  // dt is [rows, heads]
  void* out;
  int64_t out_row;
  int32_t heads, groups, dim, dstate;
  int32_t threads;
};

struct DeltaCall {
  void* state;
  int64_t slot;
  const void *q, *k, *v;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const void *a, *b;  // contiguous
  const float *A_log, *dt_bias;
  void* out;
  int64_t out_row, out_head;
  int32_t key_heads, heads, key_size, value_size;
  float scale;
  int32_t threads;
};

struct ConvolutionCall {
  void* window;
  int64_t slot, channel, entry;
  const void* x;
  int64_t x_row;
  const float *weight, *bias;  // weight is [width, dim]
  void* out;                   // contiguous
  int32_t dim, width, silu, threads;
};

}  // extern "C"

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats of a vector in vLLM's gated delta kernel
#else
constexpr int VL = 8;
#endif
constexpr int CHANNELS = 256;  // of a task

typedef float v8 __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(VL * 4)));

// Vectors of as many integers.
template <typename V>
struct Bits {
  typedef uint32_t wide __attribute__((vector_size(sizeof(V))));
  typedef uint16_t narrow __attribute__((vector_size(sizeof(V) / 2)));
};

struct BF16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
template <typename T>
inline T round_to(float x);
template <>
inline float round_to<float>(float x) { return x; }
template <>
inline BF16 round_to<BF16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename V, typename T>
inline V load(const T* p) {
  V v;
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(&v, p, sizeof v);
  } else {
    typename Bits<V>::narrow bits;
    std::memcpy(&bits, p, sizeof bits);
    v = (V)(__builtin_convertvector(bits, typename Bits<V>::wide) << 16);
  }
  return v;
}
template <typename V, typename T>
inline void store(T* p, V v) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(p, &v, sizeof v);
  } else {
    typedef typename Bits<V>::wide Wide;
    const Wide all = (Wide)v, is_nan = (Wide)(v != v);
    const Wide rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    const auto bits = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0),
                                              typename Bits<V>::narrow);
    std::memcpy(p, &bits, sizeof bits);
  }
}

template <typename V>
inline V splat(float x) { return x - V{}; }

// a * b + c, rounded once. A sum of two products has two ways to be fused; this says which.
template <typename V>
inline V fma(V a, V b, V c) {
#if defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
  return a * b + c;
}

inline float sigmoid(float x) {
  return x >= 0 ? 1.0f / (1.0f + std::exp(-x)) : std::exp(x) / (1.0f + std::exp(x));
}

// The rows of one request.
struct Rows {
  const Forest& forest;
  int64_t request, first, size, accepted;

  Rows(const Forest& forest, int64_t request)
      : forest(forest), request(request), first(forest.starts[request]),
        size(forest.starts[request + 1] - first), accepted(forest.accepted[request]) {
    if (accepted < 1) accepted = 1;
    if (size > 0 && (slot(0) <= 0 || slot(accepted - 1) <= 0)) size = 0;  // padding
  }
  int64_t slot(int64_t place) const {
    return forest.columns[request * forest.column_row + place * forest.column_step];
  }
  int64_t parent(int64_t place) const {
    return forest.parents[first + place];
  }
  int64_t source(int64_t place) const { return slot(place ? parent(place) : accepted - 1); }
};

// Which rule of `StateRows` is broken, from 1 on in the order of recurrence.py; 0 for none.
int32_t broken_rule(const Forest& forest) {
  for (int64_t request = 0; request < forest.requests; ++request) {
    const int32_t first = forest.starts[request], end = forest.starts[request + 1];
    if (first < 0 || end < first || end > forest.rows) return 1;
    if (end == first) continue;
    if (end - first > forest.num_columns || forest.accepted[request] > forest.num_columns) return 2;
    const Rows rows(forest, request);
    for (int64_t place = 0; place < rows.size; ++place) {
      if (place && (rows.parent(place) < 0 || rows.parent(place) >= place)) return 3;
      for (int64_t slot : {rows.slot(place), rows.source(place)})
        if (slot <= 0 || slot >= forest.slots) return 4;
    }
  }
  return 0;
}

template <typename S, typename T>
void mamba2_head(const Mamba2Call& c, const Rows& rows, int64_t head, float* B, float* C) {
  const int64_t size = int64_t{c.dim} * c.dstate;
  S* const states = static_cast<S*>(c.state) + head * size;
  const float D = c.D[head];
  for (int64_t place = 0; place < rows.size; ++place) {
    const int64_t row = rows.first + place;
    const int64_t group = head / (c.heads / c.groups) * c.dstate;
    for (int64_t n = 0; n < c.dstate; ++n) {
      B[n] = to_float(static_cast<const T*>(c.B)[row * c.bc_row + group + n]);
      C[n] = to_float(static_cast<const T*>(c.C)[row * c.bc_row + group + n]);
    }
    float dt = c.dt[row * c.heads + head] + c.dt_bias[head];
    if (dt <= 20.0f) dt = std::log1p(std::exp(dt));
    const float decay = std::exp(c.A[head] * dt);
    const T* x = static_cast<const T*>(c.x) + row * c.x_row + head * c.dim;
    T* out = static_cast<T*>(c.out) + row * c.out_row + head * c.dim;
    const S* from = states + rows.source(place) * c.slot;
    S* to = states + rows.slot(place) * c.slot;
    for (int64_t d = 0; d < c.dim; ++d, from += c.dstate, to += c.dstate) {
      const float input = to_float(x[d]);
      const v8 input8 = splat<v8>(input), dt8 = splat<v8>(dt), decay8 = splat<v8>(decay);
      v8 sums{};
      int64_t n = 0;
      for (; n + 8 <= c.dstate; n += 8) {
        const v8 kept = load<v8>(from + n) * decay8;
        const v8 value = fma<v8>(load<v8>(B + n) * input8, dt8, kept);
        store(to + n, value);
        sums = fma<v8>(value, load<v8>(C + n), sums);
      }
      float y = 0;
      for (int i = 0; i < 8; ++i) y += sums[i];
      for (; n < c.dstate; ++n) {
        const float value = std::fma(B[n] * input, dt, to_float(from[n]) * decay);
        to[n] = round_to<S>(value);
        y = std::fma(value, C[n], y);
      }
      out[d] = round_to<T>(std::fma(input, D, y));
    }
  }
}

template <typename T>
float inverse_norm(const T* values, int64_t size) {
  vf sums{};
  float rest = 0;
  int64_t d = 0;
  for (; d + 2 * VL <= size; d += 2 * VL)
    for (int64_t half : {d, d + VL}) {
      const vf part = load<vf>(values + half);
      sums = fma<vf>(part, part, sums);
    }
  for (; d < size; ++d) rest = std::fma(to_float(values[d]), to_float(values[d]), rest);
  for (int half = VL / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return 1.0f / std::sqrt(rest + sums[0] + 1e-5f);
}

// vLLM computes beta in the dtype of b.
template <typename T>
float beta_of(T b) {
  auto round = [](float x) { return to_float(round_to<T>(x)); };
  return round(1.0f / round(1.0f + round(std::exp(-to_float(b)))));
}

template <typename V, typename S, typename T>
void delta_tile(const S* from, S* to, int64_t stride, int64_t key_size, const float* q,
                const float* k, const T* v, float decay, float beta, float scale, T* out) {
  const V decays = splat<V>(decay);
  V known{}, y{};
  for (int64_t i = 0; i < key_size; ++i)
    known = fma<V>(load<V>(from + i * stride) * decays, splat<V>(k[i]), known);
  const V change = (load<V>(v) - known) * splat<V>(beta);
  for (int64_t i = 0; i < key_size; ++i) {
    const V value = fma<V>(splat<V>(k[i]), change, load<V>(from + i * stride) * decays);
    y = fma<V>(value * splat<V>(q[i]), splat<V>(scale), y);
    store(to + i * stride, value);
  }
  store(out, y);
}

template <typename S, typename T>
void delta_head(const DeltaCall& c, const Rows& rows, int64_t head, float* q, float* k) {
  const int64_t key_head = head / (c.heads / c.key_heads);
  S* const states = static_cast<S*>(c.state) + head * c.key_size * c.value_size;
  for (int64_t place = 0; place < rows.size; ++place) {
    const int64_t row = rows.first + place;
    const T* queries = static_cast<const T*>(c.q) + row * c.q_row + key_head * c.q_head;
    const T* keys = static_cast<const T*>(c.k) + row * c.k_row + key_head * c.k_head;
    const float q_norm = inverse_norm(queries, c.key_size);
    const float k_norm = inverse_norm(keys, c.key_size);
    for (int64_t i = 0; i < c.key_size; ++i) {
      q[i] = to_float(queries[i]) * q_norm;
      k[i] = to_float(keys[i]) * k_norm;
    }
    const float x = to_float(static_cast<const T*>(c.a)[row * c.heads + head]) + c.dt_bias[head];
    const float softplus = x > 20 ? x : x < -20 ? std::exp(x) : std::log1p(std::exp(x));
    const float decay = std::exp(-std::exp(c.A_log[head]) * softplus);
    const float beta = beta_of(static_cast<const T*>(c.b)[row * c.heads + head]);
    const T* v = static_cast<const T*>(c.v) + row * c.v_row + head * c.v_head;
    T* out = static_cast<T*>(c.out) + row * c.out_row + head * c.out_head;
    const S* from = states + rows.source(place) * c.slot;
    S* to = states + rows.slot(place) * c.slot;
    // vLLM computes two vectors at a time, and what is left one by one.
    const int64_t end = c.value_size / (2 * VL) * (2 * VL);
    int64_t at = 0;
    for (; at < end; at += VL)
      delta_tile<vf>(from + at, to + at, c.value_size, c.key_size, q, k, v + at, decay, beta,
                     c.scale, out + at);
    for (; at < c.value_size; ++at) {
      float known = 0, y = 0;
      for (int64_t i = 0; i < c.key_size; ++i)
        known = std::fma(to_float(from[i * c.value_size + at]) * decay, k[i], known);
      const float change = (to_float(v[at]) - known) * beta;
      for (int64_t i = 0; i < c.key_size; ++i) {
        const float kept = to_float(from[i * c.value_size + at]) * decay;
        const float value = std::fma(k[i], change, kept);
        to[i * c.value_size + at] = round_to<S>(value);
        y = std::fma(value * q[i], c.scale, y);
      }
      out[at] = round_to<T>(y);
    }
  }
}

// The inputs along the paths of one request, for some channels.
template <typename S, typename T>
struct Inputs {
  const ConvolutionCall& c;
  const Rows& rows;
  const int64_t channel, channels, before;
  S* const window;
  const T* const x;
  float history[7][CHANNELS];  // what the root reads from the window

  Inputs(const ConvolutionCall& c, const Rows& rows, int64_t channel)
      : c(c), rows(rows), channel(channel),
        channels(c.dim - channel < CHANNELS ? c.dim - channel : CHANNELS), before(c.width - 1),
        window(static_cast<S*>(c.window) + rows.slot(0) * c.slot + channel * c.channel),
        x(static_cast<const T*>(c.x) + rows.first * c.x_row + channel) {
    for (int64_t j = 0; j < before; ++j)
      for (int64_t d = 0; d < channels; ++d)
        history[j][d] = to_float(window[d * c.channel + (rows.accepted - 1 + j) * c.entry]);
  }

  // The places of the last rows of the path; -1 is the last entry before the root, and so on.
  void path_to(int64_t place, int64_t* path) const {
    path[before] = place;
    for (int64_t j = before; j > 0; --j)
      path[j - 1] = path[j] > 0 ? rows.parent(path[j]) : path[j] - 1;
  }

  // An input as the window holds it.
  float stored(int64_t place, int64_t d) const {
    return place < 0 ? history[before + place][d]
                     : to_float(round_to<S>(to_float(x[place * c.x_row + d])));
  }

  void update_window() const {
    for (int64_t place = 2 - c.width; place < rows.size; ++place)
      for (int64_t d = 0; d < channels; ++d)
        window[d * c.channel + (before - 1 + place) * c.entry] = round_to<S>(stored(place, d));
  }
};

template <typename S, typename T>
void convolve(const ConvolutionCall& c, const Rows& rows, int64_t channel) {
  const Inputs<S, T> inputs(c, rows, channel);
  const int64_t channels = inputs.channels;
  float sums[CHANNELS], products[CHANNELS];
  for (int64_t place = 0; place < rows.size; ++place) {
    int64_t path[8];
    inputs.path_to(place, path);
    for (int64_t d = 0; d < channels; ++d) sums[d] = c.bias ? c.bias[channel + d] : 0.0f;
    for (int64_t j = 0; j <= inputs.before; ++j) {
      const float* weight = c.weight + j * c.dim + channel;
      // Two loops, so that no product is fused with its addition: vLLM rounds both.
      if (j < inputs.before)
        for (int64_t d = 0; d < channels; ++d)
          products[d] = weight[d] * inputs.stored(path[j], d);
      else  // the row's own input is not stored yet
        for (int64_t d = 0; d < channels; ++d)
          products[d] = weight[d] * to_float(inputs.x[place * c.x_row + d]);
      for (int64_t d = 0; d < channels; ++d) sums[d] += products[d];
    }
    if (c.silu)
      for (int64_t d = 0; d < channels; ++d) sums[d] *= sigmoid(sums[d]);
    T* out = static_cast<T*>(c.out) + (rows.first + place) * c.dim + channel;
    for (int64_t d = 0; d < channels; ++d) out[d] = round_to<T>(sums[d]);
  }
  inputs.update_window();
}

// `out` is [rows, width - 1, dim].
template <typename S, typename T>
void gather_windows(const ConvolutionCall& c, const Rows& rows, int64_t channel) {
  const Inputs<S, T> inputs(c, rows, channel);
  for (int64_t place = 0; place < rows.size; ++place) {
    int64_t path[8];
    inputs.path_to(place, path);
    S* out = static_cast<S*>(c.out) + (rows.first + place) * inputs.before * c.dim + channel;
    for (int64_t j = 0; j < inputs.before; ++j, out += c.dim)
      for (int64_t d = 0; d < inputs.channels; ++d)
        out[d] = round_to<S>(inputs.stored(path[j], d));
  }
  inputs.update_window();
}

// Calls `run` with values of the types of states and inputs, and with each request and part, and a
// buffer of `buffer` floats for each thread; unless a rule is broken, which is returned.
template <typename Run>
int32_t run_all(const Forest& forest, int32_t bf16_state, int32_t bf16_input, int64_t parts,
                int64_t buffer, int32_t threads, Run run) {
  const int32_t rule = broken_rule(forest);
  if (rule) return rule;
  auto typed = [&](auto state, auto input) {
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> floats(buffer);
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t request = 0; request < forest.requests; ++request)
        for (int64_t part = 0; part < parts; ++part) {
          const Rows rows(forest, request);
          if (rows.size > 0) run(state, input, rows, part, floats.data());
        }
    }
  };
  if (bf16_state)
    bf16_input ? typed(BF16(), BF16()) : typed(BF16(), float());
  else
    bf16_input ? typed(float(), BF16()) : typed(float(), float());
  return 0;
}

}  // namespace

// These return `broken_rule`, and do nothing if a rule is broken.
extern "C" {

int32_t lookahead_mamba2(const Forest* forest, const Mamba2Call* call, int32_t bf16_state,
                         int32_t bf16_input) {
  const Mamba2Call& c = *call;
  return run_all(*forest, bf16_state, bf16_input, c.heads, 2 * c.dstate, c.threads,
                 [&](auto state, auto input, const Rows& rows, int64_t head, float* buffer) {
                   mamba2_head<decltype(state), decltype(input)>(c, rows, head, buffer,
                                                                 buffer + c.dstate);
                 });
}

int32_t lookahead_gated_delta(const Forest* forest, const DeltaCall* call, int32_t bf16_state,
                              int32_t bf16_input) {
  const DeltaCall& c = *call;
  return run_all(*forest, bf16_state, bf16_input, c.heads, 2 * c.key_size, c.threads,
                 [&](auto state, auto input, const Rows& rows, int64_t head, float* buffer) {
                   delta_head<decltype(state), decltype(input)>(c, rows, head, buffer,
                                                                buffer + c.key_size);
                 });
}

// Without weights, `out` gets the inputs before each row instead.
int32_t lookahead_convolution(const Forest* forest, const ConvolutionCall* call,
                              int32_t bf16_state, int32_t bf16_input) {
  const ConvolutionCall& c = *call;
  const int64_t parts = (c.dim + CHANNELS - 1) / CHANNELS;
  return run_all(*forest, bf16_state, bf16_input, parts, 0, c.threads,
                 [&](auto state, auto input, const Rows& rows, int64_t part, float*) {
                   using S = decltype(state);
                   using T = decltype(input);
                   if (c.weight)
                     convolve<S, T>(c, rows, part * CHANNELS);
                   else
                     gather_windows<S, T>(c, rows, part * CHANNELS);
                 });
}

}  // extern "C"
