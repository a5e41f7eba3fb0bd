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
template <class T, class Mask>
TCPU_INLINE vec<reg_t<T>> load_same(const T* p, Mask where, vec<reg_t<T>> other) {
  const uint32_t bits = to_bits(where);
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

// From memory to memory as it is; zero where nothing is read.
template <class T>
TCPU_INLINE void copy(T* to, const T* from) {
  store_bits<stored_t<T>>(to, load_bits<stored_t<T>>(from));
}
template <class T, class Mask>
TCPU_INLINE void copy_masked(T* to, const T* from, Mask where) {
  if constexpr (std::is_same_v<Mask, all_lanes>) {
    copy(to, from);
  } else {
    store_bits<stored_t<T>>(to, load_bits_masked<stored_t<T>>(from, to_bits(where), vec<stored_t<T>>{}));
  }
}

// Where to read N elements of which `count` exist, while N are written to `to` in the same order: `from`, unless some
// would be overwritten before they are read; then a copy.
template <int64_t N, class T, class S>
TCPU_INLINE const T* source(T* buffer, const T* from, int64_t count, const S* to) {
  const auto read = (uintptr_t)from, written = (uintptr_t)to;
  const bool apart = read + N * sizeof(T) <= written || written + N * sizeof(S) <= read;
  if (apart || (read == written && sizeof(T) == sizeof(S))) {
    return from;
  }
  if (count > 0) {
    memcpy(buffer, from, std::min(count, N) * sizeof(T));
  }
  return buffer;
}

// Leaves a buffer's values in memory: GCC would keep them in registers and take single lanes out of them at some expense.
TCPU_INLINE void settle(const void* buffer) {
  asm volatile("" : : "r"(buffer) : "memory");
}

// The rows of an operand, which lie anywhere, and how many elements of each exist; the others are zero.
template <class T, int ROWS, int COLUMNS>
struct row_table {
  using operand = table<T>;
  const T* row[ROWS];
  int64_t count[ROWS];
  T copies[ROWS * COLUMNS];

  TCPU_MEMBER void set(int32_t i, const T* first, int64_t elements) {
    row[i] = first;
    count[i] = elements < 0 ? 0 : elements > COLUMNS ? COLUMNS : elements;
  }
  // Asks for the rows, as far as they fit the first-level cache.
  TCPU_MEMBER void fetch() const {
    if constexpr (sizeof(T) * ROWS * COLUMNS <= 32768) {
      for (int i = 0; i < ROWS; ++i) {
        for (int64_t j = 0; j < count[i]; j += 64 / sizeof(T)) {
          __builtin_prefetch(row[i] + j, 0, 2);
        }
      }
    }
  }
  TCPU_MEMBER int64_t columns() const {
    int64_t most = 0;
    for (int i = 0; i < ROWS; ++i) {
      most = count[i] > most ? count[i] : most;
    }
    return most;
  }
  // So many columns can be read afterwards.
  TCPU_MEMBER table<T> with_columns(int64_t columns) {
    alignas(64) static const T zeros[COLUMNS] = {};
    for (int i = 0; i < ROWS; ++i) {
      if (count[i] == 0) {
        row[i] = zeros;
      } else if (count[i] < columns) {
        T* copy = copies + i * COLUMNS;
        memcpy(copy, row[i], count[i] * sizeof(T));
        memset(copy + count[i], 0, (columns - count[i]) * sizeof(T));
        row[i] = copy;
      }
    }
    return {row};
  }
};

template <class T>
TCPU_INLINE int64_t columns_of(const plain<T>& operand) {
  return operand.stride;
}
template <class Table>
TCPU_INLINE int64_t columns_of(const Table& operand) {
  return operand.columns();
}
template <class T>
TCPU_INLINE plain<T> with_columns(const plain<T>& operand, int64_t) {
  return operand;
}
template <class Table>
TCPU_INLINE typename Table::operand with_columns(Table& operand, int64_t columns) {
  return operand.with_columns(columns);
}

// c [M, N] += a [M, K] b [K, N]; c contiguous, a and b a `plain` tile or a `row_table`. A transposed operand lies in
// memory with its axes exchanged.
template <int M, int N, int K, bool A_TRANSPOSED, bool B_TRANSPOSED, class C, class A, class B>
TCPU_INLINE void dot(C* c, A&& a, B&& b) {
  const int64_t b_columns = columns_of(b);
  int64_t depth = A_TRANSPOSED ? K : columns_of(a);
  if (B_TRANSPOSED && b_columns > depth) {
    depth = b_columns;
  }
  if (!B_TRANSPOSED && depth < K) {
    depth = K;
  }
  const int64_t columns = B_TRANSPOSED ? N : b_columns;
  dot_any<M, N>(c, N, with_columns(a, depth), A_TRANSPOSED, with_columns(b, B_TRANSPOSED ? depth : columns),
                B_TRANSPOSED, M, N, depth, columns);
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
