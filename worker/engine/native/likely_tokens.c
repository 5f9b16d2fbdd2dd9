#include "likely_tokens.h"

#include "vec.h"

enum { SPAN = 64 * LANES }; /* tokens whose weights are summed in single precision */

/* n >= 1 logits, filled up with NaN, which counts neither as likely nor as unlikely. */
static vf32 load_some(const float *logits, int n) {
    if (n >= LANES) return v_load(logits);
    vf32 v = v_set(NAN);
    memcpy(&v, logits, n * sizeof *logits);
    return v;
}

void measure_likely_tokens(const struct likely_tokens *likely, int row) {
    const float *logits = likely->logits + (int64_t)row * likely->vocab;
    float floor = likely->floor[row], top = likely->top[row], factor = LOG2E / likely->temperature[row];
    int64_t count = 0;
    double tail = 0;
    for (int begin = 0; begin < likely->vocab; begin += SPAN) {
        int end = begin + SPAN < likely->vocab ? begin + SPAN : likely->vocab;
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
    likely->count[row] = count;
    likely->tail[row] = tail;
}

void list_likely_tokens(const struct likely_tokens *likely, int row) {
    const float *logits = likely->logits + (int64_t)row * likely->vocab;
    float floor = likely->floor[row], top = likely->top[row], factor = LOG2E / likely->temperature[row];
    int64_t next = likely->begin[row];
    for (int i = 0; i < likely->vocab; i += LANES) {
        vf32 x = load_some(logits + i, likely->vocab - i);
        vi32 inside = x >= floor;
        if (!v_any(inside)) continue;
        vf32 weight = v_exp2((x - top) * factor);
        for (int lane = 0; lane < LANES; lane++) {
            if (!inside[lane]) continue;
            likely->tokens[next] = i + lane;
            likely->values[next] = logits[i + lane];
            likely->weights[next++] = weight[lane];
        }
    }
}
