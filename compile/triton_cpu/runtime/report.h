// How a kernel says that it failed. The launcher owns the report of a launch; the programs of all its threads share it,
// and the first failure stays. A kernel that can fail takes its launch's report as a last argument and exports
// `bool <kernel>_can_fail`; the others know nothing of all this.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace tcpu {

// Python knows these numbers: launching.py.
enum Failure : int32_t { NO_FAILURE, ASSERTION, OUT_OF_BOUNDS };

// Python knows this layout: launching.py. The text is complete once the launch has ended.
struct Report {
  int32_t kind;
  char text[1020];
};

struct ProgramId {
  int32_t x, y, z;
};

inline bool failed(const Report* report) { return __atomic_load_n(&report->kind, __ATOMIC_RELAXED) != NO_FAILURE; }

// where: the kernel and its source line.
__attribute__((cold, noinline, format(printf, 5, 6))) inline void fail(Report* report, Failure kind, const char* where,
                                                                       ProgramId program, const char* format, ...) {
  int32_t none = NO_FAILURE;
  if (!__atomic_compare_exchange_n(&report->kind, &none, (int32_t)kind, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    return;
  }
  const int size = sizeof report->text;
  const int used =
      std::snprintf(report->text, size, "%s: program (%d, %d, %d): ", where, program.x, program.y, program.z);
  if (used < 0 || used >= size) {
    return;
  }
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(report->text + used, size - used, format, arguments);
  va_end(arguments);
}

}  // namespace tcpu
