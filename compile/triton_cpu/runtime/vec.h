// Vectors of 16 lanes, masks, comparisons and lane selection: what the other headers stand on.
//
//   vec<T>                       16 lanes of T: (u)int8/16/32/64_t, float, double
//   mask = vec<int32_t>          each lane 0 or -1
//   bf16, f16, f8e4m3, f8e5m2    storage types; computed as float. reg_t<T> is the type that T is computed in
//   splat(x) iota<T>()           16 copies of x; 0, 1, ..., 15
//   select(mask, a, b)           lane by lane a or b, every T; select(bool, a, b) for scalars
//   movemask(m) frommask(bits)   mask to 16 bits (lane 0 is bit 0) and back
//   lanes_below(n)               mask of the lanes with index < n, any int64_t n; bits_below(n) the same as 16 bits
//   cmp_lt le gt ge eq ne        mask; floats: false where a lane is NaN, but for cmp_ne (cmp_one is the ordered form)
//   cmp_ult ule ugt uge ueq une  floats: true where ordered or where a lane is NaN
//   cmp_ord cmp_uno              floats: neither is NaN; one of them is
//   bitcast<To>(v)               same bits, lanes of the same size, vectors and scalars
//   map_pieces map_lanes         a function over native registers, over lanes
//   pieces<V>                    a vector as native registers, for code that a compiler would otherwise do lane by lane
//
// Compile with -Wno-psabi: every function is inlined, so how a vector wider than a register is passed does not matter.
// Call with the namespace (tcpu::exp): some names are also the C library's.
//
// TCPU_PORTABLE disables intrinsics. Otherwise the compiler's target decides: TCPU_AVX512 (F, BW, DQ, VL), with
// TCPU_BF16, TCPU_VNNI and TCPU_VBMI beside it, or TCPU_AVX2 (with FMA and F16C), or neither.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if !defined(TCPU_PORTABLE)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TCPU_AVX512 1
#if defined(__AVX512BF16__)
#define TCPU_BF16 1
#endif
#if defined(__AVX512VNNI__)
#define TCPU_VNNI 1
#endif
#if defined(__AVX512VBMI__)
#define TCPU_VBMI 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TCPU_AVX2 1
#endif
#endif

#if defined(TCPU_AVX512) || defined(TCPU_AVX2)
#include <immintrin.h>
#endif

#if defined(TCPU_AVX512)
#define TCPU_REGISTER_BYTES 64
#elif defined(TCPU_AVX2)
#define TCPU_REGISTER_BYTES 32
#else
#define TCPU_REGISTER_BYTES 16
#endif

#define TCPU_INLINE static inline __attribute__((always_inline))
#define TCPU_MEMBER inline __attribute__((always_inline))

