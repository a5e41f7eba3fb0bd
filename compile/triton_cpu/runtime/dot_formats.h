// How the operands of a dot are laid out for the machine's multiply-add, and how they are brought into that layout.
//
// A format multiplies "elements": STEP values along K packed in one element. Plain formats have STEP 1 (float, double,
// int32_t); bf16 pairs have STEP 2 and int8 quads STEP 4, each 32 bits, for the instructions that sum over them.
// B is packed into panels [elements of K][PANEL columns], zeros where a column or a k does not exist; A into rows of
// elements, zeros likewise: a padded product is then 0 * 0, and no NaN or infinity of real values meets a padded zero.
#pragma once

#include "elementary.h"
#include "access.h"
#include "reduce.h"

namespace tcpu {

// The register block: ROWS x PANEL sums stay in registers.
#if defined(TCPU_AVX512)
constexpr int DOT_ROWS = 8;
constexpr int DOT_REGISTERS = 2;
constexpr int DOT_BLOCK_ALONG_K = 4;
#elif defined(TCPU_AVX2)
constexpr int DOT_ROWS = 4;
constexpr int DOT_REGISTERS = 2;
constexpr int DOT_BLOCK_ALONG_K = 2;
#else
constexpr int DOT_ROWS = 2;
constexpr int DOT_REGISTERS = 4;
constexpr int DOT_BLOCK_ALONG_K = 2;
#endif

// The columns of a panel: a multiple of LANES.
template <class Format>
constexpr int PANEL = DOT_REGISTERS * TCPU_REGISTER_BYTES / (int)sizeof(typename Format::accumulator) < LANES
                          ? LANES
                          : DOT_REGISTERS * TCPU_REGISTER_BYTES / (int)sizeof(typename Format::accumulator);

// T is both the packed element and the accumulator; small storage types are widened while they are packed.
template <class T>
struct plain_format {
  using element = T;
  using accumulator = T;
  static constexpr int STEP = 1;
  template <class Storage>
  static constexpr bool reads_in_place = std::is_same_v<Storage, T>;

  TCPU_INLINE piece<T> multiply(piece<T> sum, piece<T> a, piece<T> b) {
#if defined(TCPU_AVX512) || defined(TCPU_AVX2)
    if constexpr (std::is_same_v<T, float>) {
      return mul_add(a, b, sum);
    }
#endif
    return a * b + sum;
  }
  // The elements of 16 columns at the first k of an operand [K, N]; columns outside `bits` become zero.
  template <class B>
  TCPU_INLINE vec<T> along_lanes(B b, int64_t column, int64_t, uint32_t bits) {
    return load_lanes(b.row(0) + column, bits);
  }
  // 16 elements along K of one row or column.
  template <class Storage>
  TCPU_INLINE vec<T> along_k(const Storage* p, int64_t k_left) {
    return load_lanes(p, bits_below(k_left));
  }
  template <class Storage>
  TCPU_INLINE vec<T> load_lanes(const Storage* p, uint32_t bits) {
    return convert<Storage, T>(load_masked<Storage>(p, bits, vec<reg_t<Storage>>{}));
  }
};

#if defined(TCPU_BF16)
// 32 bf16; those outside `bits` become zero.
TCPU_INLINE __m512i bf16_words(const bf16* p, __mmask32 bits) {
  return _mm512_maskz_loadu_epi16(bits, p);
}

#if defined(TCPU_VBMI)
// The bf16 of every f8e4m3 from 0 on, all of which are exact and normal, as its two bytes.
struct f8e4m3_table {
  uint8_t low[128] = {}, high[128] = {};
  constexpr f8e4m3_table() {
    for (int i = 1; i < 128; ++i) {
      int exponent = i >> 3, mantissa = i & 7;
      if (exponent == 0) {  // subnormal: brought up until its first bit is the one that is not written
        for (exponent = 1; mantissa < 8; mantissa <<= 1) {
          --exponent;
        }
      }
      const int word = i == 127 ? 0x7fc0 : ((exponent + 120) << 7) + ((mantissa & 7) << 4);
      low[i] = (uint8_t)word;
      high[i] = (uint8_t)(word >> 8);
    }
  }
};
alignas(64) constexpr f8e4m3_table F8E4M3_TABLE;

TCPU_INLINE __m512i bf16_words(const f8e4m3* p, __mmask32 bits) {
  // Each byte twice, in both bytes of a word.
  const __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(bits, p));
  const __m512i twice = _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
  const __m512i* low = (const __m512i*)F8E4M3_TABLE.low;
  const __m512i* high = (const __m512i*)F8E4M3_TABLE.high;
  // An index is 7 bits: without the sign.
  const __m512i low_bytes = _mm512_permutex2var_epi8(low[0], twice, low[1]);
  const __m512i high_bytes = _mm512_permutex2var_epi8(high[0], twice, high[1]);
  const __m512i word = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, low_bytes, high_bytes);
  // word | (twice & sign)
  return _mm512_ternarylogic_epi64(word, twice, _mm512_set1_epi16((short)0x8000), 0xf8);
}
#endif

