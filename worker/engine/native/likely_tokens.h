/* The likely tokens of rows of logits: the few among which nearly all draws are decided. */
#ifndef HEADRACE_LIKELY_TOKENS_H
#define HEADRACE_LIKELY_TOKENS_H

#include <stdint.h>

/* Mirrored by `LikelyTokensStruct` in library.py. */
struct likely_tokens {
    const float *logits;                    /* [num_rows][vocab], no NaN, no +inf */
    const float *top, *temperature, *floor; /* [num_rows]; top: each row's largest logit, finite */
    int64_t *count;                         /* [num_rows]: tokens with logits >= floor */
    double *tail;                           /* [num_rows]: sum of the weights exp((logit - top) / temperature) of all others */
    const int64_t *begin;                   /* [num_rows]: where a row's tokens are listed, in order, in the following arrays */
    int64_t *tokens;
    float *values, *weights;                /* their logits and weights */
    int32_t num_rows, vocab;
};

/* Count and tail of a row. */
void measure_likely_tokens(const struct likely_tokens *likely, int row);

/* Its tokens, values and weights. */
void list_likely_tokens(const struct likely_tokens *likely, int row);

#endif
