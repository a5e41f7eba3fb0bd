// tl.device_print and tl.device_assert.
//
//   index_text<SHAPE...>(flat)     the indices of an element of a row-major tile, as text
//   print<T, HEX>(program, prefix, operand, x)      one line: pid, index, prefix, value
//   print_lanes<T, HEX, SHAPE...>(program, prefix, operand, flat, bits, x)    one line for each lane of `bits`
//
// T is what lies in memory, unsigned where the kernel says so; operand is its number, or -1 where it is the only one.
#pragma once

#include "access.h"
#include "report.h"

namespace tcpu {

struct IndexText {
  char text[128];
};

template <int... SHAPE>
inline IndexText index_text(int64_t flat) {
  constexpr int RANK = sizeof...(SHAPE);
  const int64_t shape[RANK] = {SHAPE...};
  int64_t index[RANK];
  for (int axis = RANK - 1; axis >= 0; --axis) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  IndexText result{};
  int used = 0;
  for (int axis = 0; axis < RANK && used < (int)sizeof result.text; ++axis) {
    used += std::snprintf(result.text + used, sizeof result.text - used, axis ? ", %lld" : "%lld",
                          (long long)index[axis]);
  }
  return result;
}

template <class T, bool HEX, class X>
inline void print_value(X x) {
  if constexpr (HEX) {
    unsigned long long bits;
    if constexpr (is_small_float<T>) {
      bits = (bits_t<T>)small_to_bits<T>(x);
    } else {
      bits = bitcast<std::make_unsigned_t<typename integer_of<sizeof(T)>::type>>(x);
    }
    std::fprintf(stdout, "0x%0*llx", (int)(2 * sizeof(T)), bits);
  } else if constexpr (std::is_floating_point_v<X>) {
    std::fprintf(stdout, "%f", (double)x);
  } else if constexpr (std::is_unsigned_v<T>) {
    std::fprintf(stdout, "%llu", (unsigned long long)(T)x);
  } else {
    std::fprintf(stdout, "%lld", (long long)x);
  }
}

// The lock makes whole lines of what several threads print.
template <class T, bool HEX, class X>
inline void print_line(ProgramId program, const char* index, const char* prefix, int operand, X x) {
  flockfile(stdout);
  std::fprintf(stdout, "pid (%d, %d, %d) idx (%s)%s", program.x, program.y, program.z, index, prefix);
  if (operand >= 0) {
    std::fprintf(stdout, "(operand %d) ", operand);
  }
  print_value<T, HEX>(x);
  std::putc('\n', stdout);
  funlockfile(stdout);
}

template <class T, bool HEX, class X>
inline void print(ProgramId program, const char* prefix, int operand, X x) {
  print_line<T, HEX>(program, "", prefix, operand, x);
}

template <class T, bool HEX, int... SHAPE, class V>
TCPU_INLINE void print_lanes(ProgramId program, const char* prefix, int operand, int64_t flat, uint32_t bits, V x) {
  element_t<V> lanes[LANES];
  store_bits<element_t<V>>(lanes, x);
  for (int i = 0; i < LANES; ++i) {
    if (bits >> i & 1u) {
      print_line<T, HEX>(program, index_text<SHAPE...>(flat + i).text, prefix, operand, lanes[i]);
    }
  }
}

inline void print_text(ProgramId program, const char* text) {
  std::fprintf(stdout, "pid (%d, %d, %d)%s\n", program.x, program.y, program.z, text);
}

}  // namespace tcpu
