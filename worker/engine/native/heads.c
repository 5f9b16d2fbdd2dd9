#include "heads.h"

#include "vec.h"

enum { SPAN = 64 * LANES }; /* tokens whose weights are summed in single precision */

/* n >= 1 logits, filled up with -inf. */
static vf32 load_some(const float *logits, int n) {
    if (n >= LANES) return v_load(logits);
    vf32 v = v_set(-INFINITY);
    memcpy(&v, logits, n * sizeof *logits);
    return v;
}

void find_head(const struct heads *heads, int row) {
    int64_t offset = (int64_t)row * heads->vocab, found = offset;
    const float *logits = heads->logits + offset;
    float floor = heads->floor[row], top = heads->top[row], factor = LOG2E / heads->temperature[row];
    double tail = 0;
    for (int begin = 0; begin < heads->vocab; begin += SPAN) {
        int end = begin + SPAN < heads->vocab ? begin + SPAN : heads->vocab;
        vf32 sum = {0};
        for (int i = begin; i < end; i += LANES) {
            vf32 x = load_some(logits + i, end - i), weight = v_exp2((x - top) * factor);
            vi32 inside = x >= floor;
            sum += v_select(inside, v_set(0), weight);
            if (!v_any(inside)) continue;
            for (int lane = 0; lane < LANES && i + lane < end; lane++) {
                if (!inside[lane]) continue;
                heads->tokens[found] = i + lane;
                heads->values[found] = logits[i + lane];
                heads->weights[found++] = weight[lane];
            }
        }
        tail += v_sum(sum);
    }
    heads->count[row] = found - offset;
    heads->tail[row] = tail;
}

void join_heads(const struct heads *heads) {
    int64_t end = 0;
    for (int row = 0; row < heads->num_rows; row++) {
        int64_t from = (int64_t)row * heads->vocab, count = heads->count[row];
        memmove(heads->tokens + end, heads->tokens + from, count * sizeof *heads->tokens);
        memmove(heads->values + end, heads->values + from, count * sizeof *heads->values);
        memmove(heads->weights + end, heads->weights + from, count * sizeof *heads->weights);
        for (int64_t i = 0; i < count; i++) heads->rows[end++] = row;
    }
}
