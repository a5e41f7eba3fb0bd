// Matrix products that accumulate: C[m, n] += sum over k of A[m, k] * B[k, n], any sizes >= 0.
//
//   dot_f32(c, ldc, a, lda, a_transposed, b, ldb, b_transposed, m, n, k)
//       A and B of the same or different types among float, bf16, f16, f8e4m3, f8e5m2; C float
//   dot_f64(...)   double throughout        dot_i32(...)   int8_t operands, int32_t sums that wrap
//
// C is row-major [m, n]. A is row-major [m, k], or [k, m] if transposed; B is [k, n], or [n, k] if transposed, which is
// the layout of a linear layer's weight and of keys. lda, ldb, ldc: from one row in memory to the next, in elements.
// C must not overlap A or B. NaN and infinity follow IEEE: nothing is skipped because a factor is zero.
//
// Few rows with B as [n, k]: products along K, nothing packed. Otherwise panels of B are packed (dot_formats.h) and
// multiplied by blocks of rows held in registers.
//
// Operands are matrices in memory, `plain` or a `table` of rows that lie anywhere; both have row(i), and from(i, j), the
// same without its first rows and columns. B may also be `packed` already (panels.h), not transposed.
#pragma once

#include <algorithm>

#include "panels.h"

namespace tcpu {

template <class T>
struct plain {
  using type = T;
  const T* first;
  int64_t stride;

  const T* row(int64_t i) const {
    return first + i * stride;
  }
  plain from(int64_t i, int64_t j) const {
    return {first + i * stride + j, stride};
  }
};

template <class T>
struct table {
  using type = T;
  const T* const* rows;
  int64_t column = 0;

  const T* row(int64_t i) const {
    return rows[i] + column;
  }
  table from(int64_t i, int64_t j) const {
    return {rows + i, column + j};
  }
};

// Elements of K and rows of A packed at a time: a panel of B takes 16 KiB, half of the first-level cache.
constexpr int64_t DOT_CHUNK = 128;
constexpr int64_t DOT_CHUNK_ROWS = 256;

// Up to so many rows, products along K beat packing: fewer of int8, whose products are fast, and of what is converted,
// since that happens anew for each block (32 rows of f16 by 3072 x 576, AVX-512: 2276 us along K, 1279 packed).
template <class Format, class A>
constexpr int64_t DOT_ROWS_ALONG_K = !Format::template reads_in_place<A> ? 4 : sizeof(A) == 1 ? 16 : 32;

// M and N below are the sizes where they are constants, else 0: what only other sizes need is then not compiled.
// Rows at a time: a power of two up to `most`, and no more than there are.
constexpr int rows_at_a_time(int m, int most) {
  return m == 0 || m >= most ? most : rows_at_a_time(m, most / 2);
}

// Into the second-level cache.
template <class T>
TCPU_INLINE void fetch(const T* values, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(T)) {
    __builtin_prefetch(values + i, 0, 2);
  }
}

