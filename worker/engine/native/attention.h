/* Attention of one layer for a ragged batch, straight through block tables.
 *
 * Cache layout. A block holds, for each KV head, groups of 16 tokens:
 *   keys    bfloat16 [group][head_dim / 2][16 tokens][2 dims]     float32 [group][head_dim][16 tokens]
 *   values  bfloat16 [group][8][v_dim][2 tokens]                  float32 [group][16 tokens][v_dim]
 * so that a group of keys is the second operand of a tile product over dims, and a group of values, or two that lie
 * in a block together, the one over tokens. A cache of int8 is laid out in int8_cache.h; its groups are made into groups as above
 * before the kernels read them. Only the inside of a (block, head) is permuted: copying whole blocks needs no knowledge of it.
 */
#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include <stdint.h>

#include "team.h"
#include "vec.h"

#define GROUP 16          /* tokens in a group */
#define MAX_ROWS 32       /* rows of a tile: (query, head) pairs computed together */
#define SPAN 512          /* tokens whose scores are held at once */
#define SPAN_STRIDE (SPAN + 16) /* from row to row of scores: rows a power of two apart would share cache sets */
#define MIN_SPLIT 512     /* a sequence is split over threads only into parts at least this long */

enum dtype { DTYPE_BF16 = 0, DTYPE_F32 = 1 };

/* One layer. Mirrored by `LayerStruct` in library.py. */
struct attn_layer {
    void *k_cache, *v_cache;
    const float *sinks; /* [num_heads], or NULL */
    int32_t dtype, num_heads, num_kv_heads, head_dim, v_dim, block_size;
    int32_t window; /* keys at position > query - window; 0: all */
    float scale;
    float softcap; /* 0: none */
    int32_t int8_cache; /* the cache holds int8, whatever dtype attention computes in */
};

/* One step. Mirrored by `BatchStruct` in library.py. */
struct attn_batch {
    const int32_t *query_start; /* [num_seqs + 1] */
    const int32_t *seq_lens;    /* [num_seqs], including this step's tokens */
    const int32_t *block_tables;
    const int64_t *slots; /* [num_tokens]; negative: not written */
    int64_t table_stride;
    int32_t num_seqs, num_tokens;
};

/* Rows of one sequence, for some of its KV heads, against a range of its keys. A row is a (query, head of the KV head's group),
 * heads fastest; a tile holds the rows of the first KV head, then those of the second, and so on. */
struct attn_item {
    int32_t seq, row, num_rows;     /* num_rows for each KV head */
    int32_t kv_head, num_kv_heads;
    int32_t kv_begin, kv_end;
    int32_t part, num_parts;        /* of a range that is split: which, and of how many (1: not split) */
    int32_t split, first_partial;   /* of a split range: its number, and where its partial results begin */
};

struct attn_plan {
    struct attn_item *items;
    int32_t num_items, num_parts, num_splits;
    float *partial;         /* [num_parts][MAX_ROWS][v_dim + 2] */
    atomic_int *unfinished; /* [num_splits] */
    char *scratch;          /* one piece per thread */
    int64_t scratch_bytes;
};

/* Bytes of workspace for any step of at most that many sequences and tokens. */
int64_t attn_workspace_bytes(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int32_t num_threads);

/* Lays the plan of a step out in `workspace` (64-byte aligned). Run by one thread. It serves all layers of the same shape
 * whose window is no wider than this one's. */
void attn_plan(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, char *workspace, struct attn_plan *plan);

/* Keys and values of this step's tokens [begin, end) into the cache. Rows lie `stride` elements apart. */
void attn_write(const struct attn_layer *layer, const struct attn_batch *batch, const void *key, int64_t key_stride, const void *value,
                int64_t value_stride, int begin, int end);

/* Phase: attention over what the cache holds; out [num_tokens][num_heads][v_dim]. Needs a barrier before and after. */
void attn_run(const struct attn_layer *layer, const struct attn_batch *batch, const struct attn_plan *plan, const void *query,
              int64_t query_stride, void *out, int64_t out_stride, struct team *team, int tid);

#endif
