/* Passes over the rows [m][length] of a memory of hundreds of megabytes, called by memory_cpu.py. */

#include "lanes.h"
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { ROWS = 2, VECTORS = 11 };               /* 22 sums in 32 registers */
#define IN_A_REGISTER(v) __asm__("" : "+v"(v)) /* not read again for every product */
#else
enum { ROWS = 2, VECTORS = 6 }; /* 12 sums in 16 registers */
#define IN_A_REGISTER(v)
#endif
enum {
    BLOCK = 448,  /* entries: VECTORS blocks stay in the L1 cache while all rows pass */
    BAND = 128,   /* rows: the L2 cache holds a block of each and the prefetched next one */
    SHORT_SUM = 9 /* blocks that are summed in float32 */
};
typedef float half_vector __attribute__((vector_size(2 * LANES)));
typedef double wide __attribute__((vector_size(4 * LANES))); /* half as many lanes */

INLINED wide widen(const float *p) {
    half_vector v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, wide);
}

/* sums[i][j] += row i * vector j for R rows with stride `apart` and V vectors, interleaved in `v`, over `length` entries.
   Prefetches `ahead` rows from `next` on. */
INLINED void tile(int R, int V, const float *row, long apart, const vector *v, long length, vector *sums, long count,
                  const float *next, int ahead) {
    vector sum[ROWS][VECTORS];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) sum[i][j] = sums[i * count + j];
    for (long k = 0; k < length; k += LANES, v += V) {
        vector a[ROWS];
        for (int i = 0; i < R; i++) a[i] = load(row + i * apart + k);
        for (int i = 0; i < ahead; i++) __builtin_prefetch(next + i * apart + k, 0, 2);
        for (int j = 0; j < V; j++) {
            vector b = v[j];
            IN_A_REGISTER(b);
            for (int i = 0; i < R; i++) sum[i][j] += a[i] * b;
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) sums[i * count + j] = sum[i][j];
}

static void some_vectors(int R, int V, const float *row, long apart, const vector *v, long length, vector *sums, long count,
                         const float *next, int ahead) {
#define WITH(V)                                                                             \
    if (R == ROWS) {                                                                        \
        tile(ROWS, V, row, apart, v, length, sums, count, next, ahead);                     \
        break;                                                                              \
    }                                                                                       \
    for (int i = 0; i < R; i++)                                                             \
        tile(1, V, row + i * apart, apart, v, length, sums + i * count, count, NULL, 0);    \
    break;
    switch (V) {
    case 1: WITH(1)
    case 2: WITH(2)
    case 3: WITH(3)
    case 4: WITH(4)
    case 5: WITH(5)
    case 6: WITH(6)
#ifdef __AVX512F__
    case 7: WITH(7)
    case 8: WITH(8)
    case 9: WITH(9)
    case 10: WITH(10)
    case 11: WITH(11)
#endif
    }
}

/* out [m][count] += the products of `count` vectors with a band of m rows over the entries from `first` to `end`.
   The first `renewed` vectors first become scale[j] vectors[j] + updates[j]. Returns 1 if memory runs out, else 0. */
