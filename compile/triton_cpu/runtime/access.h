// Loads and stores of 16 lanes. In registers a small float is a float: reg_t<T>.
//
//   load(p)                        vec<reg_t<T>> from p[0..15], no alignment needed
//   load_masked(p, bits, other)    lanes whose bit is 0 take other; their memory is not touched
//   gather(base, index, bits, other)      base[index[i]], index in elements
//   gather_ptr<T>(addresses, bits, other) lane addresses in bytes
//   store, store_masked, scatter, scatter_ptr<T>   lanes in order: of equal addresses the last lane wins
//   load_scalar(p) store_scalar(p, x)     one element
//   walk<EXTENT>(limits, body)     the loop of a tile along its lanes; body(chunk, i) for i = 0, 16, ... below EXTENT
//
// In place of bits a mask may be known at compile time: first(chunk, n), what `walk` says of the first n lanes.
//
// Stores of small floats round to nearest even (encode in convert.h), unless told that the values are `exact`.
#pragma once

#include "convert.h"

namespace tcpu {

// What lies in memory for T: itself, or the bits of a small float.
template <class T, bool SMALL = is_small_float<T>>
struct stored {
  using type = T;
};
template <class T>
struct stored<T, true> {
  using type = bits_t<T>;
};
template <class T>
using stored_t = typename stored<T>::type;

template <class T>
TCPU_INLINE vec<reg_t<T>> to_registers(vec<stored_t<T>> v) {
  if constexpr (is_small_float<T>) {
    return decode<T>(v);
  } else {
    return v;
  }
}

template <class T>
TCPU_INLINE vec<stored_t<T>> to_storage(vec<reg_t<T>> v) {
  if constexpr (is_small_float<T>) {
    return encode<T>(v);
  } else {
    return v;
  }
}

// Floats that a small float holds exactly: stored without rounding once more.
struct exact {
  vec<float> value;
};

template <class T>
TCPU_INLINE vec<stored_t<T>> to_storage(exact x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return convert_lanes<uint16_t>((vec<uint32_t>)x.value >> 16);
  } else {
    return encode<T>(x.value);
  }
}

template <class S>
TCPU_INLINE vec<S> load_bits(const void* p) {
  vec<S> v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Register by register: GCC would copy a vector wider than a register through the stack.
template <class S>
TCPU_INLINE void store_bits(void* p, vec<S> x) {
  using Part = piece<S, pieces<vec<S>>::BYTES>;
  for (int i = 0; i < pieces<vec<S>>::COUNT; ++i) {
    Part part;
    memcpy(&part, (const char*)&x + i * sizeof part, sizeof part);
    memcpy((char*)p + i * sizeof part, &part, sizeof part);
  }
}

template <class S>
TCPU_INLINE vec<S> load_bits_masked(const void* p, uint32_t bits, vec<S> other) {
#if defined(TCPU_AVX512)
  pieces<vec<S>> v;
  v.whole = other;
  if constexpr (sizeof(S) == 1) {
    return (vec<S>)_mm_mask_loadu_epi8((__m128i)other, (__mmask16)bits, p);
  } else if constexpr (sizeof(S) == 2) {
    return (vec<S>)_mm256_mask_loadu_epi16((__m256i)other, (__mmask16)bits, p);
  } else if constexpr (sizeof(S) == 4) {
    return (vec<S>)_mm512_mask_loadu_epi32((__m512i)other, (__mmask16)bits, p);
  } else {
    v.part[0] = (piece<S>)_mm512_mask_loadu_epi64((__m512i)v.part[0], (__mmask8)bits, p);
    v.part[1] = (piece<S>)_mm512_mask_loadu_epi64((__m512i)v.part[1], (__mmask8)(bits >> 8), (const char*)p + 64);
    return v.whole;
  }
#else
#if defined(TCPU_AVX2)
  if constexpr (sizeof(S) == 4) {
    pieces<mask> lanes_to_load;
    pieces<vec<int32_t>> v;
    lanes_to_load.whole = frommask(bits);
    for (int i = 0; i < 2; ++i) {
      v.part[i] = (piece<int32_t>)_mm256_maskload_epi32((const int*)p + 8 * i, (__m256i)lanes_to_load.part[i]);
    }
    return select(lanes_to_load.whole, (vec<S>)v.whole, other);
  }
#endif
  if ((bits & 0xffffu) == 0xffffu) {
    return load_bits<S>(p);
  }
  S lanes[LANES];
  memcpy(lanes, &other, sizeof lanes);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      memcpy(&lanes[i], (const char*)p + i * sizeof(S), sizeof(S));
    }
  }
  return load_bits<S>(lanes);
#endif
}

