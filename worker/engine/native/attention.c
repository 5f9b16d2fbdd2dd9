/* Flash attention over a paged cache: spans of keys with a running maximum (Dao et al., FlashAttention-2, 2023),
 * long sequences split over threads and merged (Flash-Decoding, 2023), blocks found through tables
 * (Kwon et al., PagedAttention, 2023). Scores are kept in units of log2, so that 2**x serves.
 */
#include "attention.h"

#include "amx.h"
#include "attention_kernels.h"

struct row_state { float max, sum; };

struct attn_scratch {
    struct row_state rows[MAX_ROWS];
    const void *keys[SPAN / GROUP + LOOKAHEAD], *values[SPAN / GROUP + LOOKAHEAD];
    _Alignas(CACHE_LINE) float scores[MAX_ROWS * SPAN];
    _Alignas(CACHE_LINE) float weights[MAX_ROWS * SPAN]; /* of the cache's dtype, so half as many bytes in bfloat16 */
    /* then: query rows, output rows, one group of values */
};

static int size_of(int dtype) { return dtype == DTYPE_F32 ? 4 : 2; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }
static int64_t align(int64_t bytes) { return ROUND_UP(bytes, (int64_t)CACHE_LINE); }

static struct attn_shape shape_of(const struct attn_layer *layer) {
    return (struct attn_shape){
        .dtype = layer->dtype, .dim = layer->head_dim, .v_dim = layer->v_dim,
        .q_stride = ROUND_UP(layer->head_dim, 32), .o_stride = ROUND_UP(layer->v_dim, LANES),
    };
}

static int64_t query_tile_bytes(const struct attn_shape *s) { return align((int64_t)MAX_ROWS * s->q_stride * size_of(s->dtype)); }
static int64_t output_tile_bytes(const struct attn_shape *s) { return align((int64_t)MAX_ROWS * s->o_stride * sizeof(float)); }

static int64_t scratch_bytes(const struct attn_shape *s) {
    return align(sizeof(struct attn_scratch)) + query_tile_bytes(s) + output_tile_bytes(s) + align((int64_t)GROUP * s->v_dim * size_of(s->dtype));
}

/* ---- the plan: which rows against which keys ---- */

/* Splitting makes at most this many more parts than there are row tiles: a part that is split off has a fair share of the work. */
static int max_split_parts(int num_threads) { return 8 * num_threads; }

static int64_t max_items(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int num_threads) {
    int64_t rows = (int64_t)num_tokens * (layer->num_heads / layer->num_kv_heads);
    return rows / MAX_ROWS + num_seqs + 2 * max_split_parts(num_threads);
}

int64_t attn_workspace_bytes(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int32_t num_threads) {
    struct attn_shape shape = shape_of(layer);
    int64_t parts = 2 * max_split_parts(num_threads);
    return align(max_items(layer, num_seqs, num_tokens, num_threads) * (int64_t)sizeof(struct attn_item)) +
           align(parts * layer->num_kv_heads * (int64_t)sizeof(atomic_int)) +
           align(parts * layer->num_kv_heads * MAX_ROWS * (layer->v_dim + 2) * (int64_t)sizeof(float)) + num_threads * scratch_bytes(&shape);
}

/* The keys that a tile of rows can see. */
static void set_kv_range(const struct attn_layer *layer, const struct attn_batch *batch, struct attn_item *item) {
    int group = layer->num_heads / layer->num_kv_heads;
    int num_queries = batch->query_start[item->seq + 1] - batch->query_start[item->seq];
    int first = batch->seq_lens[item->seq] - num_queries;
    item->kv_end = first + (item->row + item->num_rows - 1) / group + 1;
    int begin = layer->window > 0 ? max_int(0, first + item->row / group - layer->window + 1) : 0;
    item->kv_begin = begin / GROUP * GROUP;
}

/* Appends the item, in parts of about `target` keys if it is longer. */
static void append_item(struct attn_plan *plan, struct attn_item item, int target, int max_parts) {
    int length = item.kv_end - item.kv_begin, end = item.kv_end;
    int parts = min_int((length + target - 1) / target, max_parts - plan->num_parts);
    item.num_parts = max_int(parts, 1);
    int step = ROUND_UP((length + item.num_parts - 1) / item.num_parts, GROUP);
    item.num_parts = max_int((length + step - 1) / step, 1);
    item.split = plan->num_splits;
    item.first_partial = plan->num_parts;
    for (item.part = 0; item.part < item.num_parts; item.part++) {
        item.kv_end = min_int(item.kv_begin + step, end);
        plan->items[plan->num_items++] = item;
        item.kv_begin = item.kv_end;
    }
    if (item.num_parts > 1) {
        plan->num_splits++;
        plan->num_parts += item.num_parts;
    }
}

