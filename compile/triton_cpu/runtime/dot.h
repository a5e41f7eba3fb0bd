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
#pragma once

#include "dot_formats.h"

namespace tcpu {

// Elements of K and rows of A packed at a time: a panel of B takes 16 KiB, half of the first-level cache.
constexpr int64_t DOT_CHUNK = 128;
constexpr int64_t DOT_CHUNK_ROWS = 64;

// Up to so many rows, products along K beat packing (measured at K = 64 and 576, bf16).
constexpr int64_t DOT_ROWS_ALONG_K = 3;

// ROWS rows of A, strides in bytes, times one panel, added to C's first `columns` columns.
template <class Format, int ROWS>
static void multiply_panel(typename Format::accumulator* c, int64_t ldc, const char* a, int64_t a_row, int64_t a_step,
                           const typename Format::element* panel, const typename Format::accumulator* start,
                           int64_t steps, int64_t columns) {
  using E = typename Format::element;
  using S = typename Format::accumulator;
  constexpr int WIDTH = TCPU_REGISTER_BYTES / sizeof(S);
  constexpr int COUNT = PANEL<Format> / WIDTH;
  piece<S> sums[ROWS][COUNT];
  for (int j = 0; j < COUNT; ++j) {
    memcpy(&sums[0][j], start + j * WIDTH, sizeof(piece<S>));
    for (int i = 1; i < ROWS; ++i) {
      sums[i][j] = sums[0][j];
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    piece<E> b[COUNT];
    memcpy(b, panel + step * PANEL<Format>, sizeof b);
    for (int i = 0; i < ROWS; ++i) {
      E element;
      memcpy(&element, a + i * a_row + step * a_step, sizeof element);
      const piece<E> broadcast = splat_piece(element);
      for (int j = 0; j < COUNT; ++j) {
        sums[i][j] = Format::multiply(sums[i][j], broadcast, b[j]);
      }
    }
  }
  for (int i = 0; i < ROWS; ++i) {
    S* row = c + i * ldc;
    if (columns == PANEL<Format>) {
      for (int j = 0; j < COUNT; ++j) {
        piece<S> old;
        memcpy(&old, row + j * WIDTH, sizeof old);
        old += sums[i][j];
        memcpy(row + j * WIDTH, &old, sizeof old);
      }
    } else {
      S lanes[PANEL<Format>];
      memcpy(lanes, sums[i], sizeof lanes);
      for (int64_t j = 0; j < columns; ++j) {
        row[j] += lanes[j];
      }
    }
  }
}

template <class Format, int ROWS>
TCPU_INLINE void multiply_rows(typename Format::accumulator* c, int64_t ldc, const char* a, int64_t a_row,
                               int64_t a_step, const typename Format::element* panel,
                               const typename Format::accumulator* start, int64_t steps, int64_t columns,
                               int64_t rows) {
  for (; rows >= ROWS; rows -= ROWS, c += ROWS * ldc, a += ROWS * a_row) {
    multiply_panel<Format, ROWS>(c, ldc, a, a_row, a_step, panel, start, steps, columns);
  }
  if constexpr (ROWS > 1) {
    multiply_rows<Format, ROWS / 2>(c, ldc, a, a_row, a_step, panel, start, steps, columns, rows);
  }
}

// Rows of A as elements, [rows][DOT_CHUNK].
template <class Format, class A>
static void pack_rows(typename Format::element* out, const A* a, int64_t lda, bool transposed, int64_t rows,
                      int64_t k) {
  using E = typename Format::element;
  if (!transposed) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
        auto elements = Format::along_k(a + i * lda + k0, k - k0);
        if constexpr (Format::STEP == 4) {
          elements ^= 0x80808080u;  // a + 128
        }
        store_bits<E>(out + i * DOT_CHUNK + k0 / Format::STEP, elements);
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k0 = 0; k0 < k; k0 += Format::STEP) {
      const A* p = a + i + k0 * lda;
      E element = {};
      if constexpr (Format::STEP == 1) {
        element = convert<A, E>(load_scalar(p));
      } else {
        for (int j = 0; j < Format::STEP && j < k - k0; ++j) {
          stored_t<A> bits;
          memcpy(&bits, p + j * lda, sizeof bits);
          element |= (E)(std::make_unsigned_t<stored_t<A>>)bits << (8 * sizeof bits * j);
        }
        if constexpr (Format::STEP == 4) {
          element ^= 0x80808080u;  // a + 128
        }
      }
      out[i * DOT_CHUNK + k0 / Format::STEP] = element;
    }
  }
}