// Products of pairs summed in float. The instruction takes subnormal inputs as zero and flushes subnormal results.
struct bf16_pairs {
  using element = uint32_t;
  using accumulator = float;
  static constexpr int STEP = 2;
  template <class Storage>
  static constexpr bool reads_in_place = std::is_same_v<Storage, bf16>;

  TCPU_INLINE piece<float> multiply(piece<float> sum, piece<uint32_t> a, piece<uint32_t> b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  // One value's part of an element.
  template <class Storage>
  TCPU_INLINE uint32_t scalar(const Storage* p) {
    return (uint16_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(bf16_words(p, 1)));
  }
  template <class Storage>
  TCPU_INLINE vec<uint32_t> along_k(const Storage* p, int64_t k_left) {
    return (vec<uint32_t>)bf16_words(p, k_left >= 32 ? ~0u : (1u << k_left) - 1u);
  }
};
#endif

#if defined(TCPU_VNNI)
// Products of quads summed in int32. The instruction takes one side unsigned: B's elements are b + 128 (see as_right), and
// 128 times the sums of A's rows are taken off the result, so that A is read where it lies.
struct int8_quads {
  using element = uint32_t;
  using accumulator = int32_t;
  static constexpr int STEP = 4;
  template <class Storage>
  static constexpr bool reads_in_place = true;

  TCPU_INLINE piece<int32_t> multiply(piece<int32_t> sum, piece<uint32_t> a, piece<uint32_t> b) {
    return (piece<int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
  }
  // One value's part of an element.
  TCPU_INLINE uint32_t scalar(const int8_t* p) {
    return (uint8_t)*p;
  }
  template <class B>
  TCPU_INLINE vec<uint32_t> along_lanes(B b, int64_t column, int64_t k_left, uint32_t bits) {
    const auto row = [=](int i) __attribute__((always_inline)) {
      const bool exists = i < k_left;
      const int8_t* p = b.row(exists ? i : 0) + column;
      const auto bytes = load_bits_masked<uint8_t>(p, exists ? bits : 0, vec<uint8_t>{});
      return convert_lanes<uint32_t>(bytes) << (8 * i);
    };
    return row(0) | row(1) | row(2) | row(3);
  }
  TCPU_INLINE vec<uint32_t> along_k(const int8_t* p, int64_t k_left) {
    const __mmask64 bits = k_left >= 64 ? ~0ull : (1ull << k_left) - 1ull;
    return (vec<uint32_t>)_mm512_maskz_loadu_epi8(bits, p);
  }
};
#endif

// Elements of B, as loaded, as they are multiplied.
template <class Format, class V>
TCPU_INLINE V as_right(V elements) {
  if constexpr (Format::STEP == 4) {
    return elements ^ 0x80808080u;
  } else {
    return elements;
  }
}

// c -= 128 times the sum of each row of A: what B's elements, which are b + 128, add to the products.
template <class Format, class A>
static void take_off_row_sums(int32_t* c, int64_t ldc, A a, bool a_transposed, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i) {
    int32_t total = 0;
    if (a_transposed) {
      for (int64_t j = 0; j < k; ++j) {
        total += a.row(j)[i];
      }
    } else {
      pieces<vec<int32_t>> sums = {};
      for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
        const auto elements = Format::along_k(a.row(i) + k0, k - k0);
        sums.whole = Format::multiply(sums.whole, elements, splat_piece(0x01010101u));
      }
      total = sum(sums.whole);
    }
    for (int64_t j = 0; j < n; ++j) {
      c[i * ldc + j] = (int32_t)((uint32_t)c[i * ldc + j] - 128u * (uint32_t)total);
    }
  }
}

