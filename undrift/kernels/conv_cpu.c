/* A convolution, a ReLU and 2 x 2 max-pooling, forwards and backwards, for one client: part of the pass of dense_cpu.c.

   All arrays are transposed, [channel][row][column][sample]: a register holds the same place of LANES samples, so rows and channels
   need no padding to the register's width. The values before pooling are never written. */

#include "conv_cpu.h"
#include "lanes.h"
#include <string.h>

#ifdef __AVX512F__
enum { MOST = 6, SIDE = 4 }; /* 6 channels x 4 places, 4 channels x 5 kernel columns: 20 to 24 sums in 32 registers */
#else
enum { MOST = 3, SIDE = 2 }; /* 10 to 12 sums in 16 registers */
#endif
enum { NOWHERE = 4 }; /* the largest of the four is not above zero: its gradient is zero */

typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINED vector either(integers which, vector a, vector b) { return (vector)((which & (integers)a) | (~which & (integers)b)); }

/* Outputs 0 to R - 1 in one pooled place: the largest of four, its index, and ReLU. */
INLINED void forward(int R, int K, const block *b, const float *in, const float *w, const float *bias, float *out, long out_plane,
                     uint8_t *place, long place_plane, long width) {
    long row = b->wide * width, plane = b->high * row, own = b->channels * K * K;
    vector sum[MOST][4];
    for (int r = 0; r < R; r++)
        for (int q = 0; q < 4; q++) sum[r][q] = (vector){} + (bias ? bias[r] : 0.0f);
    for (long c = 0; c < b->channels; c++)
        for (int i = 0; i < K; i++) {
            const float *at = in + c * plane + i * row, *weight = w + (c * K + i) * K;
            for (int j = 0; j < K; j++, at += width) {
                vector v[4] = {load(at), load(at + width), load(at + row), load(at + row + width)};
                for (int r = 0; r < R; r++)
                    for (int q = 0; q < 4; q++) sum[r][q] += weight[r * own + j] * v[q];
            }
        }
    for (int r = 0; r < R; r++) {
        vector largest = sum[r][0];
        integers where = {};
        for (int q = 1; q < 4; q++) {
            integers more = (sum[r][q] > largest) | (sum[r][q] != sum[r][q]); /* NaN is the largest of all */
            largest = either(more, sum[r][q], largest);
            where = (more & q) | (~more & where);
        }
        integers none = largest <= 0.0f;
        store(out + r * out_plane, either(none, (vector){}, largest));
        *(bytes *)(place + r * place_plane) = __builtin_convertvector((none & NOWHERE) | (~none & where), bytes);
    }
}

/* sums[r][j] = sum of dz[r] times the input under column j of a kernel row, for R outputs, over all places and samples. */
INLINED void under(int R, int K, long high, long wide, long width, const float *dz, long dz_row, long dz_plane, const float *in,
                   long in_row, float sums[SIDE][K]) {
    vector sum[SIDE][5];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < K; j++) sum[r][j] = (vector){};
    for (long y = 0; y < high; y++)
        for (long e = 0; e < wide * width; e += LANES) {
            vector d[SIDE];
            for (int r = 0; r < R; r++) d[r] = load(dz + r * dz_plane + y * dz_row + e);
            for (int j = 0; j < K; j++) {
                vector v = load(in + y * in_row + j * width + e);
                for (int r = 0; r < R; r++) sum[r][j] += d[r] * v;
            }
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < K; j++) {
            sums[r][j] = 0.0f;
            for (int q = 0; q < LANES; q++) sums[r][j] += sum[r][j][q];
        }
}

/* The gradient of R input channels in P adjacent places. */
INLINED void back(int R, int P, int K, const block *b, long y, const float *dz, long dz_row, long dz_plane, const float *w,
                  float *before, long before_plane, long width) {
    long high = 2 * rows_out(b), own = b->channels * K * K;
    vector sum[MOST][4];
    for (int r = 0; r < R; r++)
        for (int q = 0; q < P; q++) sum[r][q] = (vector){};
    for (long o = 0; o < b->outputs; o++)
        for (int i = 0; i < K; i++) {
            if (y - i < 0 || y - i >= high) continue;
            const float *at = dz + o * dz_plane + (y - i) * dz_row, *weight = w + o * own + i * K;
            for (int j = 0; j < K; j++) {
                vector v[4];
                for (int q = 0; q < P; q++) v[q] = load(at + (K - 1 - j + q) * width);
                for (int r = 0; r < R; r++)
                    for (int q = 0; q < P; q++) sum[r][q] += weight[r * K * K + j] * v[q];
            }
        }
    for (int r = 0; r < R; r++)
        for (int q = 0; q < P; q++) store(before + r * before_plane + q * width, sum[r][q]);
}

/* All outputs, for a kernel size known to the compiler. */
INLINED void all_forward(int K, const block *b, const float *in, const float *w, float *out, long out_row, long out_plane,
                         uint8_t *place, long width) {
    long own = b->channels * K * K, rows = rows_out(b), columns = columns_out(b), marks = rows * columns * width;
    const float *bias = b->biased ? w + b->outputs * own : NULL;
    for (long e = 0; e < width; e += LANES)
        for (long o = 0, R; o < b->outputs; o += R) {
            R = b->outputs - o >= MOST ? MOST : b->outputs - o >= 2 ? 2 : 1;
            const float *weights = w + o * own, *biases = bias ? bias + o : NULL;
            for (long y = 0; y < rows; y++)
                for (long x = 0; x < columns; x++) {
                    const float *from = in + (2 * y * b->wide + 2 * x) * width + e;
                    float *to = out + o * out_plane + y * out_row + x * width + e;
                    uint8_t *mark = place + o * marks + (y * columns + x) * width + e;
                    if (R == MOST) forward(MOST, K, b, from, weights, biases, to, out_plane, mark, marks, width);
                    else if (R == 2) forward(2, K, b, from, weights, biases, to, out_plane, mark, marks, width);
                    else forward(1, K, b, from, weights, biases, to, out_plane, mark, marks, width);
                }
        }
}

