// Elementary functions of float and double, vectors and scalars, IEEE for NaN, infinity and signed zero.
//
//   exp exp2 log log2 sin cos tanh erf   float by polynomials (coefficients: weighted least squares on Chebyshev nodes,
//                                        reweighted toward the minimax fit); double through libm, lane by lane
//   sqrt rsqrt                           correctly rounded; 1 / sqrt
//   fma                                  one rounding, always
//   floor ceil trunc rint round          rint: ties to even; round: ties away from zero
//   pow and libm's others (see TCPU_LIBM below)   lane by lane
//
// Errors of the float polynomials are below 2 ulp (tanh, erf, sin, cos: 3); a scalar has the vector's result.
#pragma once

#include "arithmetic.h"

namespace tcpu {

using floats = piece<float>;
using ints = piece<int32_t>;

// fma where the machine has it, else two roundings: for polynomials.
TCPU_INLINE floats mul_add(floats a, floats b, floats c) {
#if defined(TCPU_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(TCPU_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

template <int N>
TCPU_INLINE floats polynomial(floats x, const float (&coefficients)[N]) {
  floats y = splat_piece(coefficients[N - 1]);
  for (int i = N - 2; i >= 0; --i) {
    y = mul_add(y, x, splat_piece(coefficients[i]));
  }
  return y;
}

// Ties to even, |x| < 2^22.
TCPU_INLINE floats nearest_integer(floats x) {
#if defined(TCPU_AVX512)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(TCPU_AVX2)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const floats shift = splat_piece(0x1.8p23f);
  return (x + shift) - shift;
#endif
}

// x * 2^n for integral n, -252 <= n <= 254; one rounding where the result is subnormal.
TCPU_INLINE floats scale_by_power(floats x, floats n) {
#if defined(TCPU_AVX512)
  return _mm512_scalef_ps(x, n);
#else
  const ints exponent = __builtin_convertvector(n, ints);
  const ints half = exponent >> 1;
  const floats first = (floats)((half + 127) << 23);
  const floats second = (floats)((exponent - half + 127) << 23);
  return x * first * second;
#endif
}

TCPU_INLINE floats copy_sign(floats magnitude, floats sign) {
  const ints sign_bit = (ints)splat_piece(-0.0f);
  return (floats)(((ints)magnitude & ~sign_bit) | ((ints)sign & sign_bit));
}

TCPU_INLINE floats exp_piece(floats x) {
  // Beyond these bounds the result is infinite or rounds to zero.
  x = clamp_piece(x, -104.0f, 89.0f);
  const floats n = nearest_integer(x * 0x1.715476p0f);
  floats r = mul_add(n, splat_piece(-0x1.62e4p-1f), x);  // 16 bits of ln 2: the product is exact without fma too
  r = mul_add(n, splat_piece(-0x1.7f7d1cp-20f), r);
  const floats p = polynomial(
      r, {4.999999404e-01f, 1.666651964e-01f, 4.166839272e-02f, 8.368747309e-03f, 1.381451963e-03f});
  return scale_by_power(mul_add(r * r, p, r) + 1.0f, n);
}

TCPU_INLINE floats exp2_piece(floats x) {
  x = clamp_piece(x, -151.0f, 129.0f);
  const floats n = nearest_integer(x);
  const floats r = x - n;
  const floats p = polynomial(r, {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f, 9.618437849e-03f,
                                  1.339890528e-03f, 1.535334595e-04f});
  return scale_by_power(mul_add(r, p, splat_piece(1.0f)), n);
}

// x = 2^exponent * (1 + fraction), sqrt(1/2) <= 1 + fraction < sqrt(2); log(1 + fraction) = fraction + correction.
struct logarithm_parts {
  floats exponent, fraction, correction;
};

TCPU_INLINE logarithm_parts split_logarithm(floats x) {
  const ints is_subnormal = x < 0x1p-126f;
  x = is_subnormal ? x * 0x1p23f : x;
  // Subtracting the bits of sqrt(1/2) makes the exponent field count from there.
  const ints bits = (ints)x - 0x3f3504f3;
  logarithm_parts parts;
  parts.exponent = __builtin_convertvector((bits >> 23) - (is_subnormal & 23), floats);
  const floats f = (floats)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  const floats p = polynomial(f, {3.333331347e-01f, -2.500000894e-01f, 2.000212073e-01f, -1.666799784e-01f,
                                  1.421952993e-01f, -1.240554899e-01f, 1.188827753e-01f, -1.167588979e-01f,
                                  6.746665388e-02f});
  parts.fraction = f;
  parts.correction = f * f * mul_add(f, p, splat_piece(-0.5f));
  return parts;
}

TCPU_INLINE floats logarithm_specials(floats x, floats result) {
  const floats infinity = splat_piece(__builtin_inff());
  result = x == 0.0f ? -infinity : result;
  result = x < 0.0f ? splat_piece(__builtin_nanf("")) : result;
  return x < infinity ? result : x;  // infinity and NaN give themselves
}

TCPU_INLINE floats log_piece(floats x) {
  const logarithm_parts s = split_logarithm(x);
  const floats low = mul_add(s.exponent, splat_piece(0x1.7f7d1cp-20f), s.correction);
  return logarithm_specials(x, mul_add(s.exponent, splat_piece(0x1.62e4p-1f), s.fraction + low));
}

TCPU_INLINE floats log2_piece(floats x) {
  const logarithm_parts s = split_logarithm(x);
  // The upper 11 bits of log2(e) times the upper 12 of the fraction are exact without fma too.
  const floats upper = (floats)((ints)s.fraction & ~0xfff);
  const floats lower = s.fraction - upper;
  const floats small = mul_add(s.correction, splat_piece(0x1.715476p0f),
                               mul_add(lower, splat_piece(0x1.715476p0f), upper * 0x1.47652cp-12f));
  return logarithm_specials(x, s.exponent + mul_add(upper, splat_piece(0x1.714p0f), small));
}

// For |x| >= 0.6 through exp; below, where 1 - 2 / (...) cancels, by a polynomial.
TCPU_INLINE floats tanh_piece(floats x) {
  const floats magnitude = copy_sign(x, splat_piece(1.0f));
  const floats z = x * x;
  const floats p = polynomial(z, {-3.333333135e-01f, 1.333324760e-01f, -5.395247415e-02f, 2.173442580e-02f,
                                  -8.267058060e-03f, 2.231033752e-03f});
  const floats small = mul_add(x * z, p, x);
  const floats large = 1.0f - 2.0f / (exp_piece(magnitude + magnitude) + 1.0f);
  return copy_sign(magnitude < 0.6f ? small : large, x);
}

// Below 1 a polynomial; above, 1 - 2^q(x) with q fitted to log2(erfc(x)). From 4 on the result is 1.
TCPU_INLINE floats erf_piece(floats x) {
  const floats magnitude = copy_sign(x, splat_piece(1.0f));
  const floats p = polynomial(x * x, {1.283791065e-01f, -3.761262596e-01f, 1.128358543e-01f, -2.685381100e-02f,
                                      5.188326351e-03f, -8.010182064e-04f, 7.853823627e-05f});
  const floats small = mul_add(x, p, x);
  const floats q = polynomial(clamp_piece(magnitude, 0.0f, 4.0f),
                              {2.646703506e-04f, -1.629606128e+00f, -9.136046767e-01f, -1.563486308e-01f,
                               3.632570431e-02f, -6.050154101e-03f, 6.335077924e-04f, -3.101334732e-05f});
  const floats large = 1.0f - exp2_piece(q);
  return copy_sign(magnitude < 1.0f ? small : large, x);
}

// sin for quadrant 0, cos for quadrant 1, then their negatives; |r| <= pi/4.
TCPU_INLINE floats sine_of_quadrant(floats r, ints quadrant) {
  const floats z = r * r;
  const floats s = polynomial(z, {-1.666666716e-01f, 8.333329111e-03f, -1.983932743e-04f, 2.718236374e-06f});
  const floats c = polynomial(z, {4.166666791e-02f, -1.388888340e-03f, 2.479951218e-05f, -2.720953205e-07f});
  const floats sine = mul_add(r * z, s, r);
  const floats cosine = mul_add(z * z, c, 1.0f - 0.5f * z);
  const floats result = (quadrant & 1) != 0 ? cosine : sine;
  return (floats)((ints)result ^ ((quadrant & 2) << 30));
}

// The quadrant is counted in double, which is exact enough for |x| < 10^6; larger ones go to libm.
template <int SHIFT, class Fn>
TCPU_INLINE vec<float> sine_shifted(vec<float> x, Fn libm) {
  const vec<double> wide = __builtin_convertvector(x, vec<double>);
  const vec<double> shifted = wide * 0x1.45f306dc9c883p-1 + 0x1.8p52;
  const vec<double> n = shifted - 0x1.8p52;
  // 33 bits of pi/2: the product with n is exact.
  const vec<double> r = (wide - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
  pieces<vec<float>> reduced;
  pieces<vec<int32_t>> quadrant;
  reduced.whole = __builtin_convertvector(r, vec<float>);
  quadrant.whole = convert_lanes<int32_t>((vec<int64_t>)shifted) + SHIFT;
  for (int i = 0; i < pieces<vec<float>>::COUNT; ++i) {
    reduced.part[i] = sine_of_quadrant(reduced.part[i], quadrant.part[i]);
  }
  vec<float> result = reduced.whole;
  if constexpr (SHIFT == 0) {
    result = select(cmp_eq(x, vec<float>{}), x, result);  // -0
  }
  const uint32_t large = movemask(~cmp_lt(abs(x), splat(1e6f)));
  for (int i = 0; large != 0 && i < LANES; ++i) {
    if (large >> i & 1u) {
      result[i] = libm(x[i]);
    }
  }
  return result;
}

TCPU_INLINE vec<float> sin_lanes(vec<float> x) {
  return sine_shifted<0>(x, [](float lane) { return __builtin_sinf(lane); });
}
TCPU_INLINE vec<float> cos_lanes(vec<float> x) {
  return sine_shifted<1>(x, [](float lane) { return __builtin_cosf(lane); });
}

#define TCPU_FLOAT_PIECE(NAME)                                                                 \
  TCPU_INLINE vec<float> NAME(vec<float> x) {                                                  \
    return map_pieces(x, [](floats p) { return NAME##_piece(p); });                            \
  }                                                                                            \
  TCPU_INLINE float NAME(float x) { return NAME##_piece(splat_piece(x))[0]; }
#define TCPU_FLOAT_LANES(NAME)                                                                 \
  TCPU_INLINE vec<float> NAME(vec<float> x) { return NAME##_lanes(x); }                        \
  TCPU_INLINE float NAME(float x) { return NAME##_lanes(splat(x))[0]; }
#define TCPU_DOUBLE(NAME, FUNCTION)                                                            \
  TCPU_INLINE double NAME(double x) { return FUNCTION(x); }                                    \
  TCPU_INLINE vec<double> NAME(vec<double> x) {                                                \
    return map_lanes(x, [](double lane) { return FUNCTION(lane); });                           \
  }
TCPU_FLOAT_PIECE(exp)
TCPU_FLOAT_PIECE(exp2)
TCPU_FLOAT_PIECE(log)
TCPU_FLOAT_PIECE(log2)
TCPU_FLOAT_PIECE(tanh)
TCPU_FLOAT_PIECE(erf)
TCPU_FLOAT_LANES(sin)
TCPU_FLOAT_LANES(cos)
TCPU_DOUBLE(exp, __builtin_exp)
TCPU_DOUBLE(exp2, __builtin_exp2)
TCPU_DOUBLE(log, __builtin_log)
TCPU_DOUBLE(log2, __builtin_log2)
TCPU_DOUBLE(tanh, __builtin_tanh)
TCPU_DOUBLE(erf, __builtin_erf)
TCPU_DOUBLE(sin, __builtin_sin)
TCPU_DOUBLE(cos, __builtin_cos)

// One machine instruction where there is one; the plain build goes through the builtin.
#if defined(TCPU_AVX512)
#define TCPU_ROUNDING(NAME, MODE)                                                              \
  TCPU_INLINE vec<float> NAME(vec<float> x) { return (vec<float>)_mm512_roundscale_ps(x, MODE); } \
  TCPU_INLINE vec<double> NAME(vec<double> x) {                                                \
    return map_pieces(x, [](auto p) { return (decltype(p))_mm512_roundscale_pd(p, MODE); });   \
  }
#elif defined(TCPU_AVX2)
#define TCPU_ROUNDING(NAME, MODE)                                                              \
  TCPU_INLINE vec<float> NAME(vec<float> x) {                                                  \
    return map_pieces(x, [](auto p) { return (decltype(p))_mm256_round_ps(p, MODE); });        \
  }                                                                                            \
  TCPU_INLINE vec<double> NAME(vec<double> x) {                                                \
    return map_pieces(x, [](auto p) { return (decltype(p))_mm256_round_pd(p, MODE); });        \
  }
#else
#define TCPU_ROUNDING(NAME, MODE)                                                              \
  TCPU_INLINE vec<float> NAME(vec<float> x) {                                                  \
    return map_lanes(x, [](float lane) { return __builtin_##NAME##f(lane); });                 \
  }                                                                                            \
  TCPU_INLINE vec<double> NAME(vec<double> x) {                                                \
    return map_lanes(x, [](double lane) { return __builtin_##NAME(lane); });                   \
  }
#endif
#define TCPU_ROUNDINGS(NAME, MODE)                                                             \
  TCPU_ROUNDING(NAME, MODE)                                                                    \
  TCPU_INLINE float NAME(float x) { return __builtin_##NAME##f(x); }                           \
  TCPU_INLINE double NAME(double x) { return __builtin_##NAME(x); }
TCPU_ROUNDINGS(floor, 9)
TCPU_ROUNDINGS(ceil, 10)
TCPU_ROUNDINGS(trunc, 11)
TCPU_ROUNDINGS(rint, 8)

template <class V>
TCPU_INLINE V sqrt(V x) {
  using T = element_t<V>;
  if constexpr (is_scalar<V>) {
    return sizeof(T) == 4 ? __builtin_sqrtf((float)x) : __builtin_sqrt(x);
  } else {
#if defined(TCPU_AVX512)
    return map_pieces(x, [](auto p) {
      if constexpr (sizeof(T) == 4) {
        return (decltype(p))_mm512_sqrt_ps(p);
      } else {
        return (decltype(p))_mm512_sqrt_pd(p);
      }
    });
#elif defined(TCPU_AVX2)
    return map_pieces(x, [](auto p) {
      if constexpr (sizeof(T) == 4) {
        return (decltype(p))_mm256_sqrt_ps(p);
      } else {
        return (decltype(p))_mm256_sqrt_pd(p);
      }
    });
#else
    return map_lanes(x, [](T lane) { return sqrt(lane); });
#endif
  }
}

template <class V>
TCPU_INLINE V rsqrt(V x) {
  return (element_t<V>)1 / sqrt(x);
}

TCPU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TCPU_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class V, class = std::enable_if_t<!is_scalar<V>>>
TCPU_INLINE V fma(V a, V b, V c) {
#if defined(TCPU_AVX512) || defined(TCPU_AVX2)
  return map_pieces(a, b, c, [](auto x, auto y, auto z) {
    using P = decltype(x);
#if defined(TCPU_AVX512)
    if constexpr (sizeof(x[0]) == 4) {
      return (P)_mm512_fmadd_ps(x, y, z);
    } else {
      return (P)_mm512_fmadd_pd(x, y, z);
    }
#else
    if constexpr (sizeof(x[0]) == 4) {
      return (P)_mm256_fmadd_ps(x, y, z);
    } else {
      return (P)_mm256_fmadd_pd(x, y, z);
    }
#endif
  });
#else
  for (int i = 0; i < LANES; ++i) {
    a[i] = fma(a[i], b[i], c[i]);
  }
  return a;
#endif
}

// libm, lane by lane.
#define TCPU_LIBM(NAME)                                                                        \
  TCPU_DOUBLE(NAME, __builtin_##NAME)                                                          \
  TCPU_INLINE float NAME(float x) { return __builtin_##NAME##f(x); }                           \
  TCPU_INLINE vec<float> NAME(vec<float> x) {                                                  \
    return map_lanes(x, [](float lane) { return __builtin_##NAME##f(lane); });                 \
  }
#define TCPU_LIBM_2(NAME)                                                                      \
  TCPU_INLINE float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }               \
  TCPU_INLINE double NAME(double x, double y) { return __builtin_##NAME(x, y); }               \
  TCPU_INLINE vec<float> NAME(vec<float> x, vec<float> y) {                                    \
    return map_lanes(x, y, [](float a, float b) { return __builtin_##NAME##f(a, b); });        \
  }                                                                                            \
  TCPU_INLINE vec<double> NAME(vec<double> x, vec<double> y) {                                 \
    return map_lanes(x, y, [](double a, double b) { return __builtin_##NAME(a, b); });         \
  }
// Not every compiler has a built-in exp10.
TCPU_INLINE double power_of_ten(double x) { return __builtin_pow(10.0, x); }
TCPU_DOUBLE(exp10, power_of_ten)
TCPU_INLINE float exp10(float x) { return (float)power_of_ten(x); }
TCPU_INLINE vec<float> exp10(vec<float> x) {
  return map_lanes(x, [](float lane) { return (float)power_of_ten(lane); });
}
TCPU_LIBM(round)
TCPU_LIBM(expm1)
TCPU_LIBM(log10)
TCPU_LIBM(log1p)
TCPU_LIBM(tan)
TCPU_LIBM(asin)
TCPU_LIBM(acos)
TCPU_LIBM(atan)
TCPU_LIBM(sinh)
TCPU_LIBM(cosh)
TCPU_LIBM(asinh)
TCPU_LIBM(acosh)
TCPU_LIBM(atanh)
TCPU_LIBM(erfc)
TCPU_LIBM(lgamma)
TCPU_LIBM(tgamma)
TCPU_LIBM(cbrt)
TCPU_LIBM_2(pow)
TCPU_LIBM_2(atan2)
TCPU_LIBM_2(hypot)
TCPU_LIBM_2(copysign)
TCPU_LIBM_2(nextafter)
#undef TCPU_FLOAT_PIECE
#undef TCPU_FLOAT_LANES
#undef TCPU_DOUBLE
#undef TCPU_ROUNDING
#undef TCPU_ROUNDINGS
#undef TCPU_LIBM
#undef TCPU_LIBM_2

}  // namespace tcpu
