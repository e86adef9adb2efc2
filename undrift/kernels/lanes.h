/* A register of LANES numbers, loaded from any address. */

#ifndef UNDRIFT_LANES
#define UNDRIFT_LANES

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINED static inline __attribute__((always_inline))
INLINED vector load(const float *p) { return *(const anywhere *)p; }
INLINED void store(float *p, vector v) { *(anywhere *)p = v; }
INLINED long least(long a, long b) { return a < b ? a : b; }

#endif