namespace tcpu {

constexpr int LANES = 16;

template <class T, int BYTES>
struct vector_of;

// GCC drops vector_size on a dependent type, so every type is spelled out.
#define TCPU_VECTOR(T, BYTES)                               \
  template <>                                               \
  struct vector_of<T, BYTES> {                              \
    typedef T type __attribute__((vector_size(BYTES)));     \
  };
#define TCPU_VECTORS(T) TCPU_VECTOR(T, 16) TCPU_VECTOR(T, 32) TCPU_VECTOR(T, 64) TCPU_VECTOR(T, 128)
TCPU_VECTORS(int8_t)
TCPU_VECTORS(uint8_t)
TCPU_VECTORS(int16_t)
TCPU_VECTORS(uint16_t)
TCPU_VECTORS(int32_t)
TCPU_VECTORS(uint32_t)
TCPU_VECTORS(int64_t)
TCPU_VECTORS(uint64_t)
TCPU_VECTORS(float)
TCPU_VECTORS(double)
#undef TCPU_VECTORS
#undef TCPU_VECTOR

template <class T>
using vec = typename vector_of<T, LANES * sizeof(T)>::type;
using mask = vec<int32_t>;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct f8e4m3 {
  uint8_t bits;
};
struct f8e5m2 {
  uint8_t bits;
};

template <class T>
constexpr bool is_small_float =
    std::is_same_v<T, bf16> || std::is_same_v<T, f16> || std::is_same_v<T, f8e4m3> || std::is_same_v<T, f8e5m2>;
template <class T>
using reg_t = std::conditional_t<is_small_float<T>, float, T>;

template <class V>
constexpr bool is_scalar = std::is_arithmetic_v<V>;
// The lane type of a vector; a scalar is its own.
template <class V, bool SCALAR = is_scalar<V>>
struct element {
  using type = V;
};
template <class V>
struct element<V, false> {
  using type = std::remove_cv_t<std::remove_reference_t<decltype((*static_cast<V*>(nullptr))[0])>>;
};
template <class V>
using element_t = typename element<V>::type;

template <int BYTES>
struct integer_of;
template <>
struct integer_of<1> {
  using type = int8_t;
};
template <>
struct integer_of<2> {
  using type = int16_t;
};
template <>
struct integer_of<4> {
  using type = int32_t;
};
template <>
struct integer_of<8> {
  using type = int64_t;
};
template <class T>
using signed_of = typename integer_of<sizeof(T)>::type;

// A native register's worth of T, and a 16-lane vector as such registers.
template <class T, int BYTES = TCPU_REGISTER_BYTES>
using piece = typename vector_of<T, BYTES>::type;

template <class V>
union pieces {
  using T = element_t<V>;
  static constexpr int BYTES = sizeof(V) < TCPU_REGISTER_BYTES ? sizeof(V) : TCPU_REGISTER_BYTES;
  static constexpr int COUNT = sizeof(V) / BYTES;
  V whole;
  piece<T, BYTES> part[COUNT];
};

template <class T>
TCPU_INLINE piece<T> splat_piece(T x) {
  return x - piece<T>{};
}

template <class T>
TCPU_INLINE vec<T> splat(T x) {
  return x - vec<T>{};  // x - 0, not x + 0: keeps -0
}

template <class T>
TCPU_INLINE vec<T> iota() {
  return vec<T>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// fn applied to each native register of one, two or three vectors of the same type.
template <class V, class Fn>
TCPU_INLINE V map_pieces(V x, Fn fn) {
  pieces<V> a;
  a.whole = x;
  for (int i = 0; i < pieces<V>::COUNT; ++i) {
    a.part[i] = fn(a.part[i]);
  }
  return a.whole;
}
template <class V, class Fn>
TCPU_INLINE V map_pieces(V x, V y, Fn fn) {
  pieces<V> a, b;
  a.whole = x;
  b.whole = y;
  for (int i = 0; i < pieces<V>::COUNT; ++i) {
    a.part[i] = fn(a.part[i], b.part[i]);
  }
  return a.whole;
}
template <class V, class Fn>
TCPU_INLINE V map_pieces(V x, V y, V z, Fn fn) {
  pieces<V> a, b, c;
  a.whole = x;
  b.whole = y;
  c.whole = z;
  for (int i = 0; i < pieces<V>::COUNT; ++i) {
    a.part[i] = fn(a.part[i], b.part[i], c.part[i]);
  }
  return a.whole;
}

// fn applied to each lane, for what has no vector form.
template <class V, class Fn>
TCPU_INLINE V map_lanes(V x, Fn fn) {
  for (int i = 0; i < LANES; ++i) {
    x[i] = fn(x[i]);
  }
  return x;
}
template <class V, class Fn>
TCPU_INLINE V map_lanes(V x, V y, Fn fn) {
  for (int i = 0; i < LANES; ++i) {
    x[i] = fn(x[i], y[i]);
  }
  return x;
}

template <class To, class V>
TCPU_INLINE auto bitcast(V v) {
  if constexpr (is_scalar<V>) {
    static_assert(sizeof(To) == sizeof(V), "bitcast: sizes differ");
    To result;
    memcpy(&result, &v, sizeof v);
    return result;
  } else {
    static_assert(sizeof(vec<To>) == sizeof(V), "bitcast: sizes differ");
    return (vec<To>)v;
  }
}

template <int BYTES, bool SIGNED>
using integer_type = std::conditional_t<SIGNED, typename integer_of<BYTES>::type,
                                        std::make_unsigned_t<typename integer_of<BYTES>::type>>;

// The type to go through from From to To, or To. GCC converts lane by lane where sizes differ by more than a factor of
// two, or where an integer narrower than 32 bits meets a float.
template <class From, class To>
constexpr auto conversion_step() {
  constexpr int from = sizeof(From), to = sizeof(To);
  constexpr bool from_integer = std::is_integral_v<From>, to_integer = std::is_integral_v<To>;
  if constexpr (from_integer && to_integer) {
    if constexpr (to > 2 * from) {
      return integer_type<2 * from, std::is_signed_v<From>>{};
    } else if constexpr (from > 2 * to) {
      return integer_type<from / 2, std::is_signed_v<To>>{};
    } else {
      return To{};
    }
  } else if constexpr ((from_integer && from < 4) || (to_integer && to < 4)) {
    return int32_t{};
  } else {
    return To{};
  }
}

// Lanes of one integer or float type to another, by value.
template <class To, class V>
TCPU_INLINE vec<To> convert_lanes(V v) {
  using From = element_t<V>;
  using Step = decltype(conversion_step<From, To>());
#if defined(TCPU_AVX512)
  // One instruction each, where GCC takes several.
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    constexpr bool SIGNED = std::is_signed_v<From>;
    if constexpr (sizeof(From) == 1 && sizeof(To) == 4) {
      return (vec<To>)(SIGNED ? _mm512_cvtepi8_epi32((__m128i)v) : _mm512_cvtepu8_epi32((__m128i)v));
    } else if constexpr (sizeof(From) == 2 && sizeof(To) == 4) {
      return (vec<To>)(SIGNED ? _mm512_cvtepi16_epi32((__m256i)v) : _mm512_cvtepu16_epi32((__m256i)v));
    } else if constexpr (sizeof(From) == 4 && sizeof(To) == 2) {
      return (vec<To>)_mm512_cvtepi32_epi16((__m512i)v);
    } else if constexpr (sizeof(From) == 4 && sizeof(To) == 1) {
      return (vec<To>)_mm512_cvtepi32_epi8((__m512i)v);
    }
  }
#endif
  if constexpr (std::is_same_v<From, To>) {
    return v;
  } else if constexpr (!std::is_same_v<Step, To>) {
    return convert_lanes<To>(convert_lanes<Step>(v));
  } else {
    return __builtin_convertvector(v, vec<To>);
  }
}

// One operator over native registers: GCC would otherwise compare vectors wider than a register lane by lane.
#define TCPU_COMPARE(NAME, EXPRESSION)                                        \
  template <class V>                                                          \
  TCPU_INLINE mask NAME(V a, V b) {                                           \
    using S = signed_of<element_t<V>>;                                        \
    pieces<V> left, right;                                                    \
    pieces<vec<S>> result;                                                    \
    left.whole = a;                                                           \
    right.whole = b;                                                          \
    for (int i = 0; i < pieces<V>::COUNT; ++i) {                              \
      const auto x = left.part[i];                                            \
      const auto y = right.part[i];                                           \
      result.part[i] = (EXPRESSION);                                          \
    }                                                                         \
    return convert_lanes<int32_t>(result.whole);                              \
  }
TCPU_COMPARE(cmp_lt, x < y)
TCPU_COMPARE(cmp_le, x <= y)
TCPU_COMPARE(cmp_gt, x > y)
TCPU_COMPARE(cmp_ge, x >= y)
TCPU_COMPARE(cmp_eq, x == y)
TCPU_COMPARE(cmp_ne, x != y)
TCPU_COMPARE(cmp_ord, (x == x) & (y == y))
TCPU_COMPARE(cmp_uno, (x != x) | (y != y))
TCPU_COMPARE(cmp_one, (x < y) | (x > y))
#undef TCPU_COMPARE

template <class V>
TCPU_INLINE mask cmp_ult(V a, V b) {
  return ~cmp_ge(a, b);
}
template <class V>
TCPU_INLINE mask cmp_ule(V a, V b) {
  return ~cmp_gt(a, b);
}
template <class V>
TCPU_INLINE mask cmp_ugt(V a, V b) {
  return ~cmp_le(a, b);
}
template <class V>
TCPU_INLINE mask cmp_uge(V a, V b) {
  return ~cmp_lt(a, b);
}
template <class V>
TCPU_INLINE mask cmp_ueq(V a, V b) {
  return ~cmp_one(a, b);
}
template <class V>
TCPU_INLINE mask cmp_une(V a, V b) {
  return cmp_ne(a, b);
}

template <class V>
TCPU_INLINE V select(mask m, V a, V b) {
  using S = signed_of<element_t<V>>;
#if defined(TCPU_AVX512)
  if constexpr (sizeof(element_t<V>) == 4) {
    return m ? a : b;
  }
#endif
  const vec<S> wide = convert_lanes<S>(m);
  return (V)(((vec<S>)a & wide) | ((vec<S>)b & ~wide));
}
template <class T, class = std::enable_if_t<is_scalar<T>>>
TCPU_INLINE T select(bool condition, T a, T b) {
  return condition ? a : b;
}

TCPU_INLINE uint32_t movemask(mask m) {
#if defined(TCPU_AVX512)
  return _mm512_movepi32_mask((__m512i)m);
#elif defined(TCPU_AVX2)
  pieces<mask> p;
  p.whole = m;
  return _mm256_movemask_ps((__m256)p.part[0]) | _mm256_movemask_ps((__m256)p.part[1]) << 8;
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; ++i) {
    bits |= (uint32_t)(m[i] & 1) << i;
  }
  return bits;
#endif
}

TCPU_INLINE mask frommask(uint32_t bits) {
#if defined(TCPU_AVX512)
  return (mask)_mm512_movm_epi32((__mmask16)bits);
#else
  const mask lane_bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return cmp_ne(splat((int32_t)bits) & lane_bit, mask{});
#endif
}

TCPU_INLINE uint32_t bits_below(int64_t n) {
  return n >= LANES ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u;
}

TCPU_INLINE mask lanes_below(int64_t n) {
  const int32_t limit = n > LANES ? LANES : n < 0 ? 0 : (int32_t)n;
  return cmp_lt(iota<int32_t>(), splat(limit));
}

}  // namespace tcpu
