// B of a dot that a program computes: written straight into the panels that a loaded B is packed into, two rows of B at
// a time, so that what multiplies pairs finds them.
//
//   panels<A, B, K, N> p;  p.put(k, column, first, second)   16 columns of rows k and k + 1; k even, column % 16 == 0
//
// Rows are floats, rounded to B or not (`exact`), or `words`, whose lower 16 bits are those of a bf16. The sums are
// float, K is even and N a multiple of 32, as wide as a panel can be.
//
// A bf16 that is multiplied in pairs counts as zero where it is subnormal. So the conversion of pairs, which takes a
// subnormal float as zero, is right but for floats that round up to the least normal number, 2^-126: they become zero.
#pragma once

#include "dot_formats.h"

namespace tcpu {

struct words {
  vec<uint32_t> bits;
};

template <class B>
TCPU_INLINE vec<float> rounded(vec<float> x) {
  return convert<float, B>(x);
}
template <class B>
TCPU_INLINE vec<float> rounded(exact x) {
  return x.value;
}
template <class B>
TCPU_INLINE vec<float> rounded(words x) {
  return (vec<float>)(x.bits << 16);
}

// Pairs of bf16, the first lower.
TCPU_INLINE vec<uint32_t> in_pairs(words first, words second) {
  return (first.bits & 0xffffu) | (second.bits << 16);
}
TCPU_INLINE vec<uint32_t> in_pairs(exact first, exact second) {
  return ((vec<uint32_t>)first.value >> 16) | ((vec<uint32_t>)second.value & 0xffff0000u);
}
#if defined(TCPU_BF16)
TCPU_INLINE vec<uint32_t> in_pairs(vec<float> first, vec<float> second) {
  // Word i of the first, which fills the lower half, and word i of the second.
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (vec<uint32_t>)_mm512_permutexvar_epi16((__m512i)(iota<int32_t>() * 0x10001 + 0x100000), halves);
}
TCPU_INLINE vec<uint32_t> in_pairs(exact first, vec<float> second) {
  return in_pairs(first.value, second);
}
TCPU_INLINE vec<uint32_t> in_pairs(vec<float> first, exact second) {
  return in_pairs(first, second.value);
}
#endif

// The panels, as a product reads them.
template <class A, class B, int K, int N>
struct packed {
  using type = B;
  using format = typename choose_format<A, B, float>::type;
  using element = typename format::element;
  static constexpr int64_t ROWS = K / format::STEP;
  const element* first;

  // From an element of K and a panel's first column on.
  const element* panel(int64_t k, int64_t column) const {
    return first + column * ROWS + k / format::STEP * PANEL<format>;
  }
};
template <class Operand>
constexpr bool is_packed = false;
template <class A, class B, int K, int N>
constexpr bool is_packed<packed<A, B, K, N>> = true;

template <class A, class B, int K, int N>
struct panels {
  using operand = packed<A, B, K, N>;
  using format = typename operand::format;
  static_assert(K % 2 == 0 && N % (2 * LANES) == 0 && 2 * LANES % PANEL<format> == 0, "panels are whole");
  alignas(64) typename operand::element elements[K / format::STEP * N];

  template <class First, class Second>
  TCPU_MEMBER void put(uint32_t k, uint32_t column, First first, Second second) {
    auto* place = elements + (column / PANEL<format> * operand::ROWS + k / format::STEP) * PANEL<format> +
                  column % PANEL<format>;
    if constexpr (format::STEP == 2) {
      store_bits<uint32_t>(place, in_pairs(first, second));
    } else {
      store_bits<float>(place, rounded<B>(first));
      store_bits<float>(place + PANEL<format>, rounded<B>(second));
    }
  }
  TCPU_MEMBER int64_t columns() const {
    return N;
  }
  TCPU_MEMBER int64_t rows() const {
    return K;
  }
  TCPU_MEMBER operand with_columns(int64_t) const {
    return {elements};
  }
};

// Whether M rows of A are so few, and B so short, that the product is unrolled: of more rows than these, registers hold
// too few sums beside the elements of B (4 rows by 32 x 32 as floats, AVX2: 255 ns unrolled, 205 not).
template <class Left, class Right, int M>
constexpr bool takes_few_rows = false;
template <class Left, int M, class A, class B, int K, int N>
constexpr bool takes_few_rows<Left, packed<A, B, K, N>, M> =
    M <= (packed<A, B, K, N>::format::STEP == 2 ? 8 : 2) && packed<A, B, K, N>::ROWS <= 32;

// c [M, N] += a b for a few rows of A and panels: all unrolled, so that elements of B that the same program put there
// before stay in registers. Rows of A are read where they lie if those are elements, else from copies.
template <int M, class Left, class A, class B, int K, int N>
TCPU_INLINE void multiply_few(float* c, int64_t ldc, Left a, packed<A, B, K, N> b) {
  using Format = typename packed<A, B, K, N>::format;
  using E = typename Format::element;
  constexpr int WIDTH = TCPU_REGISTER_BYTES / sizeof(float), COUNT = PANEL<Format> / WIDTH;
  constexpr int CHAINS = M == 1 ? 2 : 1;  // of one sum: a multiply-add waits for the one before
  constexpr bool IN_PLACE = Format::template reads_in_place<typename Left::type>;
  constexpr int COPIED = IN_PLACE ? 1 : (b.ROWS + LANES - 1) / LANES * LANES;
  alignas(64) E copies[M][COPIED];
  const E* rows[M];
  for (int i = 0; i < M; ++i) {
    for (int step = 0; !IN_PLACE && step < b.ROWS; step += LANES) {
      store_bits<E>(copies[i] + step, Format::along_k(a.row(i) + step * Format::STEP, K - step * Format::STEP));
    }
    rows[i] = IN_PLACE ? (const E*)a.row(i) : copies[i];
    // GCC would otherwise take elements of a row that was just stored out of registers, which costs more than it saves.
    asm("" : "+r"(rows[i]) : "m"(*(const E(*)[K / Format::STEP])rows[i]));
  }
#pragma GCC unroll 2
  for (int64_t column = 0; column < N; column += PANEL<Format>) {
    const E* panel = b.panel(0, column);
    piece<float> sums[CHAINS][M][COUNT] = {};
#pragma GCC unroll 32
    for (int step = 0; step < b.ROWS; ++step) {
#pragma GCC unroll 8
      for (int j = 0; j < COUNT; ++j) {
        piece<E> right;
        memcpy(&right, panel + step * PANEL<Format> + j * WIDTH, sizeof right);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          E left;
          memcpy(&left, rows[i] + step, sizeof left);
          auto& sum = sums[step % CHAINS][i][j];
          sum = Format::multiply(sum, splat_piece(left), right);
        }
      }
    }
    for (int i = 0; i < M; ++i) {
      for (int j = 0; j < COUNT; ++j) {
        float* place = c + i * ldc + column + j * WIDTH;
        piece<float> total;
        memcpy(&total, place, sizeof total);
        for (int chain = 0; chain < CHAINS; ++chain) {
          total += sums[chain][i][j];
        }
        memcpy(place, &total, sizeof total);
      }
    }
  }
}

}  // namespace tcpu
