/* The running softmax of a tile's rows over one span of scores, in units of log2 (Milakov and Gimelshein, 2018). */
#ifndef HEADRACE_SOFTMAX_H
#define HEADRACE_SOFTMAX_H

#include "attention.h"

struct softmax {
    _Alignas(CACHE_LINE) float max[MAX_ROWS], sum[MAX_ROWS], shrink[MAX_ROWS];
    int32_t lo[MAX_ROWS], hi[MAX_ROWS]; /* columns of the span that each row sees */
};

/* Before the first span; `sink` is one more logit in each row's sum, already in the softmax's units, or -inf. */
void softmax_begin(struct softmax *state, int row, float sink);

/* Makes scores (SPAN_STRIDE apart; spoiled) of `width` columns into weights of `dtype`, 0 where a row sees nothing, and shrinks the
 * rows of `out` so far to the new maximum. Exact to the layer's dtype. */
void softmax_span(struct softmax *state, const struct attn_layer *layer, int dtype, int num_rows, int width, float *scores, void *weights,
                  float *out, int o_stride);

#endif
