/* What the parts of attention share: the two products on packed groups of 16 tokens, for the rows of one KV head, and sizes. */
#ifndef HEADRACE_ATTENTION_KERNELS_H
#define HEADRACE_ATTENTION_KERNELS_H

#include "attention.h"

#define MAX_DEPTH 32     /* of `attn_shape.depth` */
#define GROUPS_AT_ONCE 4 /* this many groups' scores are computed together; pointers to groups are kept in multiples of it */
#define ROUND_UP(x, n) (((x) + (n) - 1) / (n) * (n))

struct attn_shape {
    int dtype;    /* of query rows and weights */
    int kv_dtype; /* of the groups of keys and values */
    int dim, v_dim;
    int depth;    /* tokens whose values are weighed together: 32 where blocks hold multiples of it, else a group */
    int q_stride; /* elements from query row to query row: dim rounded up to 32 */
    int o_stride; /* floats from output row to output row: v_dim rounded up to 16 */
};

/* The dtype of query rows and weights: bfloat16 only where the kernels multiply it as it is. */
int attn_dtype(const struct attn_layer *layer);

/* Prepares the thread's tile unit for so many rows; attn_finish releases it. */
void attn_prepare(int num_rows);
void attn_finish(void);

/* scores[row][16 g + t] = query[row] . key[g][t] for GROUPS_AT_ONCE groups; scores are SPAN_STRIDE apart. */
void attn_scores(const struct attn_shape *shape, const void *query, int num_rows, const void *const *groups, float *scores);

/* out[row] += sum over i, t of weights[row][depth i + t] value[i][t], t < depth; weights are SPAN_STRIDE apart. */
void attn_values(const struct attn_shape *shape, const void *weights, int num_rows, const void *const *values, int count, float *out);

/* Bytes that each thread needs for itself. */
int64_t attn_scratch_bytes(const struct attn_layer *layer);

static inline int64_t attn_align(int64_t bytes) { return ROUND_UP(bytes, (int64_t)CACHE_LINE); }

/* Position of the first of a sequence's queries. */
static inline int attn_first_position(const struct attn_batch *batch, int seq) {
    return batch->seq_lens[seq] - (batch->query_start[seq + 1] - batch->query_start[seq]);
}

/* Where to start so that a query at that position, or later, misses none of its keys: a multiple of MAX_DEPTH. */
static inline int attn_first_key(const struct attn_layer *layer, int position) {
    int first = layer->window > 0 ? position - layer->window + 1 : 0;
    return first > 0 ? first / MAX_DEPTH * MAX_DEPTH : 0;
}

#endif
