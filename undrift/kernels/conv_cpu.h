/* A convolution, a ReLU and 2 x 2 max-pooling as one layer: conv_cpu.c. */

#ifndef UNDRIFT_POOLED
#define UNDRIFT_POOLED

#include <stdint.h>

typedef struct {
    long channels, high, wide; /* the input with its padding */
    long outputs, kernel, padding, biased;
} block;

/* Rows and columns of the output after pooling. */
static inline long rows_out(const block *b) { return (b->high - b->kernel + 1) / 2; }
static inline long columns_out(const block *b) { return (b->wide - b->kernel + 1) / 2; }
/* Columns of the gradient before pooling, with kernel - 1 zeros on both sides. */
static inline long columns_back(const block *b) { return b->wide + b->kernel - 1; }

void pooled_forward(const block *b, const float *in, const float *w, float *out, long out_row, long out_plane, uint8_t *place,
                    long width);
void pooled_backward(const block *b, const float *in, const float *x, const float *d, const uint8_t *place, float *dz,
                     const float *rate, float *g, float *before, long width);

#endif