// ROWS rows of A as elements, times one panel, added to C's first `columns` columns; IS_WHOLE: those are all.
template <class Format, int ROWS, bool IS_WHOLE, class A>
static void multiply_panel(typename Format::accumulator* c, int64_t ldc, A a, const typename Format::element* panel,
                           int64_t steps, int64_t columns) {
  using E = typename Format::element;
  using S = typename Format::accumulator;
  constexpr int WIDTH = TCPU_REGISTER_BYTES / sizeof(S);
  constexpr int COUNT = PANEL<Format> / WIDTH;
  const char* rows[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = (const char*)a.row(i);
  }
  piece<S> sums[ROWS][COUNT];
  for (auto& row : sums) {
    for (auto& sum : row) {
      sum = piece<S>{};
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    piece<E> b[COUNT];
    for (int j = 0; j < COUNT; ++j) {
      memcpy(&b[j], panel + step * PANEL<Format> + j * WIDTH, sizeof b[j]);
    }
    for (int i = 0; i < ROWS; ++i) {
      E element;
      memcpy(&element, rows[i] + step * (int64_t)sizeof element, sizeof element);
      const piece<E> broadcast = splat_piece(element);
      for (int j = 0; j < COUNT; ++j) {
        sums[i][j] = Format::multiply(sums[i][j], broadcast, b[j]);
      }
    }
  }
  for (int i = 0; i < ROWS; ++i) {
    S* row = c + i * ldc;
    if (IS_WHOLE || columns == PANEL<Format>) {
      for (int j = 0; j < COUNT; ++j) {
        piece<S> old;
        memcpy(&old, row + j * WIDTH, sizeof old);
        old += sums[i][j];
        memcpy(row + j * WIDTH, &old, sizeof old);
      }
    } else if constexpr (!IS_WHOLE) {
      S lanes[PANEL<Format>];
      memcpy(lanes, sums[i], sizeof lanes);
      for (int64_t j = 0; j < columns; ++j) {
        row[j] += lanes[j];
      }
    }
  }
}

// Rows from `first` on, ROWS at a time; before(i, ROWS) runs before the rows from i on.
template <class Format, int ROWS, int M, bool IS_WHOLE, class A, class Before>
TCPU_INLINE void multiply_rows(typename Format::accumulator* c, int64_t ldc, A a,
                               const typename Format::element* panel, int64_t steps, int64_t columns, int64_t first,
                               int64_t rows, Before before) {
  int64_t i = first;
  for (; i + ROWS <= rows; i += ROWS) {
    before(i, ROWS);
    multiply_panel<Format, ROWS, IS_WHOLE>(c + i * ldc, ldc, a.from(i, 0), panel, steps, columns);
  }
  if constexpr (ROWS > 1 && (M == 0 || M % ROWS != 0)) {
    multiply_rows<Format, ROWS / 2, M, IS_WHOLE>(c, ldc, a, panel, steps, columns, i, rows, before);
  }
}

// Rows of A as elements, [rows][DOT_CHUNK].
template <class Format, class Operand>
static void pack_rows(typename Format::element* out, Operand operand, bool transposed, int64_t rows, int64_t k) {
  using E = typename Format::element;
  if (!transposed) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
        store_bits<E>(out + i * DOT_CHUNK + k0 / Format::STEP, Format::along_k(operand.row(i) + k0, k - k0));
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k0 = 0; k0 < k; k0 += Format::STEP) {
      E element = {};
      if constexpr (Format::STEP == 1) {
        element = convert<typename Operand::type, E>(load_scalar(operand.row(k0) + i));
      } else {
        for (int j = 0; j < Format::STEP && j < k - k0; ++j) {
          element |= Format::scalar(operand.row(k0 + j) + i) << (32 / Format::STEP * j);
        }
      }
      out[i * DOT_CHUNK + k0 / Format::STEP] = element;
    }
  }
}

template <class Format, bool IS_WHOLE, class Operand>
TCPU_INLINE void pack_panel(typename Format::element* panel, Operand b, bool transposed, int64_t columns, int64_t k) {
  if (transposed) {
    for (int64_t j = 0; j < PANEL<Format>; j += LANES) {
      const int64_t left = columns > j ? columns - j : 0;
      pack_columns_along_k<Format, IS_WHOLE>(panel + j, PANEL<Format>, b.from(left ? j : 0, 0), left, k);
    }
  } else {
    for (int64_t k0 = 0; k0 < k; k0 += Format::STEP) {
      pack_across_columns<Format>(panel + k0 / Format::STEP * PANEL<Format>, b.from(k0, 0), columns, k - k0);
    }
  }
}

