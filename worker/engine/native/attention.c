/* Flash attention over a paged cache: spans of keys with a running maximum (Dao et al., FlashAttention-2, 2023),
 * long sequences split over threads and merged (Flash-Decoding, 2023), blocks found through tables
 * (Kwon et al., PagedAttention, 2023). Scores are kept in units of log2, so that 2**x serves.
 */
#include "attention_kernels.h"
#include "int8_cache.h"
#include "softmax.h"

#define SPAN_GROUPS (SPAN / GROUP)
#define ROOM_GROUPS 8 /* groups of an int8 cache that are converted to the kernels' dtype together: they fit the first-level cache */

struct attn_scratch {
    struct softmax softmax;
    const char *blocks[2][SPAN_GROUPS]; /* keys and values of the span's groups, of the item's first KV head */
    const void *groups[SPAN_GROUPS];    /* what a kernel is given of them */
    _Alignas(CACHE_LINE) float scores[MAX_ROWS * SPAN_STRIDE];
    _Alignas(CACHE_LINE) float weights[MAX_ROWS * SPAN_STRIDE]; /* half as many bytes in bfloat16 */
    /* then: query rows, output rows, the values of a few tokens, groups made of an int8 cache */
};

/* What one thread needs while it computes one item. */
struct attn_tile {
    const struct attn_layer *layer;
    const struct attn_batch *batch;
    const struct attn_item *item;
    struct attn_shape shape;
    int size, kv_size;                 /* bytes of an element of query rows and weights, and of groups */
    int group, num_rows;               /* heads that share a KV head; rows of the tile */
    int first_query, first_position;   /* of the sequence's rows in this step */
    int64_t key_row, value_row;        /* bytes of a token's in the cache */
    int64_t key_bytes, value_bytes;    /* from a KV head's part of a block to the next one's */
    struct attn_scratch *scratch;
    char *query, *tail, *room;         /* query rows; the last tokens' values, cleaned; groups of an int8 cache */
    float *out;
};

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }
static int size_of(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }

static struct attn_shape shape_of(const struct attn_layer *layer) {
    int dtype = attn_dtype(layer);
    return (struct attn_shape){
        .dtype = dtype, .kv_dtype = layer->int8_cache ? dtype : layer->dtype, .dim = layer->head_dim, .v_dim = layer->v_dim,
        .depth = layer->block_size % MAX_DEPTH ? GROUP : MAX_DEPTH,
        .q_stride = ROUND_UP(layer->head_dim, 32), .o_stride = ROUND_UP(layer->v_dim, 16),
    };
}

static int64_t query_tile_bytes(const struct attn_shape *s) { return attn_align((int64_t)MAX_ROWS * s->q_stride * size_of(s->dtype)); }
static int64_t output_tile_bytes(const struct attn_shape *s) { return attn_align((int64_t)MAX_ROWS * s->o_stride * sizeof(float)); }

static int64_t tail_bytes(const struct attn_shape *s) { return attn_align((int64_t)MAX_DEPTH * s->v_dim * size_of(s->kv_dtype)); }

static int64_t room_bytes(const struct attn_layer *layer) {
    int dim = max_int(layer->head_dim, layer->v_dim);
    return layer->int8_cache ? attn_align((int64_t)ROOM_GROUPS * GROUP * dim * size_of(attn_dtype(layer))) : 0;
}

int64_t attn_scratch_bytes(const struct attn_layer *layer) {
    struct attn_shape s = shape_of(layer);
    return attn_align(sizeof(struct attn_scratch)) + query_tile_bytes(&s) + output_tile_bytes(&s) + tail_bytes(&s) + room_bytes(layer);
}

/* ---- rows ---- */

/* Where a row of the tile comes from: a query of the step, and a head. */
struct source { int64_t query; int head; };

static struct source source_of(const struct attn_tile *t, int row) {
    int kv_head = t->item->kv_head + row / t->item->num_rows, index = t->item->row + row % t->item->num_rows;
    return (struct source){t->first_query + index / t->group, kv_head * t->group + index % t->group};
}

