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
  // Up to the last one that has elements.
  TCPU_MEMBER int64_t rows() const {
    int64_t used = ROWS;
    while (used > 0 && count[used - 1] == 0) {
      --used;
    }
    return used;
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

// Rows that have to be multiplied, of SIZE: whole blocks, so that no code for parts of them is needed.
template <int SIZE, int BLOCK, class T>
TCPU_INLINE int64_t rows_in_use(const plain<T>&) {
  return SIZE;
}
template <int SIZE, int BLOCK, class Table>
TCPU_INLINE int64_t rows_in_use(const Table& operand) {
  return SIZE % BLOCK == 0 ? (operand.rows() + BLOCK - 1) / BLOCK * BLOCK : SIZE;
}

// The bits that only NaN and infinity have all of.
template <class T>
constexpr auto not_finite() {
  if constexpr (std::is_same_v<T, double>) {
    return (uint64_t)0x7ff0000000000000;
  } else if constexpr (std::is_same_v<T, float>) {
    return (uint32_t)0x7f800000;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return (uint16_t)0x7f80;
  } else if constexpr (std::is_same_v<T, f16>) {
    return (uint16_t)0x7c00;
  } else {
    return (uint8_t)(std::is_same_v<T, f8e5m2> ? 0x7c : 0x7f);
  }
}

// Whether zeros times a row of an operand, or times a column where it is transposed, are NaN.
template <bool IS_COLUMN, class Operand>
static bool spoils_zeros(Operand operand, int64_t number, int64_t depth) {
  using T = typename Operand::type;
  constexpr auto MASK = not_finite<T>();
  auto largest = (decltype(not_finite<T>()))0;
  const T* row = IS_COLUMN ? nullptr : operand.row(number);
  for (int64_t k = 0; k < depth; ++k) {
    auto bits = largest;
    memcpy(&bits, IS_COLUMN ? operand.row(k) + number : row + k, sizeof bits);
    bits &= MASK;
    largest = bits > largest ? bits : largest;
  }
  return largest == MASK;
}

// The same for each of the columns of an operand that is not transposed, row by row, as they lie in memory.
template <int COLUMNS, class Operand>
static void find_spoilt_columns(bool* spoilt, Operand operand, int64_t depth, int64_t columns) {
  using T = typename Operand::type;
  constexpr auto MASK = not_finite<T>();
  std::remove_const_t<decltype(MASK)> largest[COLUMNS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const T* row = operand.row(k);
    for (int64_t j = 0; j < columns; ++j) {
      auto bits = largest[j];
      memcpy(&bits, row + j, sizeof bits);
      bits &= MASK;
      largest[j] = bits > largest[j] ? bits : largest[j];
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    spoilt[j] = largest[j] == MASK;
  }
}

// What zeros make of the rows of c from m on and of its columns from n on: NaN where they meet an infinity or a NaN.
template <int N, bool A_TRANSPOSED, bool B_TRANSPOSED, class C, class Left, class Right>
static void spread_nan(C* c, Left left, Right right, int64_t m, int64_t rows, int64_t n, int64_t depth,
                       int64_t columns) {
  constexpr int64_t ldc = N;
  bool spoilt[N];
  if (!B_TRANSPOSED && m < rows) {
    find_spoilt_columns<N>(spoilt, right, depth, columns);
  }
  for (int64_t j = 0; m < rows && j < columns; ++j) {
    const bool spoils = B_TRANSPOSED ? spoils_zeros<false>(right, j, depth) : spoilt[j];
    for (int64_t i = spoils ? m : rows; i < rows; ++i) {
      c[i * ldc + j] = C(__builtin_nan(""));
    }
  }
  for (int64_t i = 0; n < ldc && i < m; ++i) {
    for (int64_t j = spoils_zeros<A_TRANSPOSED>(left, i, depth) ? n : ldc; j < ldc; ++j) {
      c[i * ldc + j] = C(__builtin_nan(""));
    }
  }
}

// Of panels, all columns at once.
template <int, bool A_TRANSPOSED, bool B_TRANSPOSED, class Left, class A, class B, int K, int N>
static void spread_nan(float* c, Left, packed<A, B, K, N> right, int64_t m, int64_t rows, int64_t, int64_t, int64_t) {
  constexpr int WIDTH = PANEL<typename packed<A, B, K, N>::format>;
  constexpr uint32_t MASKS[] = {0x7f800000u, packed<A, B, K, N>::format::STEP == 2 ? 0x7f80u : 0x7f800000u};
  for (int64_t column = 0; column < N; column += WIDTH) {
    const auto* panel = right.panel(0, column);
    uint32_t spoils[WIDTH] = {};
    for (int64_t i = 0; i < right.ROWS; ++i) {
      for (int j = 0; j < WIDTH; ++j) {
        const uint32_t bits = bitcast<uint32_t>(panel[i * WIDTH + j]);
        spoils[j] |= (bits & MASKS[0]) == MASKS[0] || (bits & MASKS[1]) == MASKS[1];
      }
    }
    for (int64_t i = m; i < rows; ++i) {
      for (int j = 0; j < WIDTH; ++j) {
        c[i * N + column + j] = spoils[j] ? __builtin_nanf("") : c[i * N + column + j];
      }
    }
  }
}

// c [M, N] += a [M, K] b [K, N]; c contiguous, a and b a `plain` tile or a `row_table`, or b `panels`. A transposed
// operand lies in memory with its axes exchanged. Rows of a tile's end that do not exist are zeros, whose products are
// not computed: they are zero, or NaN where an infinity or a NaN meets them.
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
  const auto left = with_columns(a, depth);
  const auto right = with_columns(b, B_TRANSPOSED ? depth : columns);
  using Left = std::remove_const_t<decltype(left)>;
  using Right = std::remove_const_t<decltype(right)>;
  using Format = typename choose_format<typename Left::type, typename Right::type, C>::type;
  if constexpr (!A_TRANSPOSED && takes_few_rows<Left, Right, M>) {
    multiply_few<M>(c, N, left, right);
    return;
  }
  const int64_t m = A_TRANSPOSED ? M : rows_in_use<M, rows_at_a_time(M, DOT_ROWS)>(a);
  const int64_t n = B_TRANSPOSED ? rows_in_use<N, PANEL<Format>>(b) : N;
  dot_any<M, N>(c, N, left, A_TRANSPOSED, right, B_TRANSPOSED, m, n, depth, B_TRANSPOSED ? n : columns);
  if (!std::is_integral_v<C> && (m < M || n < N)) {
    spread_nan<N, A_TRANSPOSED, B_TRANSPOSED>(c, left, right, m, M, n, depth, columns);
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