template <class Format, int M, int N, class A, class B>
static void dot_packed(typename Format::accumulator* c, int64_t ldc, A a, bool a_transposed, B b, bool b_transposed,
                       int64_t m, int64_t n, int64_t k, int64_t b_columns) {
  using E = typename Format::element;
  using Storage = typename A::type;
  constexpr int64_t CHUNK_K = DOT_CHUNK * Format::STEP;
  constexpr int ROWS = rows_at_a_time(M, DOT_ROWS);
  constexpr bool IS_WHOLE = N > 0 && N % PANEL<Format> == 0;
  alignas(64) E space[is_packed<B> ? 1 : DOT_CHUNK * PANEL<Format>];
  alignas(64) E packed_a[DOT_CHUNK_ROWS * DOT_CHUNK];
  // Rows so far apart would share few sets of the first-level cache.
  const bool collides = m > 1 && !a_transposed && ((uintptr_t)a.row(1) - (uintptr_t)a.row(0)) % 2048 == 0;
  for (int64_t k0 = 0; k0 < k; k0 += CHUNK_K) {
    const int64_t chunk = k - k0 < CHUNK_K ? k - k0 : CHUNK_K;
    const int64_t steps = (chunk + Format::STEP - 1) / Format::STEP;
    // A group of values along K is one element in memory only if they are neighbours and the group is whole.
    const bool in_place =
        Format::template reads_in_place<Storage> && !a_transposed && !collides && chunk % Format::STEP == 0;
    for (int64_t m0 = 0; m0 < m; m0 += DOT_CHUNK_ROWS) {
      const int64_t rows = m - m0 < DOT_CHUNK_ROWS ? m - m0 : DOT_CHUNK_ROWS;
      const A a_chunk = a_transposed ? a.from(k0, m0) : a.from(m0, k0);
      for (int64_t n0 = 0; n0 < n; n0 += PANEL<Format>) {
        const auto within = [=](int64_t columns) { return columns - n0 < PANEL<Format> ? columns - n0 : PANEL<Format>; };
        const int64_t existing = b_columns > n0 ? within(b_columns) : 0;
        const E* panel = space;
        if constexpr (is_packed<B>) {
          panel = b.panel(k0, n0);
        } else {
          const B to_pack = b_transposed ? b.from(n0, k0) : b.from(k0, existing ? n0 : 0);
          pack_panel<Format, IS_WHOLE>(space, to_pack, b_transposed, existing, chunk);
        }
        // While rows are multiplied, what is packed next comes into the cache: rows of A, and columns of the next panel.
        const int64_t next = n0 + PANEL<Format> < b_columns ? n0 + PANEL<Format> : 0;
        const auto before = [&](int64_t row, int count) TCPU_BODY {
          if (!in_place && n0 == 0) {
            const A here = a_transposed ? a_chunk.from(0, row) : a_chunk.from(row, 0);
            pack_rows<Format>(packed_a + row * DOT_CHUNK, here, a_transposed, count, chunk);
            for (int64_t i = row + count; !a_transposed && i < row + 2 * count && i < rows; ++i) {
              fetch(a_chunk.row(i), chunk);
            }
          }
          if constexpr (!is_packed<B>) {
            if (b_transposed && m0 == 0) {
              const int64_t upcoming = within(b_columns - next + n0);
              for (int64_t j = row * upcoming / rows; j < (row + count) * upcoming / rows; ++j) {
                fetch(b.row(next + j) + k0 + (next ? 0 : CHUNK_K), chunk);
              }
            }
          }
        };
        auto* to = c + m0 * ldc + n0;
        if (!in_place) {
          const plain<E> packed{packed_a, DOT_CHUNK};
          multiply_rows<Format, ROWS, M, IS_WHOLE>(to, ldc, packed, panel, steps, within(n), 0, rows, before);
        } else if constexpr (Format::template reads_in_place<Storage>) {
          multiply_rows<Format, ROWS, M, IS_WHOLE>(to, ldc, a_chunk, panel, steps, within(n), 0, rows, before);
        }
      }
    }
  }
}