// The format for operands A and B with sums in Sum.
template <class A, class B, class Sum>
struct choose_format {
  using type = plain_format<Sum>;
};
#if defined(TCPU_BF16)
template <>
struct choose_format<bf16, bf16, float> {
  using type = bf16_pairs;
};
#if defined(TCPU_VBMI)
template <>
struct choose_format<f8e4m3, f8e4m3, float> {
  using type = bf16_pairs;
};
template <>
struct choose_format<bf16, f8e4m3, float> {
  using type = bf16_pairs;
};
#endif
#endif
#if defined(TCPU_VNNI)
template <>
struct choose_format<int8_t, int8_t, int32_t> {
  using type = int8_quads;
};
#endif

template <class T>
TCPU_INLINE void transpose(vec<T> (&rows)[LANES]) {
#if defined(TCPU_AVX512)
  if constexpr (sizeof(T) == 4) {
    // Within each 4 x 4 block of 128-bit lanes, then the blocks themselves.
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i += 2) {
      x[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
      x[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      y[i] = _mm512_unpacklo_epi64(x[i], x[i + 2]);
      y[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 2]);
      y[i + 2] = _mm512_unpacklo_epi64(x[i + 1], x[i + 3]);
      y[i + 3] = _mm512_unpackhi_epi64(x[i + 1], x[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88);
      x[i + 4] = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
      x[i + 8] = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
      x[i + 12] = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      rows[i] = (vec<T>)_mm512_shuffle_i32x4(x[i], x[i + 8], 0x88);
      rows[i + 8] = (vec<T>)_mm512_shuffle_i32x4(x[i], x[i + 8], 0xdd);
      rows[i + 4] = (vec<T>)_mm512_shuffle_i32x4(x[i + 4], x[i + 12], 0x88);
      rows[i + 12] = (vec<T>)_mm512_shuffle_i32x4(x[i + 4], x[i + 12], 0xdd);
    }
    return;
  }
#endif
  T from[LANES][LANES], to[LANES][LANES];
  for (int i = 0; i < LANES; ++i) {
    store_bits<T>(from[i], rows[i]);
  }
  for (int i = 0; i < LANES; ++i) {
    for (int j = 0; j < LANES; ++j) {
      to[i][j] = from[j][i];
    }
  }
  for (int i = 0; i < LANES; ++i) {
    rows[i] = load_bits<T>(to[i]);
  }
}

// Up to 16 columns of B into out[element][0..15]: B as [N, K], each column contiguous along K. IS_WHOLE: all 16 exist.
template <class Format, bool IS_WHOLE, class B>
static void pack_columns_along_k(typename Format::element* out, int64_t out_stride, B b, int64_t columns, int64_t k) {
  using E = typename Format::element;
  for (int64_t k0 = 0; k0 < k; k0 += LANES * Format::STEP) {
    vec<E> rows[LANES];
    for (int i = 0; i < LANES; ++i) {
      rows[i] = as_right<Format>(IS_WHOLE || i < columns ? Format::along_k(b.row(i) + k0, k - k0) : vec<E>{});
    }
    transpose<E>(rows);
    const int64_t left = (k - k0 + Format::STEP - 1) / Format::STEP;
    E* to = out + k0 / Format::STEP * out_stride;
    for (int i = 0; i < LANES && i < left; ++i) {
      store_bits<E>(to + i * out_stride, rows[i]);
    }
  }
}

// One row of a panel for B as [K, N]: the values of STEP rows of B, interleaved.
template <class Format, class B>
TCPU_INLINE void pack_across_columns(typename Format::element* out, B b, int64_t columns, int64_t k_left) {
  if constexpr (Format::STEP == 2) {
#if defined(TCPU_BF16)
    static_assert(PANEL<bf16_pairs> == 2 * LANES, "a panel's row is two registers");
    const __mmask32 bits = columns >= 32 ? ~0u : (1u << columns) - 1u;
    const __m512i even = bf16_words(b.row(0), bits);
    const __m512i odd = bf16_words(b.row(k_left > 1), k_left > 1 ? bits : 0);
    // Pair i is word i of the first and word i of the second, whose index is 32 + i.
    const __m512i lower = (__m512i)(iota<int32_t>() * 0x10001 + 0x200000);
    const __m512i upper = (__m512i)(iota<int32_t>() * 0x10001 + 0x300010);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, lower, odd));
    _mm512_storeu_si512(out + LANES, _mm512_permutex2var_epi16(even, upper, odd));
#endif
  } else {
    for (int64_t j = 0; j < PANEL<Format>; j += LANES) {
      const uint32_t bits = bits_below(columns - j);
      const auto elements = Format::along_lanes(b, bits ? j : 0, k_left, bits);
      store_bits<typename Format::element>(out + j, as_right<Format>(elements));
    }
  }
}

}  // namespace tcpu
