/* The heads of rows of logits: the few tokens that nearly all draws are decided among. */
#ifndef HEADRACE_HEADS_H
#define HEADRACE_HEADS_H

#include <stdint.h>

/* Mirrored by `HeadsStruct` in library.py. */
struct heads {
    const float *logits;                    /* [num_rows][vocab], no NaN, no +inf */
    const float *top, *temperature, *floor; /* [num_rows]; top: each row's largest logit, finite */
    int64_t *rows, *tokens;                 /* [num_rows * vocab], of which only the beginning is written: what is found, by row, then by token */
    float *values, *weights;                /* ditto: the logits, and exp((logit - top) / temperature) */
    int64_t *count;                         /* [num_rows]: tokens found, those with logits >= floor */
    double *tail;                           /* [num_rows]: sum of the weights of all others */
    int32_t num_rows, vocab;
};

/* A row's tokens, from row * vocab on. */
void find_head(const struct heads *heads, int row);

/* Moves what all rows found together. */
void join_heads(const struct heads *heads);

#endif
