/* The likely tokens of rows of logits: the few that nearly all draws are decided among. */
#ifndef HEADRACE_LIKELY_TOKENS_H
#define HEADRACE_LIKELY_TOKENS_H

#include <stdint.h>

/* Mirrored by `LikelyTokensStruct` in library.py. */
struct likely_tokens {
    const float *logits;                    /* [num_rows][vocab], no NaN, no +inf */
    const float *top, *temperature, *floor; /* [num_rows]; top: each row's largest logit, finite */
    int64_t *count;                         /* [num_rows]: tokens with logits >= floor */
    double *tail;                           /* [num_rows]: sum of the weights exp((logit - top) / temperature) of all others */
    const int64_t *begin;                   /* [num_rows]: where in the following a row's tokens are listed, in order */
    int64_t *tokens;
    float *values, *weights;                /* their logits and weights */
    int32_t num_rows, vocab;
};

/* Count and tail of a row. */
void measure_likely_tokens(const struct likely_tokens *likely, int row);

/* Its tokens, values and weights. */
void list_likely_tokens(const struct likely_tokens *likely, int row);

#endif