static int band(long m, const float *rows, long apart, long first, long end, long count, float *const *vectors, long renewed,
                const float *scale, const float *const *updates, double *out) {
    vector *sums = aligned_alloc(sizeof(vector), sizeof(vector) * m * count);
    wide *sums_of_sums = aligned_alloc(sizeof(wide), sizeof(wide) * m * count);
    int poor = !sums || !sums_of_sums, blocks = 0;
    for (long e = 0; !poor && e < m * count; e++) sums[e] = (vector){}, sums_of_sums[e] = (wide){};
    for (long at = first; !poor && at < end; at += BLOCK) {
        long here = least(BLOCK, end - at), whole = here / LANES * LANES;
        for (long j = 0; j < renewed; j++)
            for (long k = at; k < at + here; k++) vectors[j][k] = scale[j] * vectors[j][k] + updates[j][k];
        for (long j = 0; j < count; j += VECTORS) {
            long V = least(VECTORS, count - j);
            vector v[BLOCK / LANES * VECTORS];
            for (long q = 0; q < V; q++)
                for (long k = 0; k < whole; k += LANES) {
                    v[k / LANES * V + q] = load(vectors[j + q] + at + k);
                    __builtin_prefetch((j + q < renewed ? updates[j + q] : vectors[j + q]) + at + k + BLOCK, 0, 2);
                }
            int from = ROWS * j / count, to = ROWS * least(j + VECTORS, count) / count; /* this group's share */
            for (long i = 0; i < m; i += ROWS) {
                const float *row = rows + i * apart + at;
                some_vectors(least(ROWS, m - i), V, row, apart, v, whole, sums + i * count + j, count,
                             row + from * apart + BLOCK, to - from);
            }
        }
        for (long k = at + whole; k < at + here; k++) /* the rest of a vector */
            for (long i = 0; i < m; i++)
                for (long j = 0; j < count; j++) out[i * count + j] += (double)rows[i * apart + k] * vectors[j][k];
        if (++blocks % SHORT_SUM == 0 || at + BLOCK >= end)
            for (long e = 0; e < m * count; e++) {
                half_vector half[2];
                memcpy(half, sums + e, sizeof half);
                sums_of_sums[e] += __builtin_convertvector(half[0] + half[1], wide);
                sums[e] = (vector){};
            }
    }
    for (long e = 0; !poor && e < m * count; e++)
        for (int q = 0; q < LANES / 2; q++) out[e] += sums_of_sums[e][q];
    free(sums);
    free(sums_of_sums);
    return poor;
}

/* out [count][m] = the products of `count` vectors with all rows, with row stride `apart`; a few blocks in float32, their sums in
   float64. The first `renewed` vectors are rows and first become scale[j] vectors[j] + updates[j]. Returns 1 if memory runs out. */
int inner_products(long m, long length, const float *rows, long apart, long count, float *const *vectors, long renewed,
                   const float *scale, const float *const *updates, double *out, int threads) {
    int poor = 0;
    double *sums = calloc((size_t)threads * m * count, sizeof(double));
    if (!sums) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : poor)
    for (int thread = 0; thread < threads; thread++) {
        long blocks = (length + BLOCK - 1) / BLOCK;
        long first = blocks * thread / threads * BLOCK, end = least(blocks * (thread + 1) / threads * BLOCK, length);
        for (long top = 0; top < m; top += BAND)
            poor |= band(least(BAND, m - top), rows + top * apart, apart, first, end, count, vectors, top ? 0 : renewed, scale,
                         updates, sums + (thread * m + top) * count);
    }
    memset(out, 0, sizeof(double) * m * count);
    for (int thread = 0; thread < threads; thread++)
        for (long i = 0; i < m; i++)
            for (long j = 0; j < count; j++) out[j * m + i] += sums[(thread * m + i) * count + j];
    free(sums);
    return poor;
}

/* u = p + sum_j share[j] row[j] over `count` rows, summed in float64. */
void combined(long length, const float *p, long count, const float *const *row, const double *share, float *u, int threads) {
    enum { STEP = 2 * LANES }; /* entries in four registers */
    long whole = length / STEP * STEP;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long at = 0; at < whole; at += STEP) {
        wide sum[4];
        for (int q = 0; q < 4; q++) sum[q] = widen(p + at + q * LANES / 2);
        for (long j = 0; j < count; j++)
            for (int q = 0; q < 4; q++) sum[q] += share[j] * widen(row[j] + at + q * LANES / 2);
        for (int q = 0; q < 4; q++)
            for (int k = 0; k < LANES / 2; k++) u[at + q * LANES / 2 + k] = (float)sum[q][k];
    }
    for (long k = whole; k < length; k++) {
        double sum = p[k];
        for (long j = 0; j < count; j++) sum += share[j] * row[j][k];
        u[k] = (float)sum;
    }
}
