// Reads, changes and writes back an element in one step that no other thread can come between.
//
//   atomic_update<OP>(p, x)                  *p = OP(*p, x); returns what was there before
//   atomic_exchange_if(p, expected, x)       *p = x where *p has the bits of `expected`; returns what was there before
//   atomic_update_lanes<OP, T>(addresses, bits, x)   for each lane whose bit is set, in order, so that lanes of equal
//   atomic_exchange_lanes_if<T>(...)                 addresses all count; other lanes return 0
//
// Every one acquires and releases, the strongest order that a kernel can ask for.
#pragma once

#include "access.h"
#include "arithmetic.h"

namespace tcpu {

enum class Update { ADD, AND, OR, XOR, EXCHANGE, MIN, MAX, UNSIGNED_MIN, UNSIGNED_MAX };

template <class T>
using atomic_bits = std::make_unsigned_t<typename integer_of<sizeof(T)>::type>;

template <class T>
TCPU_INLINE atomic_bits<T> to_atomic_bits(reg_t<T> x) {
  const stored_t<T> stored = to_storage<T>(splat(x))[0];
  return bitcast<atomic_bits<T>>(stored);
}

template <class T>
TCPU_INLINE reg_t<T> from_atomic_bits(atomic_bits<T> bits) {
  return to_registers<T>(splat(bitcast<stored_t<T>>(bits)))[0];
}

template <Update OP, class X>
TCPU_INLINE X updated(X old, X x) {
  if constexpr (OP == Update::ADD && std::is_integral_v<X>) {
    using U = std::make_unsigned_t<X>;
    return (X)((U)old + (U)x);
  } else if constexpr (OP == Update::ADD) {
    return old + x;
  } else if constexpr (OP == Update::EXCHANGE) {
    return x;
  } else if constexpr (OP == Update::MIN) {
    return min(old, x);
  } else if constexpr (OP == Update::MAX) {
    return max(old, x);
  } else {
    static_assert(std::is_integral_v<X>, "this update takes integers");
    using U = std::make_unsigned_t<X>;
    const U a = (U)old, b = (U)x;
    switch (OP) {
      case Update::AND: return (X)(a & b);
      case Update::OR: return (X)(a | b);
      case Update::XOR: return (X)(a ^ b);
      case Update::UNSIGNED_MIN: return (X)min(a, b);
      default: return (X)max(a, b);
    }
  }
}

template <Update OP, class T>
TCPU_INLINE reg_t<T> atomic_update(T* p, reg_t<T> x) {
  auto* place = (atomic_bits<T>*)p;
  if constexpr (OP == Update::ADD && std::is_integral_v<T>) {
    return (T)__atomic_fetch_add(place, (atomic_bits<T>)x, __ATOMIC_ACQ_REL);
  } else if constexpr (OP == Update::EXCHANGE) {
    return from_atomic_bits<T>(__atomic_exchange_n(place, to_atomic_bits<T>(x), __ATOMIC_ACQ_REL));
  } else {
    atomic_bits<T> seen = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (true) {
      const reg_t<T> old = from_atomic_bits<T>(seen);
      const atomic_bits<T> wanted = to_atomic_bits<T>(updated<OP>(old, x));
      if (__atomic_compare_exchange_n(place, &seen, wanted, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
        return old;
      }
    }
  }
}

template <class T>
TCPU_INLINE reg_t<T> atomic_exchange_if(T* p, reg_t<T> expected, reg_t<T> x) {
  atomic_bits<T> seen = to_atomic_bits<T>(expected);
  __atomic_compare_exchange_n((atomic_bits<T>*)p, &seen, to_atomic_bits<T>(x), false, __ATOMIC_ACQ_REL,
                              __ATOMIC_ACQUIRE);
  return from_atomic_bits<T>(seen);
}

// fn(address, lane) for each lane whose bit is set.
template <class X, class Fn>
TCPU_INLINE vec<X> each_address(vec<uint64_t> addresses, uint32_t bits, Fn fn) {
  uint64_t address[LANES];
  X result[LANES] = {};
  store_bits<uint64_t>(address, addresses);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      result[i] = fn(address[i], i);
    }
  }
  return load_bits<X>(result);
}

template <Update OP, class T>
TCPU_INLINE vec<reg_t<T>> atomic_update_lanes(vec<uint64_t> addresses, uint32_t bits, vec<reg_t<T>> x) {
  reg_t<T> lanes[LANES];
  store_bits<reg_t<T>>(lanes, x);
  return each_address<reg_t<T>>(addresses, bits,
                                [&](uint64_t address, int i) { return atomic_update<OP>((T*)address, lanes[i]); });
}

template <class T>
TCPU_INLINE vec<reg_t<T>> atomic_exchange_lanes_if(vec<uint64_t> addresses, uint32_t bits, vec<reg_t<T>> expected,
                                                   vec<reg_t<T>> x) {
  reg_t<T> lanes[LANES], expected_lanes[LANES];
  store_bits<reg_t<T>>(lanes, x);
  store_bits<reg_t<T>>(expected_lanes, expected);
  return each_address<reg_t<T>>(addresses, bits, [&](uint64_t address, int i) {
    return atomic_exchange_if((T*)address, expected_lanes[i], lanes[i]);
  });
}

}  // namespace tcpu
