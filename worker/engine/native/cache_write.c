/* Keys and values of a step into the packed cache (layout: attention.h). */
#include "int8_cache.h"

/* A token's place: its group within (block, head), and its index in the group. */
struct place { int64_t group_row; int token; };

static struct place place_of(const struct attn_layer *layer, int64_t slot, int head) {
    int64_t block = slot / layer->block_size, offset = slot % layer->block_size;
    int64_t row = (block * layer->num_kv_heads + head) * layer->block_size + offset;
    return (struct place){row / GROUP * GROUP, (int)(row % GROUP)};
}

static void write_bf16(const struct attn_layer *layer, struct place at, const bf16 *key, const bf16 *value) {
    uint32_t *k = (uint32_t *)((bf16 *)layer->k_cache + at.group_row * layer->head_dim) + at.token;
    bf16 *v = (bf16 *)layer->v_cache + (at.group_row + at.token / 2 * 2) * layer->v_dim + at.token % 2;
    for (int d = 0; d < layer->head_dim / 2; d++) memcpy(k + d * GROUP, key + 2 * d, sizeof *k);
    for (int d = 0; d < layer->v_dim; d++) v[2 * d] = value[d];
}

static void write_f32(const struct attn_layer *layer, struct place at, const float *key, const float *value) {
    float *k = (float *)layer->k_cache + at.group_row * layer->head_dim + at.token;
    for (int d = 0; d < layer->head_dim; d++) k[d * GROUP] = key[d];
    memcpy((float *)layer->v_cache + (at.group_row + at.token) * layer->v_dim, value, (size_t)layer->v_dim * sizeof *value);
}

static void write_int8(const struct attn_layer *layer, struct place at, const void *key, const void *value) {
    int8_t *keys = (int8_t *)layer->k_cache + at.group_row * cache_row_bytes(layer, layer->head_dim);
    int8_t *values = (int8_t *)layer->v_cache + at.group_row * cache_row_bytes(layer, layer->v_dim);
    int8_write_key(keys, at.token, key, layer->head_dim, layer->dtype);
    int8_write_value(values, at.token, value, layer->v_dim, layer->dtype);
}

static void write_token(const struct attn_layer *layer, int64_t slot, const void *key, const void *value) {
    for (int head = 0; head < layer->num_kv_heads; head++) {
        struct place at = place_of(layer, slot, head);
        int64_t size = layer->dtype == DTYPE_F32 ? sizeof(float) : sizeof(bf16);
        const void *k = (const char *)key + head * layer->head_dim * size, *v = (const char *)value + head * layer->v_dim * size;
        if (layer->int8_cache) write_int8(layer, at, k, v);
        else if (layer->dtype == DTYPE_F32) write_f32(layer, at, k, v);
        else write_bf16(layer, at, k, v);
    }
}

void attn_write(const struct attn_layer *layer, const struct attn_batch *batch, const void *key, int64_t key_stride, const void *value,
                int64_t value_stride, int begin, int end) {
    int64_t size = layer->dtype == DTYPE_F32 ? 4 : 2;
    for (int64_t t = begin; t < end; t++) {
        const char *k = (const char *)key + t * key_stride * size, *v = (const char *)value + t * value_stride * size;
        if (batch->slots[t] >= 0) write_token(layer, batch->slots[t], k, v);
    }
}