template <class S>
TCPU_INLINE void store_bits_masked(void* p, uint32_t bits, vec<S> x) {
#if defined(TCPU_AVX512)
  if constexpr (sizeof(S) == 1) {
    _mm_mask_storeu_epi8(p, (__mmask16)bits, (__m128i)x);
  } else if constexpr (sizeof(S) == 2) {
    _mm256_mask_storeu_epi16(p, (__mmask16)bits, (__m256i)x);
  } else if constexpr (sizeof(S) == 4) {
    _mm512_mask_storeu_epi32(p, (__mmask16)bits, (__m512i)x);
  } else {
    pieces<vec<S>> v;
    v.whole = x;
    _mm512_mask_storeu_epi64(p, (__mmask8)bits, (__m512i)v.part[0]);
    _mm512_mask_storeu_epi64((char*)p + 64, (__mmask8)(bits >> 8), (__m512i)v.part[1]);
  }
#else
  if ((bits & 0xffffu) == 0xffffu) {
    store_bits<S>(p, x);
    return;
  }
  S lanes[LANES];
  store_bits<S>(lanes, x);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      memcpy((char*)p + i * sizeof(S), &lanes[i], sizeof(S));
    }
  }
#endif
}

// Addresses as 64-bit lanes: one form for gather and gather_ptr.
template <class S>
TCPU_INLINE vec<S> gather_bits(vec<uint64_t> addresses, uint32_t bits, vec<S> other) {
#if defined(TCPU_AVX512)
  if constexpr (sizeof(S) >= 4) {
    pieces<vec<uint64_t>> a;
    a.whole = addresses;
    if constexpr (sizeof(S) == 4) {
      const __m256i low = _mm512_mask_i64gather_epi32(
          _mm512_castsi512_si256((__m512i)other), (__mmask8)bits, (__m512i)a.part[0], nullptr, 1);
      const __m256i high = _mm512_mask_i64gather_epi32(
          _mm512_extracti64x4_epi64((__m512i)other, 1), (__mmask8)(bits >> 8), (__m512i)a.part[1], nullptr, 1);
      return (vec<S>)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    } else {
      pieces<vec<S>> v;
      v.whole = other;
      for (int i = 0; i < 2; ++i) {
        v.part[i] = (piece<S>)_mm512_mask_i64gather_epi64(
            (__m512i)v.part[i], (__mmask8)(bits >> (8 * i)), (__m512i)a.part[i], nullptr, 1);
      }
      return v.whole;
    }
  }
#endif
  S lanes[LANES];
  uint64_t address[LANES];
  store_bits<S>(lanes, other);
  store_bits<uint64_t>(address, addresses);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      memcpy(&lanes[i], (const void*)address[i], sizeof(S));
    }
  }
  return load_bits<S>(lanes);
}

template <class S>
TCPU_INLINE void scatter_bits(vec<uint64_t> addresses, uint32_t bits, vec<S> x) {
  S lanes[LANES];
  uint64_t address[LANES];
  store_bits<S>(lanes, x);
  store_bits<uint64_t>(address, addresses);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      memcpy((void*)address[i], &lanes[i], sizeof(S));
    }
  }
}

template <class T>
TCPU_INLINE vec<uint64_t> lane_addresses(const T* base, vec<int64_t> index) {
  return (vec<uint64_t>)index * (uint64_t)sizeof(T) + (uint64_t)base;
}

// Whether the masks of a chunk hold in all its lanes, in some, or in none.
struct all_lanes {};
struct some_lanes {};
struct no_lanes {};

TCPU_INLINE all_lanes first(all_lanes chunk, int64_t) {
  return chunk;
}
TCPU_INLINE uint32_t first(some_lanes, int64_t n) {
  return bits_below(n);
}
TCPU_INLINE no_lanes first(no_lanes chunk, int64_t) {
  return chunk;
}
TCPU_INLINE mask lanes(all_lanes) {
  return ~mask{};
}
TCPU_INLINE mask lanes(uint32_t bits) {
  return frommask(bits);
}
TCPU_INLINE mask lanes(no_lanes) {
  return mask{};
}
TCPU_INLINE uint32_t to_bits(all_lanes) {
  return 0xffffu;
}
TCPU_INLINE uint32_t to_bits(uint32_t bits) {
  return bits;
}
TCPU_INLINE uint32_t to_bits(no_lanes) {
  return 0u;
}

// What a body of `walk` is: compiled into its loops.
#define TCPU_BODY __attribute__((always_inline))

// limits: for each mask, how many lanes it holds in, counted from the first chunk's first; any number.
// STEP: lanes of the chunks that one call of the body takes.
template <int32_t EXTENT, int32_t STEP, int COUNT, class Body>
TCPU_INLINE void walk(const int64_t (&limits)[COUNT], Body body) {
  int64_t least = limits[0], most = limits[0];
  for (int i = 1; i < COUNT; ++i) {
    least = limits[i] < least ? limits[i] : least;
    most = limits[i] > most ? limits[i] : most;
  }
  const auto within = [](int64_t n) { return (int32_t)(n < 0 ? 0 : n > EXTENT ? EXTENT : n); };
  const int32_t whole = within(least) / STEP * STEP, partial = (within(most) + STEP - 1) / STEP * STEP;
  int32_t i = 0;
  for (; i < whole; i += STEP) {
    body(all_lanes{}, i);
  }
  for (; i < partial; i += STEP) {
    body(some_lanes{}, i);
  }
  for (; i < EXTENT; i += STEP) {
    body(no_lanes{}, i);
  }
}