template <class Format, class B>
TCPU_INLINE void pack_panel(typename Format::element* panel, typename Format::accumulator* start, const B* b,
                            int64_t ldb, bool transposed, int64_t columns, int64_t k) {
  if (transposed) {
    for (int64_t j = 0; j < PANEL<Format>; j += LANES) {
      const int64_t left = columns > j ? columns - j : 0;
      pack_columns_along_k<Format>(panel + j, PANEL<Format>, b + (left ? j * ldb : 0), ldb, left, k);
    }
  } else {
    for (int64_t k0 = 0; k0 < k; k0 += Format::STEP) {
      pack_across_columns<Format>(panel + k0 / Format::STEP * PANEL<Format>, b + k0 * ldb, ldb, columns, k - k0);
    }
  }
  if constexpr (Format::STEP == 4) {
    using S = typename Format::accumulator;
    constexpr int WIDTH = TCPU_REGISTER_BYTES / sizeof(S);
    const auto ones = splat_piece(0x01010101u);
    for (int64_t j = 0; j < PANEL<Format>; j += WIDTH) {
      piece<S> column_sums = {};
      for (int64_t step = 0; step * Format::STEP < k; ++step) {
        piece<uint32_t> quads;
        memcpy(&quads, panel + step * PANEL<Format> + j, sizeof quads);
        column_sums = Format::multiply(column_sums, ones, quads);
      }
      column_sums *= -128;
      memcpy(start + j, &column_sums, sizeof column_sums);
    }
  }
}

template <class Format, class A, class B>
static void dot_packed(typename Format::accumulator* c, int64_t ldc, const A* a, int64_t lda, bool a_transposed,
                       const B* b, int64_t ldb, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  using E = typename Format::element;
  constexpr int64_t CHUNK_K = DOT_CHUNK * Format::STEP;
  alignas(64) E panel[DOT_CHUNK * PANEL<Format>];
  alignas(64) E packed_a[DOT_CHUNK_ROWS * DOT_CHUNK];
  alignas(64) typename Format::accumulator start[PANEL<Format>] = {};
  for (int64_t k0 = 0; k0 < k; k0 += CHUNK_K) {
    const int64_t chunk = k - k0 < CHUNK_K ? k - k0 : CHUNK_K;
    const int64_t steps = (chunk + Format::STEP - 1) / Format::STEP;
    // A group of values along K is one element in memory only if they are neighbours and the group is whole.
    const bool in_place = Format::template reads_in_place<A> &&
                          (Format::STEP == 1 || (!a_transposed && chunk % Format::STEP == 0));
    for (int64_t m0 = 0; m0 < m; m0 += DOT_CHUNK_ROWS) {
      const int64_t rows = m - m0 < DOT_CHUNK_ROWS ? m - m0 : DOT_CHUNK_ROWS;
      const A* a_chunk = a + (a_transposed ? k0 * lda + m0 : m0 * lda + k0);
      const char* a_bytes = (const char*)a_chunk;
      int64_t a_row = (a_transposed ? 1 : lda) * (int64_t)sizeof(A);
      int64_t a_step = (a_transposed ? lda : 1) * (int64_t)sizeof(A) * Format::STEP;
      if (!in_place) {
        pack_rows<Format>(packed_a, a_chunk, lda, a_transposed, rows, chunk);
        a_bytes = (const char*)packed_a;
        a_row = DOT_CHUNK * sizeof(E);
        a_step = sizeof(E);
      }
      for (int64_t n0 = 0; n0 < n; n0 += PANEL<Format>) {
        const int64_t columns = n - n0 < PANEL<Format> ? n - n0 : PANEL<Format>;
        const B* b_panel = b + (b_transposed ? n0 * ldb + k0 : k0 * ldb + n0);
        pack_panel<Format>(panel, start, b_panel, ldb, b_transposed, columns, chunk);
        multiply_rows<Format, DOT_ROWS>(c + m0 * ldc + n0, ldc, a_bytes, a_row, a_step, panel, start, steps, columns,
                                        rows);
      }
    }
  }
}