static int64_t total_keys(const struct attn_layer *layer, const struct attn_batch *batch) {
    int group = layer->num_heads / layer->num_kv_heads;
    int64_t total = 0;
    for (int i = 0; i < batch->num_seqs; i++) {
        int64_t rows = (int64_t)(batch->query_start[i + 1] - batch->query_start[i]) * group;
        total += (rows + MAX_ROWS - 1) / MAX_ROWS * batch->seq_lens[i];
    }
    return total * layer->num_kv_heads;
}

static void make_items(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, struct attn_plan *plan) {
    int group = layer->num_heads / layer->num_kv_heads;
    int64_t share = total_keys(layer, batch) / (4 * num_threads);
    int target = share > INT32_MAX / 2 ? INT32_MAX / 2 : max_int((int)share, MIN_SPLIT);
    int max_parts = num_threads > 1 ? 2 * max_split_parts(num_threads) : 0;
    plan->num_items = plan->num_parts = plan->num_splits = 0;
    for (int seq = batch->num_seqs - 1; seq >= 0; seq--) { /* chunks come last in a batch: start with the long work */
        int rows = (batch->query_start[seq + 1] - batch->query_start[seq]) * group;
        for (int row = ROUND_UP(rows, MAX_ROWS) - MAX_ROWS; row >= 0; row -= MAX_ROWS) {
            struct attn_item item = {.seq = seq, .row = row, .num_rows = min_int(rows - row, MAX_ROWS)};
            set_kv_range(layer, batch, &item);
            append_item(plan, item, target, max_parts);
        }
    }
}

void attn_plan(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, char *workspace, struct attn_plan *plan) {
    struct attn_shape shape = shape_of(layer);
    plan->items = (struct attn_item *)workspace;
    workspace += align(max_items(layer, batch->num_seqs, batch->num_tokens, num_threads) * (int64_t)sizeof(struct attn_item));
    make_items(layer, batch, num_threads, plan);
    plan->unfinished = (atomic_int *)workspace;
    for (int i = 0; i < plan->num_items; i++)
        if (plan->items[i].num_parts > 1)
            for (int h = 0; h < layer->num_kv_heads; h++)
                atomic_init(&plan->unfinished[plan->items[i].split * layer->num_kv_heads + h], plan->items[i].num_parts);
    workspace += align((int64_t)plan->num_splits * layer->num_kv_heads * (int64_t)sizeof(atomic_int));
    plan->partial = (float *)workspace;
    workspace += align((int64_t)plan->num_parts * layer->num_kv_heads * MAX_ROWS * (layer->v_dim + 2) * (int64_t)sizeof(float));
    plan->scratch = workspace;
    plan->scratch_bytes = scratch_bytes(&shape);
}

/* ---- one item ---- */

/* What one thread needs while it computes one (item, KV head). */
struct attn_tile {
    const struct attn_layer *layer;
    const struct attn_batch *batch;
    const struct attn_item *item;
    struct attn_shape shape;
    int kv_head, group, first_query, first_position; /* of the sequence's rows in this step */
    struct attn_scratch *scratch;
    char *query, *tail; /* query rows; the last group of values, cleaned */
    float *out;
};

static const char *group_at(const struct attn_tile *t, const void *cache, int dim, int token) {
    const struct attn_layer *layer = t->layer;
    int64_t block = t->batch->block_tables[t->item->seq * t->batch->table_stride + token / layer->block_size];
    int64_t row = (block * layer->num_kv_heads + t->kv_head) * layer->block_size + token % layer->block_size;
    return (const char *)cache + row * dim * size_of(layer->dtype);
}

static void load_query(const struct attn_tile *t, const void *query, int64_t query_stride) {
    int size = size_of(t->layer->dtype), dim = t->layer->head_dim;
    size_t bytes = (size_t)(dim * size), row_bytes = (size_t)(t->shape.q_stride * size);
    for (int r = 0; r < t->item->num_rows; r++) {
        int row = t->item->row + r;
        int64_t from = (t->first_query + row / t->group) * query_stride + (int64_t)(t->kv_head * t->group + row % t->group) * dim;
        char *to = t->query + (size_t)r * row_bytes;
        memcpy(to, (const char *)query + from * size, bytes);
        memset(to + bytes, 0, row_bytes - bytes);
    }
}

