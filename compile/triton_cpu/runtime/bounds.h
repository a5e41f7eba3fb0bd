// Bounds checks of kernels that were compiled with them.
//
// Behind the slots of its arguments, args holds for each of them the number of the slot where its extent begins: how
// many pairs follow, or -1 where nothing is known, then pairs (count, stride in bytes) from the outermost to the
// innermost, whose stride is 1. The tensor's bytes are those at sum(index * stride), index < count, from its address on;
// a pair's stride is at least what the pairs inside of it span.
//
//   lanes_outside(allowed, addresses, width, bits)    the lanes of `bits` whose `width` bytes no allowed tensor holds
//   fail_access(allowed, address, ...)                reports one of them
#pragma once

#include <cstdlib>
#include <string>

#include "debug.h"

namespace tcpu {

inline bool holds(const uint64_t* extent, int64_t offset, int64_t width) {
  const int64_t pairs = (int64_t)extent[0];
  if (pairs < 0) {
    return true;
  }
  if (offset < 0) {
    return false;
  }
  for (int64_t pair = 0; pair + 1 < pairs; ++pair) {
    const int64_t last = (int64_t)extent[1 + 2 * pair] - 1, stride = (int64_t)extent[2 + 2 * pair];
    const int64_t index = offset / stride;
    offset -= (index < last ? index : last) * stride;
  }
  return offset + width <= (int64_t)extent[2 * pairs - 1];
}

// What an access may reach. arguments: the kernel's; roots: those that the pointer may come from, with their names.
struct Allowed {
  const uint64_t* args;
  int arguments, num_roots;
  const int* roots;
  const char* const* names;

  const uint64_t* extent(int root) const { return args + args[arguments + roots[root]]; }
  int64_t offset(int root, uint64_t address) const { return (int64_t)(address - args[roots[root]]); }
};

// Whole functions, not templates: a kernel has many accesses, and the compiler should not do the same work for each.
__attribute__((noinline)) inline uint32_t lanes_outside(const Allowed& allowed, const uint64_t* addresses, int width,
                                                        uint32_t bits) {
  uint32_t outside = 0;
  for (int i = 0; i < LANES; ++i) {
    bool is_inside = !(bits >> i & 1u);
    for (int root = 0; root < allowed.num_roots && !is_inside; ++root) {
      is_inside = holds(allowed.extent(root), allowed.offset(root, addresses[i]), width);
    }
    outside |= (uint32_t)!is_inside << i;
  }
  return outside;
}

// Of the argument to which the address is nearest. verb: what the access does; index: in its tile, or empty.
__attribute__((cold, noinline)) inline void fail_access(const Allowed& allowed, uint64_t address, int width,
                                                        Report* report, const char* where, ProgramId program,
                                                        const char* verb, const char* index) {
  int nearest = 0;
  for (int root = 1; root < allowed.num_roots; ++root) {
    if (std::abs(allowed.offset(root, address)) < std::abs(allowed.offset(nearest, address))) {
      nearest = root;
    }
  }
  const std::string name = allowed.names[nearest];
  const uint64_t* extent = allowed.extent(nearest);
  const int64_t offset = allowed.offset(nearest, address);
  const int64_t element = offset >= 0 ? offset / width : -((width - 1 - offset) / width);
  int64_t span = 1;
  for (int64_t pair = 0; pair < (int64_t)extent[0]; ++pair) {
    span += ((int64_t)extent[1 + 2 * pair] - 1) * (int64_t)extent[2 + 2 * pair];
  }
  std::string reason = "no element of the tensor lies there";
  if (span <= 0) {
    reason = "the tensor is empty";
  } else if (offset < 0) {
    reason = "the tensor begins at " + name + "[0]";
  } else if (offset + width > span) {
    reason = "the tensor ends at " + name + "[" + std::to_string(span / width - 1) + "]";
  }
  const std::string place = *index ? std::string(" at index (") + index + ")" : "";
  fail(report, OUT_OF_BOUNDS, where, program, "%s %s[%lld]%s: %s", verb, name.c_str(), (long long)element,
       place.c_str(), reason.c_str());
}

}  // namespace tcpu