#if defined(TCPU_AVX512)
// The sums of four vectors: lanes are exchanged and added until each group of four lanes holds all four sums.
template <class V>
TCPU_INLINE piece<element_t<V>, 16> four_sums(V v0, V v1, V v2, V v3) {
  using words = __m512i;
  using floats = __m512;
  const V pair01 = (V)_mm512_unpacklo_epi32((words)v0, (words)v1) + (V)_mm512_unpackhi_epi32((words)v0, (words)v1);
  const V pair23 = (V)_mm512_unpacklo_epi32((words)v2, (words)v3) + (V)_mm512_unpackhi_epi32((words)v2, (words)v3);
  const V low = (V)_mm512_unpacklo_epi64((words)pair01, (words)pair23);
  const V all = low + (V)_mm512_unpackhi_epi64((words)pair01, (words)pair23);
  const V half = all + (V)_mm512_shuffle_f32x4((floats)all, (floats)all, 0x4e);
  const V whole = half + (V)_mm512_shuffle_f32x4((floats)half, (floats)half, 0xb1);
  return (piece<element_t<V>, 16>)_mm512_castps512_ps128((floats)whole);
}
#endif

// c[ROWS][COLUMNS] += the sums of the vectors' lanes.
template <int ROWS, int COLUMNS, class Sum, class Sums>
TCPU_INLINE void add_sums(Sum* c, int64_t ldc, const Sums (&sums)[ROWS][COLUMNS]) {
#if defined(TCPU_AVX512)
  if constexpr (sizeof(Sum) == 4 && COLUMNS == 4) {
    for (int i = 0; i < ROWS; ++i) {
      const auto& row = sums[i];
      auto four = four_sums(row[0].whole, row[1].whole, row[2].whole, row[3].whole);
      decltype(four) old;
      memcpy(&old, c + i * ldc, sizeof old);
      four += old;
      memcpy(c + i * ldc, &four, sizeof four);
    }
    return;
  }
#endif
  for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < COLUMNS; ++j) {
      c[i * ldc + j] += sum(sums[i][j].whole);
    }
  }
}

// c[ROWS][COLUMNS] += products of rows of A and B, all contiguous along K. next: rows of B that are read two blocks later,
// fetched into the second-level cache: the first level's few outstanding lines would bound the bandwidth.
template <class Format, int ROWS, int COLUMNS, class A, class B>
TCPU_INLINE void block_along_k(typename Format::accumulator* c, int64_t ldc, A a, B b,
                               const typename B::type* const (&next)[COLUMNS], int64_t k) {
  using Sums = pieces<vec<typename Format::accumulator>>;
  const typename A::type* a_rows[ROWS];
  const typename B::type* b_rows[COLUMNS];
  for (int i = 0; i < ROWS; ++i) {
    a_rows[i] = a.row(i);
  }
  for (int j = 0; j < COLUMNS; ++j) {
    b_rows[j] = b.row(j);
  }
  // A single loop with a masked last step: GCC keeps the sums in registers only if no second loop changes them.
  Sums sums[ROWS][COLUMNS] = {};
  for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
    pieces<vec<typename Format::element>> x, y[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) {
      y[j].whole = as_right<Format>(Format::along_k(b_rows[j] + k0, k - k0));
      __builtin_prefetch(next[j] + k0, 0, 2);
    }
    for (int i = 0; i < ROWS; ++i) {
      x.whole = Format::along_k(a_rows[i] + k0, k - k0);
      for (int j = 0; j < COLUMNS; ++j) {
        for (int p = 0; p < Sums::COUNT; ++p) {
          sums[i][j].part[p] = Format::multiply(sums[i][j].part[p], x.part[p], y[j].part[p]);
        }
      }
    }
  }
  add_sums(c, ldc, sums);
}

// ROWS of A at a time, then half as many, down to one.
template <class Format, int ROWS, int COLUMNS, int M, class A, class B>
TCPU_INLINE void rows_along_k(typename Format::accumulator* c, int64_t ldc, A a, B b,
                              const typename B::type* const (&next)[COLUMNS], int64_t m, int64_t k) {
  int64_t i = 0;
  for (; i + ROWS <= m; i += ROWS) {
    block_along_k<Format, ROWS, COLUMNS>(c + i * ldc, ldc, a.from(i, 0), b, next, k);
  }
  if constexpr (ROWS > 1 && (M == 0 || M % ROWS != 0)) {
    rows_along_k<Format, ROWS / 2, COLUMNS, M>(c + i * ldc, ldc, a.from(i, 0), b, next, m - i, k);
  }
}