/* A copy of a group of values with tokens from `valid` on set to zero: what lies there may be anything, NaN too. */
static const void *clean_tail(const struct attn_tile *t, const void *group, int valid) {
    int v_dim = t->layer->v_dim;
    memcpy(t->tail, group, (size_t)(GROUP * v_dim * size_of(t->layer->dtype)));
    if (t->layer->dtype == DTYPE_F32) {
        memset(t->tail + (int64_t)valid * v_dim * 4, 0, (size_t)((GROUP - valid) * v_dim * 4));
        return t->tail;
    }
    bf16 *v = (bf16 *)t->tail;
    if (valid % 2)
        for (int d = 0; d < v_dim; d++) v[(valid - 1) * v_dim + 2 * d + 1] = 0;
    int whole = ROUND_UP(valid, 2);
    memset(v + whole * v_dim, 0, (size_t)((GROUP - whole) * v_dim) * sizeof *v);
    return t->tail;
}

/* Pointers to the groups of [begin, end) and a few after them. */
static void find_groups(const struct attn_tile *t, int begin, int end) {
    int last = (t->item->kv_end - 1) / GROUP * GROUP;
    int n = (end - begin + GROUP - 1) / GROUP;
    for (int g = 0; g < n + LOOKAHEAD; g++) {
        int token = min_int(begin + g * GROUP, last);
        t->scratch->keys[g] = group_at(t, t->layer->k_cache, t->layer->head_dim, token);
        t->scratch->values[g] = group_at(t, t->layer->v_cache, t->layer->v_dim, token);
    }
    if (end == t->item->kv_end && end % GROUP) t->scratch->values[n - 1] = clean_tail(t, t->scratch->values[n - 1], end % GROUP);
}

static void store_weights(const struct attn_tile *t, int index, v16f w) {
    if (t->layer->dtype == DTYPE_F32) v_store(t->scratch->weights + index, w);
    else v_store_bf16((bf16 *)t->scratch->weights + index, w);
}

/* Scaled, capped and masked scores of columns [lo, hi) of a row, in place; returns their maximum. */
static float finish_scores(const struct attn_layer *layer, float *s, int lo, int hi) {
    v16f max = v_set(-INFINITY);
    for (int j = lo / LANES * LANES; j < hi; j += LANES) {
        v16f x = v_load(s + j);
        if (layer->softcap > 0) x = layer->softcap * LOG2E * v_tanh(x * (layer->scale / layer->softcap));
        else x = x * (layer->scale * LOG2E);
        if (j < lo || j + LANES > hi) x = v_select((v_iota + j >= lo) & (v_iota + j < hi), x, v_set(-INFINITY));
        v_store(s + j, x);
        max = v_max(x, max);
    }
    return v_hmax(max);
}

/* One row's softmax over columns [lo, hi) of `width`: weights out, running state and output row updated. */
static void softmax_row(const struct attn_tile *t, int row, int lo, int hi, int width) {
    struct row_state *state = &t->scratch->rows[row];
    float *s = t->scratch->scores + row * SPAN, *o = t->out + row * t->shape.o_stride;
    if (lo >= hi) {
        for (int j = 0; j < width; j += LANES) store_weights(t, row * SPAN + j, v_set(0));
        return;
    }
    float max = finish_scores(t->layer, s, lo, hi);
    if (max > state->max) {
        float shrink = v_exp2(v_set(state->max - max))[0];
        state->sum *= shrink;
        for (int d = 0; d < t->shape.o_stride; d += LANES) v_store(o + d, v_load(o + d) * shrink);
        state->max = max;
    }
    v16f sum = {0};
    for (int j = 0; j < width; j += LANES) {
        v16f w = {0};
        if (j + LANES > lo && j < hi) w = v_exp2(v_load(s + j) - state->max);
        store_weights(t, row * SPAN + j, w);
        sum += w;
    }
    state->sum += v_sum(sum);
}

static void begin_rows(const struct attn_tile *t) {
    memset(t->out, 0, (size_t)(t->item->num_rows * t->shape.o_stride) * sizeof(float));
    for (int r = 0; r < t->item->num_rows; r++) {
        struct row_state state = {-INFINITY, 0};
        if (t->layer->sinks && t->item->part == 0)
            state = (struct row_state){t->layer->sinks[t->kv_head * t->group + (t->item->row + r) % t->group] * LOG2E, 1};
        t->scratch->rows[r] = state;
    }
}

