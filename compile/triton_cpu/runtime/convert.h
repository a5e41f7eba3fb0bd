// Conversions between element types, as values in registers and as stored bits.
//
//   convert<From, To>(x)      x: reg_t<From>, vector or scalar; returns reg_t<To>. A small float stays a float in its
//                             register, rounded (nearest even) to the values that To can hold
//   truncate<From, To>(x)     the same, rounded toward zero; To is a small float
//   encode<Storage>(vec<float>)   the bits of a small float: vec<uint16_t> or vec<uint8_t>
//   decode<Storage>(bits)         and back, exactly
//   small_to_bits<Storage>(x) bits_to_small<Storage>(bits)   the same for vectors and scalars, bits as signed integers
//   mask_to<T>(mask)          lanes 0 or 1 of T;  to_mask(v): lanes that are not zero
//
// Float to integer truncates toward zero; outside the range the result is unspecified, and nothing traps.
// Overflow: f16 and f8e5m2 become infinite; f8e4m3 (no infinity) becomes +-448, infinity included. NaN stays NaN.
#pragma once

#include "vec.h"

namespace tcpu {

template <class T>
struct bits_of_storage;
template <>
struct bits_of_storage<bf16> {
  using type = uint16_t;
};
template <>
struct bits_of_storage<f16> {
  using type = uint16_t;
};
template <>
struct bits_of_storage<f8e4m3> {
  using type = uint8_t;
};
template <>
struct bits_of_storage<f8e5m2> {
  using type = uint8_t;
};
template <class Storage>
using bits_t = typename bits_of_storage<Storage>::type;

// Round to a float with MANTISSA stored bits and exponent BIAS. Below the smallest normal number, adding a power of
// two whose unit is the type's own lets the adder round; above it, the bits are rounded as an integer.
template <int MANTISSA, int BIAS>
TCPU_INLINE vec<uint32_t> round_small(vec<uint32_t> magnitude) {
  constexpr int DROPPED = 23 - MANTISSA;
  constexpr uint32_t SMALLEST_NORMAL = (uint32_t)(127 + 1 - BIAS) << 23;
  constexpr uint32_t UNIT = (uint32_t)(127 + 1 - BIAS + DROPPED) << 23;
  const vec<uint32_t> unit = splat(UNIT);
  const vec<uint32_t> subnormal = (vec<uint32_t>)((vec<float>)magnitude + (vec<float>)unit) - unit;
  const vec<uint32_t> half = ((1u << (DROPPED - 1)) - 1u) + ((magnitude >> DROPPED) & 1u);
  const vec<uint32_t> normal = (magnitude + half - ((uint32_t)(127 - BIAS) << 23)) >> DROPPED;
  return select(cmp_lt(magnitude, splat(SMALLEST_NORMAL)), subnormal, normal);
}

template <class Storage>
TCPU_INLINE vec<bits_t<Storage>> encode(vec<float> x) {
#if defined(TCPU_BF16)
  if constexpr (std::is_same_v<Storage, bf16>) {
    constexpr int IS_SUBNORMAL = 0x20;  // which the conversion takes as zero
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, IS_SUBNORMAL) == 0, 1)) {
      return (vec<uint16_t>)_mm512_cvtneps_pbh((__m512)x);
    }
  }
#endif
  const vec<uint32_t> bits = (vec<uint32_t>)x;
  const vec<uint32_t> magnitude = bits & 0x7fffffffu;
  const mask is_nan = cmp_gt(magnitude, splat(0x7f800000u));
  vec<uint32_t> code;
  if constexpr (std::is_same_v<Storage, bf16>) {
    const vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    code = select(is_nan, (bits >> 16) | 0x40u, rounded);
  } else if constexpr (std::is_same_v<Storage, f16>) {
#if defined(TCPU_AVX512)
    return (vec<uint16_t>)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(TCPU_AVX2)
    pieces<vec<float>> p;
    p.whole = x;
    const __m128i low = _mm256_cvtps_ph(p.part[0], _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(p.part[1], _MM_FROUND_TO_NEAREST_INT);
    return (vec<uint16_t>)_mm256_set_m128i(high, low);
#else
    code = round_small<10, 15>(magnitude);
    code = select(cmp_gt(magnitude, splat(0x477fefffu)), splat(0x7c00u), code);  // from 65520 on
    code = select(is_nan, splat(0x7e00u), code) | ((bits >> 16) & 0x8000u);
#endif
  } else if constexpr (std::is_same_v<Storage, f8e5m2>) {
    code = round_small<2, 15>(magnitude);
    code = select(cmp_ge(magnitude, splat(0x47700000u)), splat(0x7cu), code);  // from 61440 on
    code = select(is_nan, splat(0x7fu), code) | ((bits >> 24) & 0x80u);
  } else {
    code = round_small<3, 7>(magnitude);
    code = select(cmp_ge(magnitude, splat(0x43e00000u)), splat(0x7eu), code);  // from 448 on
    code = select(is_nan, splat(0x7fu), code) | ((bits >> 24) & 0x80u);
  }
  return convert_lanes<bits_t<Storage>>(code);
}

