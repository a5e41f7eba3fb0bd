// One vector to one scalar, always in the same tree order: lanes 8 apart, then 4, 2, 1.
//
//   shift_down<K>(v)      lane i holds lane i + K, for i < K; the other lanes are unspecified. K is 1, 2, 4 or 8
//   shift_lanes<K>(v)     lane i holds lane i - K; where there is none, it is unspecified. K from -15 to 15
//   reduce(v, fn)         fn(vec, vec) -> vec combines lane by lane; returns lane 0 at the end
//   sum(v)  maximum_lane(v)  minimum_lane(v)      floats: lanes that are NaN are passed over, as maxnum and minnum do
//   any(mask) all(mask)
#pragma once

#include "arithmetic.h"

namespace tcpu {

template <int K, class P>
TCPU_INLINE P rotate_piece(P x) {
  constexpr int N = sizeof(P) / sizeof(x[0]);
#if defined(__clang__)
  if constexpr (N == 2) {
    return __builtin_shufflevector(x, x, 1, 0);
  } else if constexpr (N == 4) {
    return __builtin_shufflevector(x, x, K % 4, (K + 1) % 4, (K + 2) % 4, (K + 3) % 4);
  } else if constexpr (N == 8) {
    return __builtin_shufflevector(x, x, K % 8, (K + 1) % 8, (K + 2) % 8, (K + 3) % 8, (K + 4) % 8, (K + 5) % 8,
                                   (K + 6) % 8, (K + 7) % 8);
  } else {
    return __builtin_shufflevector(x, x, K, K + 1, K + 2, K + 3, K + 4, K + 5, K + 6, K + 7, K + 8, (K + 9) % 16,
                                   (K + 10) % 16, (K + 11) % 16, (K + 12) % 16, (K + 13) % 16, (K + 14) % 16,
                                   (K + 15) % 16);
  }
#else
  using S = signed_of<element_t<P>>;
  using Index = piece<S, sizeof(P)>;
  Index index;
  for (int i = 0; i < N; ++i) {
    index[i] = (S)((i + K) % N);
  }
  return __builtin_shuffle(x, index);
#endif
}

template <int K, class V>
TCPU_INLINE V shift_down(V v) {
  using Pieces = pieces<V>;
  constexpr int PER_PIECE = LANES / Pieces::COUNT;
  Pieces p;
  p.whole = v;
  if constexpr (K >= PER_PIECE) {
    for (int i = 0; i + K / PER_PIECE < Pieces::COUNT; ++i) {
      p.part[i] = p.part[i + K / PER_PIECE];
    }
  } else {
    p.part[0] = rotate_piece<K>(p.part[0]);
  }
  return p.whole;
}

template <int K, class V>
TCPU_INLINE V shift_lanes(V v) {
#if defined(__clang__)
#define TCPU_FROM(I) ((I) - K + 32) % 32
  return __builtin_shufflevector(v, v, TCPU_FROM(0), TCPU_FROM(1), TCPU_FROM(2), TCPU_FROM(3), TCPU_FROM(4),
                                 TCPU_FROM(5), TCPU_FROM(6), TCPU_FROM(7), TCPU_FROM(8), TCPU_FROM(9), TCPU_FROM(10),
                                 TCPU_FROM(11), TCPU_FROM(12), TCPU_FROM(13), TCPU_FROM(14), TCPU_FROM(15));
#undef TCPU_FROM
#else
  using S = signed_of<element_t<V>>;
  return __builtin_shuffle(v, iota<S>() - (S)K);
#endif
}

template <class V, class Fn>
TCPU_INLINE element_t<V> reduce(V v, Fn fn) {
  v = fn(v, shift_down<8>(v));
  v = fn(v, shift_down<4>(v));
  v = fn(v, shift_down<2>(v));
  v = fn(v, shift_down<1>(v));
  return v[0];
}

template <class V>
TCPU_INLINE element_t<V> sum(V v) {
  return reduce(v, [](V a, V b) { return a + b; });
}

template <class V>
TCPU_INLINE element_t<V> maximum_lane(V v) {
  if constexpr (is_float<V>) {
    return reduce(v, [](V a, V b) { return maxnum(a, b); });
  } else {
    return reduce(v, [](V a, V b) { return max(a, b); });
  }
}

template <class V>
TCPU_INLINE element_t<V> minimum_lane(V v) {
  if constexpr (is_float<V>) {
    return reduce(v, [](V a, V b) { return minnum(a, b); });
  } else {
    return reduce(v, [](V a, V b) { return min(a, b); });
  }
}

TCPU_INLINE bool any(mask m) {
  return movemask(m) != 0;
}
TCPU_INLINE bool all(mask m) {
  return movemask(m) == 0xffffu;
}

}  // namespace tcpu
