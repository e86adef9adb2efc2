/* The gradient of dense layers with BatchNorms, ReLUs and cross-entropy, for stacked clients, optionally after convolutions (conv_cpu.c).

   Called by dense_cpu.py; the plain form is Chain.gradient of chain.py. A thread takes one client at a time, whose tensors stay in
   its core's cache, and writes the layers' gradients into the vector. Activations are transposed, [neuron][sample]. */

#include "lanes.h"
#include "conv_cpu.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { ROWS = 6, WIDE = 4, OUTER_ROWS = 8, OUTER_WIDE = 3 }; /* 24 sums in 32 registers */
#else
enum { ROWS = 6, WIDE = 2, OUTER_ROWS = 6, OUTER_WIDE = 2 }; /* 12 sums in 16 registers */
#endif

/* out[r][..] = bias[r] + sum_k w(r, k) in[k][..] for R rows and C vectors; w(r, k) lies at w[r * down + k * right]. */
INLINED void panel(int R, int C, long n, const float *w, long down, long right, const float *in, const float *bias,
                   float *out, long width) {
    vector sum[ROWS][WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = (vector){} + (bias ? bias[r] : 0.0f);
    for (long k = 0; k < n; k++) {
        vector v[WIDE];
        if (right == 1 && k % 16 == 0)
            for (int r = 0; r < R; r++) __builtin_prefetch(w + (R + r) * down + k); /* the next rows */
        for (int c = 0; c < C; c++) v[c] = load(in + k * width + LANES * c);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] += w[r * down + k * right] * v[c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * width + LANES * c, sum[r][c]);
}

/* out [rows][width] = w in + bias for in [n][width]: a layer's output, or with w transposed its input's gradient. */
static void times(long rows, long n, const float *w, long down, long right, const float *in, const float *bias, float *out,
                  long width) {
    for (long c = 0; c < width; c += LANES * WIDE) {
        long wide = least(WIDE, (width - c) / LANES);
        for (long r = 0, step; r < rows; r += step) {
            step = rows - r >= ROWS ? ROWS : 1;
            const float *a = w + r * down, *b = bias ? bias + r : NULL;
            float *o = out + r * width + c;
            if (step == ROWS && wide == WIDE) panel(ROWS, WIDE, n, a, down, right, in + c, b, o, width);
            else if (step == 1 && wide == WIDE) panel(1, WIDE, n, a, down, right, in + c, b, o, width);
            else
                for (long one = 0; one < wide; one++) {
                    if (step == ROWS) panel(ROWS, 1, n, a, down, right, in + c + LANES * one, b, o + LANES * one, width);
                    else panel(1, 1, n, a, down, right, in + c + LANES * one, b, o + LANES * one, width);
                }
        }
    }
}

/* g[r][..] = sum_b d[r][b] h[b][..] for R rows and C vectors, or with `x` the step x[r][..] - rate times that. */
INLINED void outer(int R, int C, long batch, const float *d, long width, const float *h, long h_apart, const float *x,
                   float rate, float *g, long g_apart) {
    vector sum[OUTER_ROWS][OUTER_WIDE];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            sum[r][c] = (vector){};
            __builtin_prefetch(g + r * g_apart + LANES * c, 1); /* written at the end */
            if (x) __builtin_prefetch(x + r * g_apart + LANES * c);
        }
    for (long b = 0; b < batch; b++) {
        vector v[OUTER_WIDE];
        for (int c = 0; c < C; c++) v[c] = load(h + b * h_apart + LANES * c);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sum[r][c] += d[r * width + b] * v[c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            long at = r * g_apart + LANES * c;
            store(g + at, x ? load(x + at) - rate * sum[r][c] : sum[r][c]);
        }
}

/* g [rows][n] = d h for d [rows][width] and h [batch][n]: the gradient of a layer's weights, or with `x` the step. */
static void weights(long rows, long n, long batch, const float *d, long width, const float *h, const float *x, float rate,
                    float *g, float *spare) {
    long whole = n / LANES * LANES; /* the other columns are padded to a vector */
    for (long b = 0; b < batch; b++)
        for (long c = 0; c < LANES; c++) spare[b * LANES + c] = whole + c < n ? h[b * n + whole + c] : 0.0f;
    for (long r = 0, step; r < rows; r += step) {
        step = rows - r >= OUTER_ROWS ? OUTER_ROWS : 1;
        const float *dr = d + r * width;
        for (long i = 0, wide; i < n; i += wide) {
            wide = n - i >= LANES * OUTER_WIDE ? LANES * OUTER_WIDE : least(LANES, n - i);
            const float *own = x ? x + r * n + i : NULL;
            float *to = g + r * n + i, some[OUTER_ROWS * LANES];
            if (wide < LANES) {
                if (step == OUTER_ROWS) outer(OUTER_ROWS, 1, batch, dr, width, spare, LANES, NULL, 0.0f, some, LANES);
                else outer(1, 1, batch, dr, width, spare, LANES, NULL, 0.0f, some, LANES);
                for (long q = 0; q < step; q++)
                    for (long c = 0; c < wide; c++)
                        to[q * n + c] = x ? own[q * n + c] - rate * some[q * LANES + c] : some[q * LANES + c];
            } else if (step == OUTER_ROWS && wide > LANES)
                outer(OUTER_ROWS, OUTER_WIDE, batch, dr, width, h + i, n, own, rate, to, n);
            else if (step == OUTER_ROWS) outer(OUTER_ROWS, 1, batch, dr, width, h + i, n, own, rate, to, n);
            else if (wide > LANES) outer(1, OUTER_WIDE, batch, dr, width, h + i, n, own, rate, to, n);
            else outer(1, 1, batch, dr, width, h + i, n, own, rate, to, n);
        }
    }
}

/* Transpose: to [columns][to_apart] = from [rows][from_apart]. */
static void turn(long rows, long columns, const float *from, long from_apart, float *to, long to_apart) {
    for (long r = 0; r < rows; r += 16)
        for (long c = 0; c < columns; c += 16)
            for (long i = r; i < least(r + 16, rows); i++)
                for (long j = c; j < least(c + 16, columns); j++) to[j * to_apart + i] = from[i * from_apart + j];
}

/* The mean cross-entropy over the labels of the real samples of z [classes][width], its gradient d, and *wrong = 1 for an invalid label. */
static float cross_entropy(long classes, long batch, long width, const float *z, const int64_t *label, const float *real,
                           float *d, int *wrong) {
    const int64_t ignored = -100;
    float count = 0.0f;
    for (long b = 0; b < batch; b++) count += label[b] != ignored && (!real || real[b] > 0.0f);
    double loss = 0.0;
    memset(d, 0, classes * width * sizeof(float));
    for (long b = 0; b < batch; b++) {
        if (label[b] != ignored && (label[b] < 0 || label[b] >= classes)) *wrong = 1;
        else if (label[b] != ignored && (!real || real[b] > 0.0f)) {
            float largest = z[b], total = 0.0f;
            for (long c = 1; c < classes; c++) largest = z[c * width + b] > largest ? z[c * width + b] : largest;
            for (long c = 0; c < classes; c++) total += d[c * width + b] = expf(z[c * width + b] - largest);
            loss += logf(total) + (largest - z[label[b] * width + b]);
            float share = 1.0f / (count > 1.0f ? count : 1.0f);
            for (long c = 0; c < classes; c++) d[c * width + b] *= share / total;
            d[label[b] * width + b] -= share;
        }
    }
    return (float)(loss / (count > 1.0f ? count : 1.0f));
}

/* A layer's BatchNorm; eps < 0: there is none. */
typedef struct {
    float eps, momentum;
} norm;

INLINED float dot(long width, const float *a, const float *b) {
    vector sums = {};
    float sum = 0.0f;
    for (long i = 0; i < width; i += LANES) sums += load(a + i) * load(b + i);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

static float count(long width, const float *there) {
    float n = 0.0f;
    for (long b = 0; b < width; b++) n += there[b];
    return n;
}

/* BatchNorm over the samples that are there (1, else 0) of z [rows][width]: afterwards z is scale * unit + shift, unit [rows][width]
   is normalised, and inverse [rows] is 1 / the deviation. statistics: running mean [rows], running variance [rows], batches seen. */
static void normalise(norm how, long rows, long width, const float *there, const float *scale, float *z, float *unit,
                      float *inverse, float *statistics) {
    const float *shift = scale + rows;
    float n = count(width, there), each = 1.0f / (n > 1.0f ? n : 1.0f), unbiased = n / (n > 2.0f ? n - 1.0f : 1.0f);
    for (long r = 0; r < rows; r++, z += width, unit += width) {
        float mean = each * dot(width, z, there);
        for (long b = 0; b < width; b++) unit[b] = there[b] * (z[b] - mean);
        float var = each * dot(width, unit, unit);
        inverse[r] = 1.0f / sqrtf(var + how.eps);
        for (long b = 0; b < width; b++) unit[b] *= inverse[r];
        for (long b = 0; b < width; b++) z[b] = scale[r] * unit[b] + shift[r];
        statistics[r] += how.momentum * (mean - statistics[r]);
        statistics[rows + r] += how.momentum * (var * unbiased - statistics[rows + r]);
    }
    statistics[2 * rows] += 1.0f;
}

/* Turn the gradient d [rows][width] of a BatchNorm's output into that of its input; g: scales and shifts, or with a rate their steps. */
static void normalise_back(long rows, long width, const float *there, const float *scale, const float *unit,
                           const float *inverse, const float *rate, float *d, float *g) {
    float n = count(width, there), each = 1.0f / (n > 1.0f ? n : 1.0f);
    for (long r = 0; r < rows; r++, d += width, unit += width) {
        float along = dot(width, d, unit), sum = dot(width, d, there), factor = scale[r] * inverse[r];
        for (long b = 0; b < width; b++) d[b] = factor * (d[b] - there[b] * each * (sum + unit[b] * along));
        g[r] = rate ? scale[r] - *rate * along : along;
        g[rows + r] = rate ? scale[rows + r] - *rate * sum : sum;
    }
}

/* The buffers of a thread. */
typedef struct {
    float *pictures;                      /* the inputs of all blocks, with their padding */
    float *turned;                        /* the inputs of all dense layers and the last one's output */
    float *d, *before, *upright, *spare;  /* any layer's output; any layer's input; the same; a vector of each sample */
    float *dz;                            /* any block's gradient before pooling */
    float *unit, *inverse, *there;        /* what all BatchNorms normalised, and their factors; 1 for a sample, 0 for padding */
    uint8_t *places;                      /* indices of the pooled values of all blocks */
} room;

/* Transpose the pictures [batch][channels][rows][columns] into the padded input of the first block. */
static void turn_pictures(const block *b, long batch, const float *input, float *to, long width) {
    long pad = b->padding, rows = b->high - 2 * pad, columns = b->wide - 2 * pad, size = b->channels * rows * columns;
    for (long c = 0; c < b->channels; c++)
        for (long y = 0; y < rows; y++)
            turn(batch, columns, input + (c * rows + y) * columns, size,
                 to + ((c * b->high + y + pad) * b->wide + pad) * width, width);
}

static long entries(const block *b) { return b->outputs * (b->channels * b->kernel * b->kernel + b->biased); }
static long own_size(const long *size, int biased, norm how) {
    return size[0] * size[1] + (biased ? size[1] : 0) + (how.eps < 0.0f ? 0 : 2 * size[1]);
}
static long places(const block *b) { return b->outputs * rows_out(b) * columns_out(b); }

/* One client: returns its loss and writes g, the gradient or with a rate (not NULL) the step x - rate g. */
static float one(long blocks, const block *shape, long layers, const long *size, const uint8_t *biased, const norm *norms,
                 const uint8_t *relu, long batch, long width, const float *x, const float *input, const int64_t *label,
                 const float *real, const float *rate, float *statistics, float *g, room at, int *wrong) {
    const float *own = x;
    float *unit = at.unit, *inverse = at.inverse, *in = at.turned, *d = at.d, *before = at.before, *picture = at.pictures;
    uint8_t *place = at.places;
    for (long b = 0; b < width; b++) at.there[b] = b < batch ? (real ? real[b] : 1.0f) : 0.0f;
    if (blocks) turn_pictures(shape, batch, input, picture, width);
    else turn(batch, size[0], input, size[0], in, width);
    for (const block *b = shape; b < shape + blocks; own += entries(b), place += places(b) * width, b++) {
        float *next = picture + b->channels * b->high * b->wide * width;
        if (b + 1 < shape + blocks) {
            long row = b[1].wide * width, corner = b[1].padding * (row + width);
            pooled_forward(b, picture, own, next + corner, row, b[1].high * row, place, width);
        } else pooled_forward(b, picture, own, in, columns_out(b) * width, rows_out(b) * columns_out(b) * width, place, width);
        picture = next;
    }
    for (long n = 0; n < layers; n++) {
        const float *bias = biased[n] ? own + size[n] * size[n + 1] : NULL;
        float *out = in + size[n] * width;
        times(size[n + 1], size[n], own, size[n], 1, in, bias, out, width);
        if (norms[n].eps >= 0.0f) {
            const float *scale = own + size[n] * size[n + 1] + (biased[n] ? size[n + 1] : 0);
            normalise(norms[n], size[n + 1], width, at.there, scale, out, unit, inverse, statistics);
            statistics += 2 * size[n + 1] + 1, unit += size[n + 1] * width, inverse += size[n + 1];
        }
        if (relu[n])
            for (long e = 0; e < size[n + 1] * width; e++) out[e] = out[e] < 0.0f ? 0.0f : out[e]; /* NaN stays */
        own += own_size(size + n, biased[n], norms[n]);
        in = out;
    }
    float loss = cross_entropy(size[layers], batch, width, in, label, real, d, wrong), *swapped;
    for (long n = layers - 1; n >= 0; n--) {
        long outputs = size[n + 1], inputs = size[n], first = !n && !blocks;
        own -= own_size(size + n, biased[n], norms[n]);
        in -= inputs * width;
        float *to = g + (own - x);
        if (norms[n].eps >= 0.0f) {
            long scale = inputs * outputs + (biased[n] ? outputs : 0);
            unit -= outputs * width, inverse -= outputs;
            normalise_back(outputs, width, at.there, own + scale, unit, inverse, rate, d, to + scale);
        }
        if (!first) turn(inputs, batch, in, width, at.upright, inputs);
        weights(outputs, inputs, batch, d, width, first ? input : at.upright, rate ? own : NULL, rate ? *rate : 0.0f, to, at.spare);
        for (long r = 0; biased[n] && r < outputs; r++) {
            float sum = 0.0f;
            for (long b = 0; b < batch; b++) sum += d[r * width + b];
            long there = inputs * outputs + r;
            to[there] = rate ? own[there] - *rate * sum : sum;
        }
        if (first) break;
        times(inputs, outputs, own, 1, inputs, d, NULL, before, width);
        if (n && relu[n - 1])
            for (long e = 0; e < inputs * width; e++) before[e] = in[e] <= 0.0f ? 0.0f : before[e];
        swapped = d, d = before, before = swapped;
    }
    for (long n = blocks - 1; n >= 0; n--) {
        const block *b = shape + n;
        own -= entries(b), place -= places(b) * width, picture -= b->channels * b->high * b->wide * width;
        pooled_backward(b, picture, own, d, place, at.dz, rate, g + (own - x), n ? before : NULL, width);
        swapped = d, d = before, before = swapped;
    }
    return loss;
}

/* Gradients g [clients, ...], or with rates [clients] the steps, and losses [clients] at x [clients, ...] on inputs
   [clients][batch][...]; x_apart and g_apart are row strides. After the blocks, layer n has size[n] inputs, size[n + 1] outputs,
   biases if biased[n], a BatchNorm norms[n] and a ReLU if relu[n]; statistics [clients][kept] are the BatchNorms'. Returns 1 for an invalid label, 2 if memory runs out, else 0. */
int dense_gradient(long blocks, const block *shape, long layers, const long *size, const uint8_t *biased, const uint8_t *relu,
                   const norm *norms, long clients, long batch, const float *x, long x_apart, const float *inputs,
                   const int64_t *labels, const float *real, const float *rates, float *statistics, float *loss, float *g,
                   long g_apart, int threads) {
    long width = (batch + LANES - 1) / LANES * LANES, largest = 0, all = 0, pictures = 0, marks = 0, spread = 0;
    long kept = 0, normed = 0;
    for (long n = 0; n < layers; n++) {
        kept += norms[n].eps < 0.0f ? 0 : 2 * size[n + 1] + 1;
        normed += norms[n].eps < 0.0f ? 0 : size[n + 1];
    }
    for (long n = 0; n <= layers; n++) {
        all += size[n];
        largest = size[n] > largest ? size[n] : largest;
    }
    for (const block *b = shape; b < shape + blocks; b++) {
        long planes = b->channels * b->high * b->wide, before_pooling = b->outputs * 2 * rows_out(b) * columns_back(b);
        pictures += planes;
        marks += places(b);
        largest = b > shape && planes > largest ? planes : largest;
        spread = before_pooling > spread ? before_pooling : spread;
    }
    long taken = blocks ? shape->channels * (shape->high - 2 * shape->padding) * (shape->wide - 2 * shape->padding) : size[0];
    int wrong = 0, poor = 0;
#pragma omp parallel num_threads(threads) reduction(| : wrong, poor)
    {
        size_t floats = (size_t)width * (pictures + all + 3 * largest + LANES + spread + normed + 1) + normed;
        room at = {.pictures = malloc(floats * sizeof(float) + (size_t)width * marks)};
        at.turned = at.pictures + pictures * width;
        at.d = at.turned + all * width;
        at.before = at.d + largest * width;
        at.upright = at.before + largest * width;
        at.spare = at.upright + largest * width;
        at.dz = at.spare + LANES * width;
        at.unit = at.dz + spread * width;
        at.inverse = at.unit + normed * width;
        at.there = at.inverse + normed;
        at.places = (uint8_t *)(at.there + width);
        poor = !at.pictures;
        /* Zeros for padding, and for samples that only fill a vector. */
        if (!poor && (blocks || width > batch)) memset(at.pictures, 0, (pictures + size[0]) * width * sizeof(float));
#pragma omp for schedule(dynamic)
        for (long s = 0; s < clients; s++)
            if (!poor)
                loss[s] = one(blocks, shape, layers, size, biased, norms, relu, batch, width, x + s * x_apart,
                              inputs + s * batch * taken, labels + s * batch, real ? real + s * batch : NULL,
                              rates ? rates + s : NULL, statistics + s * kept, g + s * g_apart, at, &wrong);
        free(at.pictures);
    }
    return wrong ? 1 : poor ? 2 : 0;
}