static void load_query(const struct attn_tile *t, const void *query, int64_t query_stride) {
    int dim = t->layer->head_dim, given = size_of(t->layer->dtype);
    size_t bytes = (size_t)(dim * t->size), row_bytes = (size_t)(t->shape.q_stride * t->size);
    for (int r = 0; r < t->num_rows; r++) {
        struct source of = source_of(t, r);
        const char *from = (const char *)query + (of.query * query_stride + (int64_t)of.head * dim) * given;
        char *to = t->query + (size_t)r * row_bytes;
        if (given == t->size) memcpy(to, from, bytes);
        else
            for (int d = 0; d < dim; d++) ((float *)to)[d] = f32_of_bf16(((const bf16 *)from)[d]);
        if (row_bytes > bytes) memset(to + bytes, 0, row_bytes - bytes);
    }
}

static void begin_rows(const struct attn_tile *t) {
    memset(t->out, 0, (size_t)(t->num_rows * t->shape.o_stride) * sizeof(float));
    for (int r = 0; r < t->num_rows; r++)
        softmax_begin(&t->scratch->softmax, r, t->layer->sinks && t->item->part == 0 ? t->layer->sinks[source_of(t, r).head] * LOG2E : -INFINITY);
}

static void store_row(const struct attn_tile *t, int row, const float *o, float sum, void *out, int64_t out_stride) {
    int v_dim = t->layer->v_dim, d = 0;
    struct source to_row = source_of(t, row);
    int64_t at = to_row.query * out_stride + (int64_t)to_row.head * v_dim;
    float inverse = 1.0f / sum;
    if (t->layer->dtype == DTYPE_F32) {
        for (float *to = (float *)out + at; d < v_dim; d++) to[d] = o[d] * inverse;
        return;
    }
    bf16 *to = (bf16 *)out + at;
    for (; d + LANES <= v_dim; d += LANES) v_store_bf16(to + d, v_load(o + d) * inverse);
    for (; d < v_dim; d++) to[d] = bf16_of_f32(o[d] * inverse);
}

/* ---- keys and values ---- */

/* Finds the groups of [begin, end) through the block table; returns how many there are. */
static int find_groups(const struct attn_tile *t, int begin, int end) {
    const struct attn_layer *layer = t->layer;
    const int32_t *table = t->batch->block_tables + t->item->seq * t->batch->table_stride;
    int num_groups = (end - begin + GROUP - 1) / GROUP, block_size = layer->block_size;
    for (int g = 0; g < num_groups; g++) {
        int token = begin + g * GROUP, block = token / block_size;
        int64_t row = ((int64_t)table[block] * layer->num_kv_heads + t->item->kv_head) * block_size + (token - block * block_size);
        t->scratch->blocks[0][g] = (const char *)layer->k_cache + row * t->key_row;
        t->scratch->blocks[1][g] = (const char *)layer->v_cache + row * t->value_row;
    }
    return num_groups;
}

/* A group of keys as the kernels read it: in place, or converted into place `index` of the room. */
static const void *keys_at(const struct attn_tile *t, const char *group, int index) {
    if (!t->layer->int8_cache) return group;
    char *made = t->room + (int64_t)index * GROUP * t->layer->head_dim * t->kv_size;
    int8_read_keys((const int8_t *)group, t->layer->head_dim, t->shape.kv_dtype, made);
    return made;
}

/* Likewise, the values of `depth` tokens. */
static const void *values_at(const struct attn_tile *t, const char *groups, int index) {
    if (!t->layer->int8_cache) return groups;
    int64_t bytes = (int64_t)GROUP * t->layer->v_dim * t->kv_size;
    int count = t->shape.depth / GROUP;
    char *made = t->room + index * count * bytes;
    for (int i = 0; i < count; i++)
        int8_read_values((const int8_t *)groups + i * GROUP * t->value_row, t->layer->v_dim, t->shape.kv_dtype, made + i * bytes);
    return made;
}

/* The keys of groups [first, last) of one KV head of the item, the last one repeated. */
static const void *const *keys_of(const struct attn_tile *t, int head, int first, int last) {
    const void **groups = t->scratch->groups;
    for (int i = 0; i < last - first; i++) groups[i] = keys_at(t, t->scratch->blocks[0][first + i] + head * t->key_bytes, i);
    for (int i = last - first; i < GROUPS_AT_ONCE; i++) groups[i] = groups[last - first - 1];
    return groups;
}