template <class Storage>
TCPU_INLINE vec<float> decode(vec<bits_t<Storage>> stored) {
#if defined(TCPU_AVX512)
  if constexpr (std::is_same_v<Storage, f16>) {
    return (vec<float>)_mm512_cvtph_ps((__m256i)stored);
  }
#elif defined(TCPU_AVX2)
  if constexpr (std::is_same_v<Storage, f16>) {
    pieces<vec<float>> p;
    p.part[0] = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)stored));
    p.part[1] = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)stored, 1));
    return p.whole;
  }
#endif
  const vec<uint32_t> code = convert_lanes<uint32_t>(stored);
  if constexpr (std::is_same_v<Storage, bf16>) {
    return (vec<float>)(code << 16);
  } else {
    // Placed at float's own exponent, the value is right but for the difference of the biases: one exact product.
    constexpr bool IS_E4M3 = std::is_same_v<Storage, f8e4m3>;
    constexpr int DROPPED = std::is_same_v<Storage, f16> ? 13 : IS_E4M3 ? 20 : 21;
    constexpr uint32_t FIRST_SPECIAL = std::is_same_v<Storage, f16> ? 0x7c00u : IS_E4M3 ? 0x7fu : 0x7cu;
    constexpr uint32_t SIGN = std::is_same_v<Storage, f16> ? 0x8000u : 0x80u;
    constexpr float SCALE = IS_E4M3 ? 0x1p120f : 0x1p112f;
    const vec<uint32_t> magnitude = code & (SIGN - 1u);
    const vec<uint32_t> placed = magnitude << DROPPED;
    const vec<uint32_t> finite = (vec<uint32_t>)((vec<float>)placed * SCALE);
    const vec<uint32_t> special = placed | 0x7f800000u;
    const vec<uint32_t> value = select(cmp_ge(magnitude, splat(FIRST_SPECIAL)), special, finite);
    return (vec<float>)(value | ((code & SIGN) * (0x80000000u / SIGN)));
  }
}

// double to float so that a second rounding to a shorter type is right: an inexact result gets an odd last bit.
TCPU_INLINE vec<float> narrow_to_odd(vec<double> x) {
  const vec<float> nearest = __builtin_convertvector(x, vec<float>);
  const vec<double> back = __builtin_convertvector(nearest, vec<double>);
  const vec<double> magnitude = (vec<double>)((vec<uint64_t>)x & 0x7fffffffffffffffull);
  const vec<double> rounded = (vec<double>)((vec<uint64_t>)back & 0x7fffffffffffffffull);
  const vec<int32_t> toward_zero = (vec<int32_t>)nearest + cmp_gt(rounded, magnitude);
  const mask inexact = cmp_one(rounded, magnitude);
  return (vec<float>)select(inexact, toward_zero | 1, (vec<int32_t>)nearest);
}

template <class From, class To>
TCPU_INLINE vec<reg_t<To>> convert(vec<reg_t<From>> x) {
  if constexpr (std::is_same_v<From, To>) {
    return x;
  } else if constexpr (is_small_float<To>) {
    if constexpr (std::is_same_v<reg_t<From>, float>) {
      return decode<To>(encode<To>(x));
    } else if constexpr (sizeof(From) >= 4) {
      return decode<To>(encode<To>(narrow_to_odd(convert_lanes<double>(x))));
    } else {
      return decode<To>(encode<To>(convert_lanes<float>(x)));
    }
  } else {
    return convert_lanes<To>(x);
  }
}

template <class From, class To>
TCPU_INLINE reg_t<To> convert(reg_t<From> x) {
  if constexpr (std::is_same_v<From, To>) {
    return x;
  } else {
    return convert<From, To>(splat(x))[0];
  }
}

// A nearest value that went too far from zero is one bit pattern too large: infinity becomes the largest number.
template <class From, class To>
TCPU_INLINE vec<float> truncate(vec<reg_t<From>> x) {
  vec<float> exact;
  if constexpr (std::is_same_v<reg_t<From>, double>) {
    exact = narrow_to_odd(x);
  } else {
    exact = x;
  }
  const vec<bits_t<To>> nearest = encode<To>(exact);
  const auto magnitude = [](vec<float> v) { return (vec<uint32_t>)v & 0x7fffffffu; };
  const vec<uint32_t> reached = magnitude(decode<To>(nearest)), wanted = magnitude(exact);
  const mask too_far = cmp_gt(reached, wanted) & cmp_le(wanted, splat(0x7f800000u));
  return decode<To>((vec<bits_t<To>>)(nearest + convert_lanes<bits_t<To>>(too_far)));
}

template <class From, class To>
TCPU_INLINE float truncate(reg_t<From> x) {
  return truncate<From, To>(splat(x))[0];
}

template <class Storage, class V>
TCPU_INLINE auto small_to_bits(V x) {
  using Bits = signed_of<Storage>;
  if constexpr (is_scalar<V>) {
    return (Bits)encode<Storage>(splat(x))[0];
  } else {
    return (vec<Bits>)encode<Storage>(x);
  }
}

template <class Storage, class V>
TCPU_INLINE auto bits_to_small(V bits) {
  if constexpr (is_scalar<V>) {
    return decode<Storage>(splat((bits_t<Storage>)bits))[0];
  } else {
    return decode<Storage>((vec<bits_t<Storage>>)bits);
  }
}

template <class T>
TCPU_INLINE vec<T> mask_to(mask m) {
  return convert_lanes<T>(m & 1);
}

template <class V>
TCPU_INLINE mask to_mask(V v) {
  return cmp_ne(v, V{});
}

}  // namespace tcpu