// Columns outside, rows inside: B is read from far memory once.
template <class Format, int ROWS, int COLUMNS, int M, int N, class A, class B>
static void dot_along_k(typename Format::accumulator* c, int64_t ldc, A a, B b, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t AHEAD = 2 * COLUMNS;
  // Behind the last row follows, as far as one can guess, what the next program reads.
  const int64_t spacing = n > 1 ? (int64_t)((uintptr_t)b.row(1) - (uintptr_t)b.row(0)) : 0;
  // Several blocks of rows find B in the first-level cache.
  const int64_t chunk = m > ROWS ? 4096 / (int64_t)sizeof(typename B::type) : k;
  int64_t j = 0;
  for (; j + COLUMNS <= n; j += COLUMNS) {
    const typename B::type* next[COLUMNS];
    for (int i = 0; i < COLUMNS; ++i) {
      const auto beyond = (const typename B::type*)((uintptr_t)b.row(j + i) + AHEAD * spacing);
      next[i] = j + AHEAD + i < n ? b.row(j + AHEAD + i) : beyond;
    }
    for (int64_t k0 = 0; k0 < k; k0 += chunk) {
      rows_along_k<Format, ROWS, COLUMNS, M>(c + j, ldc, a.from(0, k0), b.from(j, k0), next, m, std::min(chunk, k - k0));
      for (auto& row : next) {
        row += chunk;
      }
    }
  }
  if constexpr (N == 0 || N % COLUMNS != 0) {
    for (; j < n; ++j) {
      const typename B::type* const next[1] = {b.row(j)};
      rows_along_k<Format, 1, 1, M>(c + j, ldc, a, b.from(j, 0), next, m, k);
    }
  }
}

// b_columns: how many of B's n columns exist, the first; the others are zero. All do where B is transposed.
template <int M, int N, class Sum, class A, class B>
TCPU_INLINE void dot_any(Sum* c, int64_t ldc, A a, bool a_transposed, B b, bool b_transposed, int64_t m, int64_t n,
                         int64_t k, int64_t b_columns) {
  using Format = typename choose_format<typename A::type, typename B::type, Sum>::type;
  constexpr int64_t MOST = DOT_ROWS_ALONG_K<Format, typename A::type>;
  if constexpr (Format::STEP == 4) {
    take_off_row_sums<Format>(c, ldc, a, a_transposed, m, n, k);
  }
  if constexpr (M <= MOST && !is_packed<B>) {
    if (b_transposed && !a_transposed && m <= MOST) {
      constexpr int ROWS = rows_at_a_time(M, DOT_BLOCK_ALONG_K);
      if (m == 1) {
        dot_along_k<Format, 1, 4, M, N>(c, ldc, a, b, m, n, k);
      } else {
        dot_along_k<Format, ROWS, DOT_BLOCK_ALONG_K, M, N>(c, ldc, a, b, m, n, k);
      }
      return;
    }
  }
  dot_packed<Format, M, N>(c, ldc, a, a_transposed, b, b_transposed, m, n, k, b_columns);
}

template <class A, class B>
TCPU_INLINE void dot_f32(float* c, int64_t ldc, const A* a, int64_t lda, bool a_transposed, const B* b, int64_t ldb,
                         bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<0, 0>(c, ldc, plain<A>{a, lda}, a_transposed, plain<B>{b, ldb}, b_transposed, m, n, k, n);
}

TCPU_INLINE void dot_f64(double* c, int64_t ldc, const double* a, int64_t lda, bool a_transposed, const double* b,
                         int64_t ldb, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<0, 0>(c, ldc, plain<double>{a, lda}, a_transposed, plain<double>{b, ldb}, b_transposed, m, n, k, n);
}

TCPU_INLINE void dot_i32(int32_t* c, int64_t ldc, const int8_t* a, int64_t lda, bool a_transposed, const int8_t* b,
                         int64_t ldb, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<0, 0>(c, ldc, plain<int8_t>{a, lda}, a_transposed, plain<int8_t>{b, ldb}, b_transposed, m, n, k, n);
}

}  // namespace tcpu
