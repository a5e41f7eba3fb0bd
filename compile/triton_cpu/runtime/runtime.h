// Everything that a generated kernel may use; a precompiled header of this file halves a kernel's compile time.
// Compile with -std=c++17 -O3 -fno-math-errno -fno-trapping-math -Wno-psabi, never with -ffast-math. For AVX2 give GCC
// (12 or newer) -mmove-max=256 too: it copies vectors of two registers through general registers otherwise, which made
// plain additions and stores 5 to 8 times slower. No header here has a name of the C library's, so that its folder may
// stand in the include path.
#pragma once

#include "access.h"
#include "arithmetic.h"
#include "atomic.h"
#include "bounds.h"
#include "convert.h"
#include "debug.h"
#include "dot.h"
#include "elementary.h"
#include "reduce.h"
#include "vec.h"