/* The gradient of the kernels, or with a rate the step. */
INLINED void kernels_back(int K, const block *b, const float *in, const float *x, const float *dz, const float *rate, float *g,
                          long width) {
    long dz_row = columns_back(b) * width, dz_plane = 2 * rows_out(b) * dz_row, in_row = b->wide * width;
    for (long o = 0, R; o < b->outputs; o += R) {
        R = b->outputs - o >= SIDE ? SIDE : 1;
        for (long c = 0; c < b->channels; c++)
            for (long i = 0; i < K; i++) {
                const float *d = dz + o * dz_plane + (K - 1) * width, *from = in + (c * b->high + i) * in_row;
                float sums[SIDE][K];
                if (R == SIDE) under(SIDE, K, 2 * rows_out(b), 2 * columns_out(b), width, d, dz_row, dz_plane, from, in_row, sums);
                else under(1, K, 2 * rows_out(b), 2 * columns_out(b), width, d, dz_row, dz_plane, from, in_row, sums);
                for (long r = 0; r < R; r++)
                    for (long j = 0; j < K; j++) {
                        long at = (((o + r) * b->channels + c) * K + i) * K + j;
                        g[at] = rate ? x[at] - *rate * sums[r][j] : sums[r][j];
                    }
            }
    }
}

/* The gradient of the input without its padding, [channels][rows][columns][width]. */
INLINED void inputs_back(int K, const block *b, const float *w, const float *dz, float *before, long width) {
    long dz_row = columns_back(b) * width, dz_plane = 2 * rows_out(b) * dz_row, pad = b->padding;
    long rows = b->high - 2 * pad, columns = b->wide - 2 * pad, plane = rows * columns * width;
    for (long c = 0, R; c < b->channels; c += R) {
        R = b->channels - c >= MOST ? MOST : b->channels - c >= 2 ? 2 : 1;
        const float *weights = w + c * K * K;
        for (long y = 0; y < rows; y++)
            for (long x = 0, P; x < columns; x += P) {
                P = columns - x >= 4 ? 4 : 1;
                for (long e = 0; e < width; e += LANES) {
                    const float *from = dz + (x + pad) * width + e;
                    float *to = before + c * plane + (y * columns + x) * width + e;
                    if (R == MOST && P == 4) back(MOST, 4, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                    else if (R == MOST) back(MOST, 1, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                    else if (R == 2 && P == 4) back(2, 4, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                    else if (R == 2) back(2, 1, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                    else if (P == 4) back(1, 4, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                    else back(1, 1, K, b, y + pad, from, dz_row, dz_plane, weights, to, plane, width);
                }
            }
    }
}

void pooled_forward(const block *b, const float *in, const float *w, float *out, long out_row, long out_plane, uint8_t *place,
                    long width) {
    if (b->kernel == 5) all_forward(5, b, in, w, out, out_row, out_plane, place, width);
    else all_forward(3, b, in, w, out, out_row, out_plane, place, width);
}

void pooled_backward(const block *b, const float *in, const float *x, const float *d, const uint8_t *place, float *dz,
                     const float *rate, float *g, float *before, long width) {
    long rows = rows_out(b), columns = columns_out(b), wide = columns_back(b), side = (b->kernel - 1) * width;
    /* The gradient before pooling and ReLU: d at the largest value, zero elsewhere. */
    for (long o = 0; o < b->outputs; o++) {
        vector total = {};
        for (long y = 0; y < 2 * rows; y++) {
            float *line = dz + (o * 2 * rows + y) * wide * width;
            memset(line, 0, side * sizeof(float));
            memset(line + side + 2 * columns * width, 0, ((wide - 2 * columns) * width - side) * sizeof(float));
            for (long p = 0; p < columns * width; p += LANES) {
                long at = (o * rows + y / 2) * columns * width + p;
                integers where = __builtin_convertvector(*(const bytes *)(place + at), integers);
                float *to = line + side + 2 * (p / width) * width + p % width;
                for (int q = 0; q < 2; q++) {
                    vector v = either(where == (int)(2 * (y % 2) + q), load(d + at), (vector){});
                    store(to + q * width, v);
                    total += v;
                }
            }
        }
        if (b->biased) {
            float sum = 0.0f;
            for (int q = 0; q < LANES; q++) sum += total[q];
            long at = b->outputs * b->channels * b->kernel * b->kernel + o;
            g[at] = rate ? x[at] - *rate * sum : sum;
        }
    }
    if (b->kernel == 5) kernels_back(5, b, in, x, dz, rate, g, width);
    else kernels_back(3, b, in, x, dz, rate, g, width);
    if (before && b->kernel == 5) inputs_back(5, b, x, dz, before, width);
    else if (before) inputs_back(3, b, x, dz, before, width);
}
