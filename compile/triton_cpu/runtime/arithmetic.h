// Arithmetic that C++'s operators do not give: minimum and maximum, integer division that never traps, wide products,
// shifts, bit counts. Each takes vectors and scalars.
//
//   minimum maximum      floats: NaN where either is NaN; -0 is less than +0 (arith.minimumf, arith.maximumf)
//   minnum maxnum        floats: the other operand where one is NaN; -0 is less than +0 (arith.minnumf, arith.maxnumf)
//   min max              integers, signed or unsigned by type
//   clamp(x, low, high)  floats; NaN stays NaN
//   abs                  floats (clears the sign) and integers (the most negative stays itself)
//   div rem              integers: toward zero; x / 0 has all bits set, x % 0 is x, the most negative / -1 wraps.
//                        floats: x / y and C's fmod
//   mulhi                upper half of the product: 32 and 64 bits, signed or unsigned by type
//   shl shr              shr is arithmetic for signed types; a count that is negative or >= the width shifts all out
//   popc clz ffs         counts as the operand's type; clz(0) is the width, ffs(0) is 0
#pragma once

#include "vec.h"

namespace tcpu {

template <class V>
constexpr bool is_float = std::is_floating_point_v<element_t<V>>;

// IEEE 754-2008 minNum and maxNum over one native register.
template <bool MAX, class P>
TCPU_INLINE P extremum_number(P a, P b) {
#if defined(TCPU_AVX512)
  if constexpr (sizeof(a[0]) == 4) {
    return _mm512_range_ps(a, b, MAX ? 5 : 4);
  } else {
    return _mm512_range_pd(a, b, MAX ? 5 : 4);
  }
#else
  using I = piece<signed_of<element_t<P>>>;
  // Equal values differ at most in a zero's sign: combine the bits.
  const P equal = MAX ? (P)((I)a & (I)b) : (P)((I)a | (I)b);
  const I take_a = (MAX ? (I)(a > b) : (I)(a < b)) | (I)(b != b);
  const P unequal = take_a ? a : b;
  return a == b ? equal : unequal;
#endif
}

template <bool MAX, class P>
TCPU_INLINE P extremum_or_nan(P a, P b) {
  return ((a != a) | (b != b)) ? a + b : extremum_number<MAX>(a, b);
}

// A scalar takes the vector's road, so that it has the vector's results.
#define TCPU_EXTREMUM(NAME, FUNCTION)                                                \
  template <class V>                                                                 \
  TCPU_INLINE V NAME(V a, V b) {                                                     \
    if constexpr (is_scalar<V>) {                                                    \
      return FUNCTION(splat_piece(a), splat_piece(b))[0];                            \
    } else {                                                                         \
      return map_pieces(a, b, [](auto x, auto y) { return FUNCTION(x, y); });        \
    }                                                                                \
  }
TCPU_EXTREMUM(minnum, extremum_number<false>)
TCPU_EXTREMUM(maxnum, extremum_number<true>)
TCPU_EXTREMUM(minimum, extremum_or_nan<false>)
TCPU_EXTREMUM(maximum, extremum_or_nan<true>)
#undef TCPU_EXTREMUM

template <class P>
TCPU_INLINE P clamp_piece(P x, element_t<P> low, element_t<P> high) {
  const P lower = splat_piece(low);
  const P upper = splat_piece(high);
#if defined(TCPU_AVX512)
  // The second operand is returned where either is NaN.
  if constexpr (sizeof(low) == 4) {
    return _mm512_max_ps(lower, _mm512_min_ps(upper, x));
  } else {
    return _mm512_max_pd(lower, _mm512_min_pd(upper, x));
  }
#else
  const P below = x > upper ? upper : x;
  return below < lower ? lower : below;
#endif
}
template <class V>
TCPU_INLINE V clamp(V x, element_t<V> low, element_t<V> high) {
  if constexpr (is_scalar<V>) {
    return x > high ? high : x < low ? low : x;
  } else {
    return map_pieces(x, [=](auto p) { return clamp_piece(p, low, high); });
  }
}

template <class V>
TCPU_INLINE V min(V a, V b) {
  if constexpr (is_scalar<V>) {
    return a < b ? a : b;
  } else {
    return map_pieces(a, b, [](auto x, auto y) { return x < y ? x : y; });
  }
}
template <class V>
TCPU_INLINE V max(V a, V b) {
  if constexpr (is_scalar<V>) {
    return a > b ? a : b;
  } else {
    return map_pieces(a, b, [](auto x, auto y) { return x > y ? x : y; });
  }
}

template <class V>
TCPU_INLINE V abs(V x) {
  using T = element_t<V>;
  if constexpr (is_float<V> && is_scalar<V>) {
    return sizeof(T) == 4 ? __builtin_fabsf(x) : __builtin_fabs(x);
  } else if constexpr (is_float<V>) {
    using S = signed_of<T>;
    return (V)((vec<S>)x & (S) ~((std::make_unsigned_t<S>)1 << (8 * sizeof(S) - 1)));
  } else if constexpr (std::is_unsigned_v<T>) {
    return x;
  } else if constexpr (is_scalar<V>) {
    return x < 0 ? (T)(0 - (std::make_unsigned_t<T>)x) : x;
  } else {
    const V sign = x >> (T)(8 * sizeof(T) - 1);
    return (x ^ sign) - sign;
  }
}

template <class T>
TCPU_INLINE T divide_integers(T a, T b) {
  if (b == 0) {
    return (T)-1;
  }
  if (std::is_signed_v<T> && b == (T)-1) {
    return (T)(0 - (std::make_unsigned_t<T>)a);
  }
  return (T)(a / b);
}

template <class V>
TCPU_INLINE V div(V a, V b) {
  using T = element_t<V>;
  if constexpr (is_float<V>) {
    return a / b;
  } else if constexpr (is_scalar<V>) {
    return divide_integers(a, b);
  } else if constexpr (sizeof(T) == 8) {
    return map_lanes(a, b, [](T x, T y) { return divide_integers(x, y); });
  } else {
    // Exact: the quotient of two integers below 2^32 never rounds up to the next integer in double.
    const vec<double> quotient = convert_lanes<double>(a) / convert_lanes<double>(b);
    using Wide = std::conditional_t<std::is_same_v<T, uint32_t>, uint32_t, int32_t>;
    const V result = convert_lanes<T>(convert_lanes<Wide>(quotient));
    return select(cmp_eq(b, V{}), ~V{}, result);
  }
}

template <class V>
TCPU_INLINE V rem(V a, V b) {
  using T = element_t<V>;
  if constexpr (is_float<V>) {
    const auto remainder = [](T x, T y) { return sizeof(T) == 4 ? __builtin_fmodf(x, y) : __builtin_fmod(x, y); };
    if constexpr (is_scalar<V>) {
      return remainder(a, b);
    } else {
      return map_lanes(a, b, remainder);
    }
  } else {
    using U = std::make_unsigned_t<T>;  // unsigned, as the product may wrap
    if constexpr (is_scalar<V>) {
      return (T)((U)a - (U)div(a, b) * (U)b);
    } else {
      return (V)((vec<U>)a - (vec<U>)div(a, b) * (vec<U>)b);
    }
  }
}

// By a power of two, toward zero.
template <int64_t DIVISOR, class V>
TCPU_INLINE V div_by(V a) {
  using T = element_t<V>;
  constexpr int SHIFT = __builtin_ctzll(DIVISOR);
  return (V)(a + ((a >> (8 * sizeof(T) - 1)) & (T)(DIVISOR - 1))) >> SHIFT;
}
template <int64_t DIVISOR, class V>
TCPU_INLINE V rem_by(V a) {
  return (V)(a - (V)(div_by<DIVISOR>(a) * (element_t<V>)DIVISOR));
}

template <class V>
TCPU_INLINE V mulhi(V a, V b) {
  using T = element_t<V>;
  static_assert(sizeof(T) >= 4, "mulhi takes integers of 32 and 64 bits");
  using Wide64 = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  using Wide = std::conditional_t<sizeof(T) == 8, Wide64, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  const auto upper_half = [](T x, T y) { return (T)(((Wide)x * (Wide)y) >> (8 * sizeof(T))); };
  if constexpr (is_scalar<V>) {
    return upper_half(a, b);
  } else if constexpr (sizeof(T) == 8) {
    return map_lanes(a, b, upper_half);
  } else {
#if defined(TCPU_AVX512)
    const __m512i x = (__m512i)a, y = (__m512i)b;
    const __m512i x_odd = _mm512_srli_epi64(x, 32), y_odd = _mm512_srli_epi64(y, 32);
    const __m512i even = std::is_signed_v<T> ? _mm512_mul_epi32(x, y) : _mm512_mul_epu32(x, y);
    const __m512i odd = std::is_signed_v<T> ? _mm512_mul_epi32(x_odd, y_odd) : _mm512_mul_epu32(x_odd, y_odd);
    return (V)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
#else
    return convert_lanes<T>((convert_lanes<Wide>(a) * convert_lanes<Wide>(b)) >> 32);
#endif
  }
}

template <class V>
TCPU_INLINE V shl(V a, V count) {
  using T = element_t<V>;
  using U = std::make_unsigned_t<T>;
  constexpr U WIDTH = 8 * sizeof(T);
  if constexpr (is_scalar<V>) {
    return (U)count < WIDTH ? (T)((U)a << count) : T{0};
  } else if constexpr (sizeof(T) < 4) {
    return convert_lanes<T>(shl(convert_lanes<int32_t>(a), convert_lanes<int32_t>(count)));
  } else {
    const vec<U> n = (vec<U>)count;
    return (V)select(cmp_lt(n, splat(WIDTH)), (vec<U>)a << (n & (WIDTH - 1)), vec<U>{});
  }
}

template <class V>
TCPU_INLINE V shr(V a, V count) {
  using T = element_t<V>;
  using U = std::make_unsigned_t<T>;
  constexpr U WIDTH = 8 * sizeof(T);
  if constexpr (is_scalar<V>) {
    return (U)count < WIDTH ? (T)(a >> count) : a < 0 ? (T)-1 : T{0};
  } else if constexpr (sizeof(T) < 4) {
    return convert_lanes<T>(shr(convert_lanes<int32_t>(a), convert_lanes<int32_t>(count)));
  } else {
    const vec<U> n = (vec<U>)count;
    const mask inside = cmp_lt(n, splat(WIDTH));
    if constexpr (std::is_signed_v<T>) {
      return a >> (V)select(inside, n, splat((U)(WIDTH - 1)));
    } else {
      return select(inside, a >> (n & (WIDTH - 1)), V{});
    }
  }
}

#define TCPU_COUNT(NAME, EXPRESSION)                                        \
  template <class V>                                                        \
  TCPU_INLINE V NAME(V a) {                                                 \
    using T = element_t<V>;                                                 \
    constexpr int WIDTH = 8 * sizeof(T);                                    \
    const auto count = [](T lane) {                                         \
      const uint64_t x = (std::make_unsigned_t<T>)lane;                     \
      return (T)(EXPRESSION);                                               \
    };                                                                      \
    static_assert(WIDTH <= 64, "counts take integers of up to 64 bits");    \
    if constexpr (is_scalar<V>) {                                           \
      return count(a);                                                      \
    } else {                                                                \
      return map_lanes(a, count);                                           \
    }                                                                       \
  }
TCPU_COUNT(popc, __builtin_popcountll(x))
TCPU_COUNT(clz, x == 0 ? WIDTH : __builtin_clzll(x) - (64 - WIDTH))
TCPU_COUNT(ffs, __builtin_ffsll((int64_t)x))
#undef TCPU_COUNT

}  // namespace tcpu