/* A copy of values with tokens from `valid` on set to zero: their contents are undefined, possibly NaN. */
static const void *clean_tail(const struct attn_tile *t, const void *values, int valid) {
    int v_dim = t->layer->v_dim, depth = t->shape.depth;
    memcpy(t->tail, values, (size_t)(depth * v_dim * t->kv_size));
    if (t->shape.kv_dtype == DTYPE_F32) {
        memset(t->tail + (int64_t)valid * v_dim * 4, 0, (size_t)((depth - valid) * v_dim * 4));
        return t->tail;
    }
    bf16 *v = (bf16 *)t->tail;
    if (valid % 2)
        for (int d = 0; d < v_dim; d++) v[(valid - 1) * v_dim + 2 * d + 1] = 0;
    int whole = ROUND_UP(valid, 2);
    memset(v + whole * v_dim, 0, (size_t)((depth - whole) * v_dim) * sizeof *v);
    return t->tail;
}

/* ---- one span ---- */

/* Which columns of the span [begin, end) each row sees. */
static void set_visible(const struct attn_tile *t, int begin, int end) {
    struct softmax *softmax = &t->scratch->softmax;
    for (int r = 0; r < t->item->num_rows; r++) {
        int position = t->first_position + (t->item->row + r) / t->group, window = t->layer->window;
        softmax->lo[r] = window > 0 ? max_int(position - window + 1 - begin, 0) : 0;
        softmax->hi[r] = min_int(position + 1, end) - begin;
    }
    for (int r = t->item->num_rows; r < t->num_rows; r++) {
        softmax->lo[r] = softmax->lo[r - t->item->num_rows];
        softmax->hi[r] = softmax->hi[r - t->item->num_rows];
    }
}

static void score_span(const struct attn_tile *t, int num_groups) {
    int num_rows = t->item->num_rows, row_bytes = t->shape.q_stride * t->size;
    for (int g = 0; g < num_groups; g += GROUPS_AT_ONCE) {
        int last = min_int(g + GROUPS_AT_ONCE, num_groups);
        for (int h = 0; h < t->item->num_kv_heads; h++)
            attn_scores(&t->shape, t->query + (int64_t)h * num_rows * row_bytes, num_rows, keys_of(t, h, g, last),
                        t->scratch->scores + h * num_rows * SPAN_STRIDE + g * GROUP);
    }
}

/* Weighs the values of the span's tokens [begin, end) for one KV head of the item; begin is a multiple of the depth. */
static void weigh_head(const struct attn_tile *t, int head, int begin, int end) {
    int num_rows = t->item->num_rows, depth = t->shape.depth, count = (end - begin + depth - 1) / depth;
    const void **values = t->scratch->groups;
    for (int i = 0; i < count; i++) values[i] = values_at(t, t->scratch->blocks[1][(begin + i * depth) / GROUP] + head * t->value_bytes, i);
    if (end % depth) values[count - 1] = clean_tail(t, values[count - 1], end % depth);
    const char *weights = (const char *)t->scratch->weights + ((int64_t)head * num_rows * SPAN_STRIDE + begin) * t->size;
    attn_values(&t->shape, weights, num_rows, values, count, t->out + head * num_rows * t->shape.o_stride);
}

/* Weighs the values of the span's first `length` tokens. */
static void weigh_values(const struct attn_tile *t, int length) {
    int step = t->layer->int8_cache ? ROOM_GROUPS * GROUP : SPAN;
    for (int h = 0; h < t->item->num_kv_heads; h++)
        for (int begin = 0; begin < length; begin += step) weigh_head(t, h, begin, min_int(begin + step, length));
}

static void attend_span(const struct attn_tile *t, int begin, int end) {
    struct attn_scratch *scratch = t->scratch;
    score_span(t, find_groups(t, begin, end));
    set_visible(t, begin, end);
    softmax_span(&scratch->softmax, t->layer, t->shape.dtype, t->num_rows, ROUND_UP(end - begin, t->shape.depth), scratch->scores,
                 scratch->weights, t->out, t->shape.o_stride);
    weigh_values(t, end - begin);
}

/* ---- split ranges ---- */

static float *partial_row(const struct attn_tile *t, const struct attn_plan *plan, int part, int row) {
    return plan->partial + ((int64_t)(t->item->first_partial + part) * MAX_ROWS + row) * (t->layer->v_dim + 2);
}

