// What generated kernels call beside the other headers: arguments, scalars, comparisons with a predicate's own name.
#pragma once

#include <algorithm>
#include <limits>

#include "runtime.h"

namespace tcpu {

// One 8-byte slot of a launch.
template <class T>
TCPU_INLINE T argument(uint64_t slot) {
  if constexpr (std::is_same_v<T, float>) {
    return bitcast<float>((uint32_t)slot);
  } else if constexpr (std::is_same_v<T, double>) {
    return bitcast<double>(slot);
  } else {
    return (T)slot;
  }
}

// One element for all lanes that `bits` names.
template <class T>
TCPU_INLINE vec<reg_t<T>> load_same(const T* p, uint32_t bits, vec<reg_t<T>> other) {
  return bits == 0 ? other : select(frommask(bits), splat(load_scalar(p)), other);
}

// A scalar into a buffer or a variable; a mask's lane is 0 or -1 in memory.
template <class T, class X>
TCPU_INLINE void put(T* p, X x) {
  if constexpr (std::is_same_v<T, bool>) {
    *p = (bool)x;
  } else if constexpr (std::is_same_v<X, bool>) {
    *p = (T) - (int32_t)x;
  } else {
    store_scalar(p, x);
  }
}

template <class T, class V>
TCPU_INLINE void lanes_of(T* lanes, V v) {
  for (int i = 0; i < LANES; ++i) {
    lanes[i] = (T)(v[i] != 0 || !std::is_same_v<T, bool> ? v[i] : 0);
  }
}

// c [M, N] += a [M, K] b [K, N], each contiguous; a transposed operand lies in memory with its axes exchanged.
template <int M, int N, int K, bool A_TRANSPOSED, bool B_TRANSPOSED, class C, class A, class B>
TCPU_INLINE void dot(C* c, const A* a, const B* b) {
  constexpr int64_t lda = A_TRANSPOSED ? M : K, ldb = B_TRANSPOSED ? K : N;
  if constexpr (std::is_same_v<C, int32_t>) {
    dot_i32(c, N, a, lda, A_TRANSPOSED, b, ldb, B_TRANSPOSED, M, N, K);
  } else if constexpr (std::is_same_v<C, double>) {
    dot_f64(c, N, a, lda, A_TRANSPOSED, b, ldb, B_TRANSPOSED, M, N, K);
  } else {
    dot_f32(c, N, a, lda, A_TRANSPOSED, b, ldb, B_TRANSPOSED, M, N, K);
  }
}

#define TCPU_SCALAR_COMPARE(NAME, CONDITION)  \
  TCPU_INLINE bool NAME(float x, float y) {   \
    return CONDITION;                         \
  }                                           \
  TCPU_INLINE bool NAME(double x, double y) { \
    return CONDITION;                         \
  }
TCPU_SCALAR_COMPARE(is_oeq, x == y)
TCPU_SCALAR_COMPARE(is_olt, x < y)
TCPU_SCALAR_COMPARE(is_ole, x <= y)
TCPU_SCALAR_COMPARE(is_ogt, x > y)
TCPU_SCALAR_COMPARE(is_oge, x >= y)
TCPU_SCALAR_COMPARE(is_one, x < y || x > y)
TCPU_SCALAR_COMPARE(is_ord, x == x && y == y)
TCPU_SCALAR_COMPARE(is_ueq, !(x < y || x > y))
TCPU_SCALAR_COMPARE(is_ult, !(x >= y))
TCPU_SCALAR_COMPARE(is_ule, !(x > y))
TCPU_SCALAR_COMPARE(is_ugt, !(x <= y))
TCPU_SCALAR_COMPARE(is_uge, !(x < y))
TCPU_SCALAR_COMPARE(is_une, x != y)
TCPU_SCALAR_COMPARE(is_uno, x != x || y != y)
#undef TCPU_SCALAR_COMPARE

}  // namespace tcpu
