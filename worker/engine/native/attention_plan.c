/* Which rows are computed against which keys, by one thread at a time. */
#include "attention_kernels.h"

#define ITEMS_PER_THREAD 4 /* wanted, so that threads end together */

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

/* Splitting makes at most this many parts. */
static int max_parts(int num_threads) { return num_threads > 1 ? 4 * ITEMS_PER_THREAD * num_threads : 0; }

static int64_t max_items(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int num_threads) {
    int64_t rows = (int64_t)num_tokens * (layer->num_heads / layer->num_kv_heads);
    return (rows / MAX_ROWS + num_seqs) * layer->num_kv_heads + max_parts(num_threads);
}

static int64_t items_bytes(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int num_threads) {
    return attn_align(max_items(layer, num_seqs, num_tokens, num_threads) * (int64_t)sizeof(struct attn_item));
}

static int64_t partial_bytes(const struct attn_layer *layer, int num_threads) {
    return attn_align((int64_t)max_parts(num_threads) * MAX_ROWS * (layer->v_dim + 2) * (int64_t)sizeof(float));
}

static int64_t unfinished_bytes(int num_threads) { return attn_align(max_parts(num_threads) * (int64_t)sizeof(atomic_int)); }

int64_t attn_workspace_bytes(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int32_t num_threads) {
    return items_bytes(layer, num_seqs, num_tokens, num_threads) + unfinished_bytes(num_threads) + partial_bytes(layer, num_threads) +
           num_threads * attn_scratch_bytes(layer);
}

/* Appends the item, in parts of about `target` keys if it is longer. */
static void append_item(struct attn_plan *plan, struct attn_item item, int target, int parts_left) {
    int length = item.kv_end - item.kv_begin, end = item.kv_end;
    item.num_parts = max_int(min_int((length + target - 1) / target, parts_left), 1);
    int step = ROUND_UP((length + item.num_parts - 1) / item.num_parts, MAX_DEPTH);
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

/* Keys that all items together read, per KV head. */
static int64_t total_keys(const struct attn_layer *layer, const struct attn_batch *batch) {
    int64_t total = 0, group = layer->num_heads / layer->num_kv_heads;
    for (int i = 0; i < batch->num_seqs; i++) {
        int64_t rows = (batch->query_start[i + 1] - batch->query_start[i]) * group;
        total += (rows + MAX_ROWS - 1) / MAX_ROWS * batch->seq_lens[i];
    }
    return total * layer->num_kv_heads;
}

/* The KV heads of an item. A block's heads lie side by side in memory, so a decode takes as many as fit a tile, if there is work
 * enough for all threads then. */
static int heads_per_item(const struct attn_layer *layer, int num_seqs, int num_rows, int num_threads) {
    int fit = min_int(layer->num_kv_heads, MAX_ROWS / num_rows);
    return max_int(min_int(fit, layer->num_kv_heads * num_seqs / (ITEMS_PER_THREAD * num_threads)), 1);
}

static void append_rows(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, int64_t share, int seq, int row,
                        int num_rows, struct attn_plan *plan) {
    int group = layer->num_heads / layer->num_kv_heads, first = attn_first_position(batch, seq);
    int heads = heads_per_item(layer, batch->num_seqs, num_rows, num_threads);
    int target = max_int((int)(share / heads > INT32_MAX / 2 ? INT32_MAX / 2 : share / heads), MIN_SPLIT);
    for (int head = 0; head < layer->num_kv_heads; head += heads) {
        struct attn_item item = {
            .seq = seq, .row = row, .num_rows = num_rows, .kv_head = head, .num_kv_heads = min_int(heads, layer->num_kv_heads - head),
            .kv_begin = attn_first_key(layer, first + row / group), .kv_end = first + (row + num_rows - 1) / group + 1,
        };
        append_item(plan, item, target, max_parts(num_threads) - plan->num_parts);
    }
}

static void make_items(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, struct attn_plan *plan) {
    int group = layer->num_heads / layer->num_kv_heads;
    int64_t share = total_keys(layer, batch) / (ITEMS_PER_THREAD * num_threads);
    plan->num_items = plan->num_parts = plan->num_splits = 0;
    for (int seq = batch->num_seqs - 1; seq >= 0; seq--) { /* chunks come last in a batch: start with the long work */
        int rows = (batch->query_start[seq + 1] - batch->query_start[seq]) * group;
        for (int row = ROUND_UP(rows, MAX_ROWS) - MAX_ROWS; row >= 0; row -= MAX_ROWS)
            append_rows(layer, batch, num_threads, share, seq, row, min_int(rows - row, MAX_ROWS), plan);
    }
}

void attn_plan(const struct attn_layer *layer, const struct attn_batch *batch, int num_threads, char *workspace, struct attn_plan *plan) {
    plan->items = (struct attn_item *)workspace;
    plan->unfinished = (atomic_int *)(workspace + items_bytes(layer, batch->num_seqs, batch->num_tokens, num_threads));
    plan->partial = (float *)((char *)plan->unfinished + unfinished_bytes(num_threads));
    plan->scratch = (char *)plan->partial + partial_bytes(layer, num_threads);
    plan->scratch_bytes = attn_scratch_bytes(layer);
    make_items(layer, batch, num_threads, plan);
    for (int i = 0; i < plan->num_items; i++)
        if (plan->items[i].num_parts > 1) atomic_init(&plan->unfinished[plan->items[i].split], plan->items[i].num_parts);
}