static void attend_span(const struct attn_tile *t, int begin, int end) {
    int width = ROUND_UP(end - begin, GROUP), window = t->layer->window;
    find_groups(t, begin, end);
    attn_scores(&t->shape, t->query, t->item->num_rows, t->scratch->keys, width / GROUP, t->scratch->scores);
    for (int r = 0; r < t->item->num_rows; r++) {
        int position = t->first_position + (t->item->row + r) / t->group;
        int lo = window > 0 ? max_int(position - window + 1 - begin, 0) : 0;
        softmax_row(t, r, lo, min_int(position + 1, end) - begin, width);
    }
    attn_values(&t->shape, t->scratch->weights, t->item->num_rows, t->scratch->values, width / GROUP, t->out);
}

/* ---- results ---- */

static void store_row(const struct attn_tile *t, int row, const float *o, float sum, void *out, int64_t out_stride) {
    int v_dim = t->layer->v_dim, index = t->item->row + row, d = 0;
    int64_t at = (t->first_query + index / t->group) * out_stride + (int64_t)(t->kv_head * t->group + index % t->group) * v_dim;
    float inverse = 1.0f / sum;
    if (t->layer->dtype == DTYPE_F32) {
        for (float *to = (float *)out + at; d < v_dim; d++) to[d] = o[d] * inverse;
        return;
    }
    bf16 *to = (bf16 *)out + at;
    for (; d + LANES <= v_dim; d += LANES) v_store_bf16(to + d, v_load(o + d) * inverse);
    for (; d < v_dim; d++) to[d] = bf16_of_f32(o[d] * inverse);
}

static float *partial_row(const struct attn_tile *t, const struct attn_plan *plan, int part, int row) {
    int64_t index = (int64_t)(t->item->first_partial + part) * t->layer->num_kv_heads + t->kv_head;
    return plan->partial + (index * MAX_ROWS + row) * (t->layer->v_dim + 2);
}

static void keep_partial(const struct attn_tile *t, const struct attn_plan *plan) {
    for (int r = 0; r < t->item->num_rows; r++) {
        float *p = partial_row(t, plan, t->item->part, r);
        p[0] = t->scratch->rows[r].max;
        p[1] = t->scratch->rows[r].sum;
        memcpy(p + 2, t->out + r * t->shape.o_stride, (size_t)t->layer->v_dim * sizeof(float));
    }
}

/* Whoever finishes the last part of a split range merges them all. */
static void merge_parts(const struct attn_tile *t, const struct attn_plan *plan, void *out, int64_t out_stride) {
    int v_dim = t->layer->v_dim;
    for (int r = 0; r < t->item->num_rows; r++) {
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
        for (int r = 0; r < t->item->num_rows; r++)
            store_row(t, r, t->out + r * t->shape.o_stride, t->scratch->rows[r].sum, out, out_stride);
        return;
    }
    keep_partial(t, plan);
    atomic_int *unfinished = &plan->unfinished[t->item->split * t->layer->num_kv_heads + t->kv_head];
    if (atomic_fetch_sub_explicit(unfinished, 1, memory_order_acq_rel) > 1) return;
    merge_parts(t, plan, out, out_stride);
    atomic_store_explicit(unfinished, t->item->num_parts, memory_order_relaxed); /* ready for the next layer */
}

void attn_run(const struct attn_layer *layer, const struct attn_batch *batch, const struct attn_plan *plan, const void *query,
              int64_t query_stride, void *out, int64_t out_stride, struct team *team, int tid) {
    struct attn_tile t = {.layer = layer, .batch = batch, .shape = shape_of(layer), .group = layer->num_heads / layer->num_kv_heads};
    char *scratch = plan->scratch + tid * plan->scratch_bytes;
    t.scratch = (struct attn_scratch *)scratch;
    t.query = scratch + align(sizeof *t.scratch);
    t.out = (float *)(t.query + query_tile_bytes(&t.shape));
    t.tail = (char *)t.out + output_tile_bytes(&t.shape);
    for (int i; (i = team_take(team)) < plan->num_items * layer->num_kv_heads;) {
        t.item = &plan->items[i / layer->num_kv_heads];
        t.kv_head = i % layer->num_kv_heads;
        t.first_query = batch->query_start[t.item->seq];
        t.first_position = batch->seq_lens[t.item->seq] - (batch->query_start[t.item->seq + 1] - t.first_query);
        load_query(&t, query, query_stride);
        begin_rows(&t);
        for (int begin = t.item->kv_begin; begin < t.item->kv_end; begin += SPAN)
            attend_span(&t, begin, min_int(begin + SPAN, t.item->kv_end));
        finish_rows(&t, plan, out, out_stride);
    }
}
