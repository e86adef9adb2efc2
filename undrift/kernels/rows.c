/* Passes over the rows [m][length] of a memory of hundreds of megabytes, called by rows.py, where the plain forms are. */

#include "lanes.h"
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { ROWS = 4, VECTORS = 6 };                         /* 24 sums in 32 registers */
#define IN_A_REGISTER(v) __asm__("" : "+v"(v))          /* not read again for every product */
#else
enum { ROWS = 2, VECTORS = 6 };
#define IN_A_REGISTER(v)
#endif
enum { BLOCK = 4096 }; /* entries of a row that are summed in float32; a row's block and all vectors' fit in a core's cache */

INLINED double total(vector s) {
    float part[LANES];
    memcpy(part, &s, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* out[j][i] += <row i, vector j> for R rows `apart` from each other and V vectors, interleaved in `v`, over `length` entries.
   Meanwhile `ahead` rows from `next` on are fetched into the cache. */
INLINED void tile(int R, int V, const float *row, long apart, const float *v, long length, double *out, long m,
                  const float *next, int ahead) {
    vector sum[ROWS][VECTORS];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) sum[i][j] = (vector){};
    for (long k = 0; k < length; k += LANES, v += LANES * V) {
        vector a[ROWS];
        for (int i = 0; i < R; i++) a[i] = load(row + i * apart + k);
        for (int i = 0; i < ahead; i++) __builtin_prefetch(next + i * apart + k, 0, 2);
        for (int j = 0; j < V; j++) {
            vector b = *(const vector *)(v + LANES * j);
            IN_A_REGISTER(b);
            for (int i = 0; i < R; i++) sum[i][j] += a[i] * b;
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < V; j++) out[j * m + i] += total(sum[i][j]);
}

static void some_vectors(int R, int V, const float *row, long apart, const float *v, long length, double *out, long m,
                         const float *next, int ahead) {
#define WITH(V)                                                                  \
    if (R == ROWS) {                                                             \
        tile(ROWS, V, row, apart, v, length, out, m, next, ahead);               \
        break;                                                                   \
    }                                                                            \
    for (int i = 0; i < R; i++)                                                  \
        tile(1, V, row + i * apart, apart, v, length, out + i, m, NULL, 0);      \
    break;
    switch (V) {
    case 1: WITH(1)
    case 2: WITH(2)
    case 3: WITH(3)
    case 4: WITH(4)
    case 5: WITH(5)
    case 6: WITH(6)
    }
}

/* out [count][m] = the products of `count` vectors with all rows, each row `apart` from the next; a block in float32, the
   blocks' sums in float64. The first `renewed` vectors are themselves rows, and become scale[j] vectors[j] + updates[j] before.
   Returns 1 for want of memory, else 0. */
int inner_products(long m, long length, const float *rows, long apart, long count, float *const *vectors, long renewed,
                   const float *scale, const float *const *updates, double *out, int threads) {
    int poor = 0;
    memset(out, 0, sizeof(double) * m * count);
    double *sums = calloc((size_t)threads * m * count, sizeof(double));
    if (!sums) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : poor)
    for (int thread = 0; thread < threads; thread++) {
        float *packed = aligned_alloc(64, (size_t)count * BLOCK * sizeof(float));
        double *mine = sums + (size_t)thread * m * count;
        long blocks = (length + BLOCK - 1) / BLOCK;
        poor |= !packed;
        for (long b = blocks * thread / threads; packed && b < blocks * (thread + 1) / threads; b++) {
            long at = b * BLOCK, here = least(BLOCK, length - at), whole = here / LANES * LANES;
            for (long j = 0; j < renewed; j++)
                for (long k = at; k < at + here; k++) vectors[j][k] = scale[j] * vectors[j][k] + updates[j][k];
            for (long j = 0; j < count; j += VECTORS) {
                long V = least(VECTORS, count - j);
                for (long q = 0; q < V; q++)
                    for (long k = 0; k < whole; k += LANES)
                        *(vector *)(packed + j * BLOCK + k * V + q * LANES) = load(vectors[j + q] + at + k);
            }
            for (long i = 0; i < m; i += ROWS)
                for (long j = 0; j < count; j += VECTORS) {
                    const float *row = rows + i * apart + at;
                    int from = ROWS * j / count, to = ROWS * least(j + VECTORS, count) / count; /* this group's share */
                    int ahead = i + 2 * ROWS <= m ? to - from : 0;
                    some_vectors(least(ROWS, m - i), least(VECTORS, count - j), row, apart, packed + j * BLOCK, whole,
                                 mine + j * m + i, m, row + (ROWS + from) * apart, ahead);
                }
            for (long k = whole; k < here; k++) /* what does not fill a vector */
                for (long j = 0; j < count; j++)
                    for (long i = 0; i < m; i++) mine[j * m + i] += (double)rows[i * apart + at + k] * vectors[j][at + k];
        }
        free(packed);
    }
    for (int thread = 0; thread < threads; thread++)
        for (long e = 0; e < m * count; e++) out[e] += sums[(size_t)thread * m * count + e];
    free(sums);
    return poor;
}

/* u = p + sum_j share[j] row[j] over `count` rows, summed in float64. */
void combined(long length, const float *p, long count, const float *const *row, const double *share, float *u, int threads) {
    enum { SHORT = 256 }; /* entries of a row at a time; with 1024 it takes a quarter longer */
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long at = 0; at < length; at += SHORT) {
        long here = least(SHORT, length - at);
        double sum[SHORT];
        for (long k = 0; k < here; k++) sum[k] = p[at + k];
        for (long j = 0; j < count; j++)
            for (long k = 0; k < here; k++) sum[k] += share[j] * row[j][at + k];
        for (long k = 0; k < here; k++) u[at + k] = (float)sum[k];
    }
}
