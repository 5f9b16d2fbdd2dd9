/* The two products of attention on packed groups of 16 tokens, for a tile of query rows.
 *
 * `groups` has num_groups valid entries and LOOKAHEAD more that may be prefetched or read, but not used.
 */
#ifndef HEADRACE_ATTENTION_KERNELS_H
#define HEADRACE_ATTENTION_KERNELS_H

#include "attention.h"

#define LOOKAHEAD 4
#define ROUND_UP(x, n) (((x) + (n) - 1) / (n) * (n))

struct attn_shape {
    int dtype, dim, v_dim;
    int q_stride; /* elements from query row to query row: dim rounded up to 32 */
    int o_stride; /* floats from output row to output row: v_dim rounded up to 16 */
};

/* scores[row][16 g + t] = query[row] . key[g][t]; scores are SPAN apart. Up to the next multiple of 4 groups is written. */
void attn_scores(const struct attn_shape *shape, const void *query, int num_rows, const void *const *groups, int num_groups, float *scores);

/* out[row] += sum over g, t of weights[row][16 g + t] value[g][t]; weights are of the cache's dtype and SPAN apart. */
void attn_values(const struct attn_shape *shape, const void *weights, int num_rows, const void *const *groups, int num_groups, float *out);

#endif
