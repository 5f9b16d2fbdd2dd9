#include "heads.h"

#include "vec.h"

enum { SPAN = 64 * LANES }; /* tokens whose weights are summed in single precision */

/* n >= 1 logits, filled up with NaN, which is neither inside of a head nor outside. */
static vf32 load_some(const float *logits, int n) {
    if (n >= LANES) return v_load(logits);
    vf32 v = v_set(NAN);
    memcpy(&v, logits, n * sizeof *logits);
    return v;
}

void measure_head(const struct heads *heads, int row) {
    const float *logits = heads->logits + (int64_t)row * heads->vocab;
    float floor = heads->floor[row], top = heads->top[row], factor = LOG2E / heads->temperature[row];
    int64_t count = 0;
    double tail = 0;
    for (int begin = 0; begin < heads->vocab; begin += SPAN) {
        int end = begin + SPAN < heads->vocab ? begin + SPAN : heads->vocab;
        vf32 sum = {0};
        vi32 inside = {0}; /* a lane's number of tokens */
        for (int i = begin; i < end; i += LANES) {
            vf32 x = load_some(logits + i, end - i);
            inside -= x >= floor;
            sum += v_select(x < floor, v_exp2((x - top) * factor), v_set(0));
        }
        tail += v_sum(sum);
        for (int lane = 0; lane < LANES; lane++) count += inside[lane];
    }
    heads->count[row] = count;
    heads->tail[row] = tail;
}

void list_head(const struct heads *heads, int row) {
    const float *logits = heads->logits + (int64_t)row * heads->vocab;
    float floor = heads->floor[row], top = heads->top[row], factor = LOG2E / heads->temperature[row];
    int64_t next = heads->begin[row];
    for (int i = 0; i < heads->vocab; i += LANES) {
        vf32 x = load_some(logits + i, heads->vocab - i);
        vi32 inside = x >= floor;
        if (!v_any(inside)) continue;
        vf32 weight = v_exp2((x - top) * factor);
        for (int lane = 0; lane < LANES; lane++) {
            if (!inside[lane]) continue;
            heads->tokens[next] = i + lane;
            heads->values[next] = logits[i + lane];
            heads->weights[next++] = weight[lane];
        }
    }
}