#if defined(TCPU_AVX512)
// c[0..3] += the sums of four vectors: lanes are exchanged and added until each group of four holds all four sums.
TCPU_INLINE void add_four_sums(float* c, __m512 v0, __m512 v1, __m512 v2, __m512 v3) {
  const __m512 pair01 = _mm512_add_ps(_mm512_unpacklo_ps(v0, v1), _mm512_unpackhi_ps(v0, v1));
  const __m512 pair23 = _mm512_add_ps(_mm512_unpacklo_ps(v2, v3), _mm512_unpackhi_ps(v2, v3));
  const __m512d low = _mm512_unpacklo_pd((__m512d)pair01, (__m512d)pair23);
  const __m512d high = _mm512_unpackhi_pd((__m512d)pair01, (__m512d)pair23);
  const __m512 all = _mm512_add_ps((__m512)low, (__m512)high);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(c, _mm_add_ps(_mm_loadu_ps(c), sums));
}
#endif

// One row of A by COLUMNS rows of B, both contiguous along K: a vector of partial sums for each.
template <class Format, int COLUMNS, class A, class B>
TCPU_INLINE void dot_along_k(typename Format::accumulator* c, const A* a, const B* b, int64_t ldb, int64_t k) {
  using Sums = pieces<vec<typename Format::accumulator>>;
  // A single loop with a masked last step: GCC keeps the sums in registers only if no second loop changes them.
  Sums sums[COLUMNS] = {};
  for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
    pieces<vec<typename Format::element>> x, y;
    x.whole = Format::along_k(a + k0, k - k0);
    for (int j = 0; j < COLUMNS; ++j) {
      y.whole = Format::along_k(b + j * ldb + k0, k - k0);
      for (int p = 0; p < Sums::COUNT; ++p) {
        sums[j].part[p] = Format::multiply(sums[j].part[p], x.part[p], y.part[p]);
      }
    }
  }
  int j = 0;
#if defined(TCPU_AVX512)
  if constexpr (std::is_same_v<typename Format::accumulator, float>) {
    for (; j + 4 <= COLUMNS; j += 4) {
      add_four_sums(c + j, sums[j].whole, sums[j + 1].whole, sums[j + 2].whole, sums[j + 3].whole);
    }
  }
#endif
  for (; j < COLUMNS; ++j) {
    c[j] += sum(sums[j].whole);
  }
}

// Columns outside, rows inside: B is read from far memory once.
template <class Format, class A, class B>
static void dot_rows_along_k(typename Format::accumulator* c, int64_t ldc, const A* a, int64_t lda, const B* b,
                             int64_t ldb, int64_t m, int64_t n, int64_t k) {
  constexpr int COLUMNS = DOT_ROWS;
  int64_t j = 0;
  for (; j + COLUMNS <= n; j += COLUMNS) {
    for (int64_t i = 0; i < m; ++i) {
      dot_along_k<Format, COLUMNS>(c + i * ldc + j, a + i * lda, b + j * ldb, ldb, k);
    }
  }
  for (; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      dot_along_k<Format, 1>(c + i * ldc + j, a + i * lda, b + j * ldb, ldb, k);
    }
  }
}

template <class Sum, class A, class B>
TCPU_INLINE void dot_any(Sum* c, int64_t ldc, const A* a, int64_t lda, bool a_transposed, const B* b, int64_t ldb,
                         bool b_transposed, int64_t m, int64_t n, int64_t k) {
  using Format = typename choose_format<A, B, Sum>::type;
  if constexpr (!std::is_same_v<Sum, int32_t>) {
    if (b_transposed && !a_transposed && m <= DOT_ROWS_ALONG_K) {
      dot_rows_along_k<Format>(c, ldc, a, lda, b, ldb, m, n, k);
      return;
    }
  }
  dot_packed<Format>(c, ldc, a, lda, a_transposed, b, ldb, b_transposed, m, n, k);
}

template <class A, class B>
TCPU_INLINE void dot_f32(float* c, int64_t ldc, const A* a, int64_t lda, bool a_transposed, const B* b, int64_t ldb,
                         bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<float>(c, ldc, a, lda, a_transposed, b, ldb, b_transposed, m, n, k);
}

TCPU_INLINE void dot_f64(double* c, int64_t ldc, const double* a, int64_t lda, bool a_transposed, const double* b,
                         int64_t ldb, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<double>(c, ldc, a, lda, a_transposed, b, ldb, b_transposed, m, n, k);
}

TCPU_INLINE void dot_i32(int32_t* c, int64_t ldc, const int8_t* a, int64_t lda, bool a_transposed, const int8_t* b,
                         int64_t ldb, bool b_transposed, int64_t m, int64_t n, int64_t k) {
  dot_any<int32_t>(c, ldc, a, lda, a_transposed, b, ldb, b_transposed, m, n, k);
}

}  // namespace tcpu