template <class T>
TCPU_INLINE vec<reg_t<T>> load(const T* p) {
  return to_registers<T>(load_bits<stored_t<T>>(p));
}

template <class T>
TCPU_INLINE vec<reg_t<T>> load_masked(const T* p, uint32_t bits, vec<reg_t<T>> other) {
  if constexpr (is_small_float<T>) {
    // other is a float and need not be a value that T can hold.
    const auto v = decode<T>(load_bits_masked<stored_t<T>>(p, bits, vec<stored_t<T>>{}));
    return select(frommask(bits), v, other);
  } else {
    return load_bits_masked<T>(p, bits, other);
  }
}

template <class T>
TCPU_INLINE vec<reg_t<T>> load_masked(const T* p, all_lanes, vec<reg_t<T>>) {
  return load(p);
}
template <class T>
TCPU_INLINE vec<reg_t<T>> load_masked(const T*, no_lanes, vec<reg_t<T>> other) {
  return other;
}

template <class T, class Mask>
TCPU_INLINE vec<reg_t<T>> gather_ptr(vec<uint64_t> addresses, Mask where, vec<reg_t<T>> other) {
  const uint32_t bits = to_bits(where);
  if constexpr (is_small_float<T>) {
    const auto v = decode<T>(gather_bits<stored_t<T>>(addresses, bits, vec<stored_t<T>>{}));
    return select(frommask(bits), v, other);
  } else {
    return gather_bits<T>(addresses, bits, other);
  }
}

template <class T, class Mask>
TCPU_INLINE vec<reg_t<T>> gather(const T* base, vec<int64_t> index, Mask bits, vec<reg_t<T>> other) {
  return gather_ptr<T>(lane_addresses(base, index), bits, other);
}

template <class T, class X = vec<reg_t<T>>>
TCPU_INLINE void store(T* p, X x) {
  store_bits<stored_t<T>>(p, to_storage<T>(x));
}

template <class T, class X = vec<reg_t<T>>>
TCPU_INLINE void store_masked(T* p, uint32_t bits, X x) {
  store_bits_masked<stored_t<T>>(p, bits, to_storage<T>(x));
}

template <class T, class X = vec<reg_t<T>>>
TCPU_INLINE void store_masked(T* p, all_lanes, X x) {
  store<T>(p, x);
}
template <class T, class X = vec<reg_t<T>>>
TCPU_INLINE void store_masked(T*, no_lanes, X) {}

// A store past the caches, which need not read the line first. Others see it after a fence.
template <class T, class X = vec<reg_t<T>>>
TCPU_INLINE void stream(T* p, X x) {
#if defined(TCPU_AVX512) || defined(TCPU_AVX2)
  const auto bits = to_storage<T>(x);
  if constexpr (sizeof bits >= sizeof(__m256i)) {
    if ((uintptr_t)p % sizeof(__m256i) == 0) {
      __m256i halves[sizeof bits / sizeof(__m256i)];
      memcpy(halves, &bits, sizeof bits);
      for (const auto& half : halves) {
        _mm256_stream_si256((__m256i*)p + (&half - halves), half);
      }
      return;
    }
  }
#endif
  store<T>(p, x);
}

template <class T, class Mask, class X = vec<reg_t<T>>>
TCPU_INLINE void stream_masked(T* p, Mask where, X x) {
  if constexpr (std::is_same_v<Mask, all_lanes>) {
    stream<T>(p, x);
  } else {
    store_masked<T>(p, where, x);
  }
}

TCPU_INLINE void fence() {
#if defined(TCPU_AVX512) || defined(TCPU_AVX2)
  _mm_sfence();
#endif
}

template <class T, class Mask, class X = vec<reg_t<T>>>
TCPU_INLINE void scatter_ptr(vec<uint64_t> addresses, Mask where, X x) {
  scatter_bits<stored_t<T>>(addresses, to_bits(where), to_storage<T>(x));
}

template <class T, class Mask, class X = vec<reg_t<T>>>
TCPU_INLINE void scatter(T* base, vec<int64_t> index, Mask bits, X x) {
  scatter_ptr<T>(lane_addresses(base, index), bits, x);
}

template <class T>
TCPU_INLINE reg_t<T> load_scalar(const T* p) {
  stored_t<T> bits;
  memcpy(&bits, p, sizeof bits);
  if constexpr (is_small_float<T>) {
    return decode<T>(splat(bits))[0];
  } else {
    return bits;
  }
}

template <class T>
TCPU_INLINE void store_scalar(T* p, reg_t<T> x) {
  const stored_t<T> bits = to_storage<T>(splat(x))[0];
  memcpy(p, &bits, sizeof bits);
}

}  // namespace tcpu
