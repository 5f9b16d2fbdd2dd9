/* Keys and values in int8: of each token and KV head one row of codes -127..127 and a float scale, largest magnitude / 127.
 *
 * A group of 16 tokens lies in one piece, whatever dtype attention computes in: codes of keys [dim][16 tokens], of values
 * [16 tokens][dim], then the tokens' 16 scales. A row with a NaN or an infinity has NaN for its scale.
 */
#ifndef HEADRACE_INT8_CACHE_H
#define HEADRACE_INT8_CACHE_H

#include "attention.h"

/* Bytes of a token's row of `dim` elements in the cache. */
static inline int64_t cache_row_bytes(const struct attn_layer *layer, int dim) {
    if (layer->int8_cache) return dim + (int64_t)sizeof(float);
    return dim * (layer->dtype == DTYPE_F32 ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16));
}

/* One token's row, of `dtype`, into its group. */
void int8_write_key(int8_t *group, int token, const void *key, int dim, enum dtype dtype);
void int8_write_value(int8_t *group, int token, const void *value, int dim, enum dtype dtype);

/* A group as the kernels read one of `dtype` (attention.h). */
void int8_read_keys(const int8_t *group, int dim, enum dtype dtype, void *out);
void int8_read_values(const int8_t *group, int dim, enum dtype dtype, void *out);

#endif