static void keep_partial(const struct attn_tile *t, const struct attn_plan *plan) {
    for (int r = 0; r < t->num_rows; r++) {
        float *p = partial_row(t, plan, t->item->part, r);
        p[0] = t->scratch->softmax.max[r];
        p[1] = t->scratch->softmax.sum[r];
        memcpy(p + 2, t->out + r * t->shape.o_stride, (size_t)t->layer->v_dim * sizeof(float));
    }
}

/* The thread that finishes the last part of a split range merges all parts. */
static void merge_parts(const struct attn_tile *t, const struct attn_plan *plan, void *out, int64_t out_stride) {
    int v_dim = t->layer->v_dim;
    for (int r = 0; r < t->num_rows; r++) {
        float max = -INFINITY, sum = 0, *merged = t->out;
        for (int i = 0; i < t->item->num_parts; i++) max = fmaxf(max, partial_row(t, plan, i, r)[0]);
        memset(merged, 0, (size_t)v_dim * sizeof *merged);
        for (int i = 0; i < t->item->num_parts; i++) {
            const float *p = partial_row(t, plan, i, r);
            if (p[1] == 0) continue; /* the row saw no key of this part */
            float weight = exp2f(p[0] - max);
            sum += weight * p[1];
            for (int d = 0; d < v_dim; d++) merged[d] += weight * p[2 + d];
        }
        store_row(t, r, merged, sum, out, out_stride);
    }
}

static void finish_rows(const struct attn_tile *t, const struct attn_plan *plan, void *out, int64_t out_stride) {
    if (t->item->num_parts == 1) {
        for (int r = 0; r < t->num_rows; r++) store_row(t, r, t->out + r * t->shape.o_stride, t->scratch->softmax.sum[r], out, out_stride);
        return;
    }
    keep_partial(t, plan);
    atomic_int *unfinished = &plan->unfinished[t->item->split];
    if (atomic_fetch_sub_explicit(unfinished, 1, memory_order_acq_rel) > 1) return;
    merge_parts(t, plan, out, out_stride);
    atomic_store_explicit(unfinished, t->item->num_parts, memory_order_relaxed); /* ready for the next layer */
}

/* ---- all items ---- */

static struct attn_tile tile_of(const struct attn_layer *layer, const struct attn_batch *batch, const struct attn_plan *plan, int tid) {
    char *scratch = plan->scratch + tid * plan->scratch_bytes;
    struct attn_tile t = {.layer = layer, .batch = batch, .shape = shape_of(layer),
                          .group = layer->num_heads / layer->num_kv_heads, .scratch = (struct attn_scratch *)scratch};
    t.size = size_of(t.shape.dtype);
    t.kv_size = size_of(t.shape.kv_dtype);
    t.key_row = cache_row_bytes(layer, layer->head_dim);
    t.value_row = cache_row_bytes(layer, layer->v_dim);
    t.key_bytes = layer->block_size * t.key_row;
    t.value_bytes = layer->block_size * t.value_row;
    t.query = scratch + attn_align(sizeof *t.scratch);
    t.out = (float *)(t.query + query_tile_bytes(&t.shape));
    t.tail = (char *)t.out + output_tile_bytes(&t.shape);
    t.room = t.tail + tail_bytes(&t.shape);
    return t;
}

void attn_run(const struct attn_layer *layer, const struct attn_batch *batch, const struct attn_plan *plan, const void *query,
              int64_t query_stride, void *out, int64_t out_stride, struct team *team, int tid) {
    struct attn_tile t = tile_of(layer, batch, plan, tid);
    int prepared = 0;
    for (int i; (i = team_take(team)) < plan->num_items;) {
        const struct attn_item *item = t.item = &plan->items[i];
        t.num_rows = item->num_rows * item->num_kv_heads;
        t.first_query = batch->query_start[item->seq];
        t.first_position = attn_first_position(batch, item->seq);
        if (prepared != item->num_rows) attn_prepare(prepared = item->num_rows);
        load_query(&t, query, query_stride);
        begin_rows(&t);
        int first = attn_first_key(layer, t.first_position + item->row / t.group); /* the plan's layer may see further */
        for (int begin = max_int(item->kv_begin, first); begin < item->kv_end; begin += SPAN)
            attend_span(&t, begin, min_int(begin + SPAN, item->kv_end));
        finish_rows(&t, plan, out, out_stride);
    }
    if (prepared) attn_finish();
}
