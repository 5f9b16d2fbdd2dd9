#include "softmax.h"

void softmax_begin(struct softmax *state, int row, float sink) {
    state->max[row] = sink;
    state->sum[row] = sink > -INFINITY ? 1.0f : 0.0f;
}

/* The vector at column j of a row, columns outside of [lo, hi) hidden; kept so. */
static vf32 hide(float *s, int j, int lo, int hi) {
    vf32 x = v_select((v_iota + j >= lo) & (v_iota + j < hi), v_load(s + j), v_set(-INFINITY));
    v_store(s + j, x);
    return x;
}

/* Largest score of a row; hides what the row does not see. */
static float row_max(float *s, int lo, int hi) {
    if (lo >= hi) return -INFINITY;
    int last = (hi - 1) / LANES * LANES, j = lo / LANES * LANES;
    vf32 a = hide(s, j, lo, hi), b = hide(s, last, lo, hi);
    for (j += LANES; j + LANES < last; j += 2 * LANES) {
        a = v_max(v_load(s + j), a);
        b = v_max(v_load(s + j + LANES), b);
    }
    if (j < last) a = v_max(v_load(s + j), a);
    return v_hmax(v_max(a, b));
}

static void cap(float *s, int lo, int hi, float scale, float softcap) {
    for (int j = lo / LANES * LANES; j < hi; j += LANES) v_store(s + j, softcap * v_tanh(v_load(s + j) * (scale / softcap)));
}

/* The new maxima, how much smaller they make what was summed before, and that made smaller. `max` holds the span's own maxima. */
static void update(struct softmax *state, const float *max, float factor, int num_rows) {
    for (int r = 0; r < num_rows; r += LANES) {
        vf32 old = v_load(state->max + r), new = v_max(v_load(max + r) * factor, old);
        vf32 shrink = v_select(new > old, v_exp2(old - new), v_set(1));
        v_store(state->max + r, new);
        v_store(state->shrink + r, shrink);
        v_store(state->sum + r, v_load(state->sum + r) * shrink);
    }
}

static inline __attribute__((always_inline)) float row_weights(const float *s, void *weights, int lo, int hi, int width, float factor,
                                                                float max, const int exact, const int dtype) {
    vf32 a = {0}, b = {0};
    int j = 0, first = lo < hi ? lo / LANES * LANES : width;
#define STORE(w) (dtype == DTYPE_F32 ? v_store((float *)weights + j, w) : v_store_bf16((bf16 *)weights + j, w))
    for (; j < first; j += LANES) STORE(v_set(0));
    for (; j < hi; j += LANES) {
        vf32 w = v_exp2_to(v_load(s + j) * factor - max, exact);
        STORE(w);
        a += w;
        if ((j += LANES) >= hi) break;
        w = v_exp2_to(v_load(s + j) * factor - max, exact);
        STORE(w);
        b += w;
    }
    for (; j < width; j += LANES) STORE(v_set(0));
#undef STORE
    return v_sum(a + b);
}

void softmax_span(struct softmax *state, const struct attn_layer *layer, int dtype, int num_rows, int width, float *scores, void *weights,
                  float *out, int o_stride) {
    float factor = LOG2E * (layer->softcap > 0 ? 1 : layer->scale), max[MAX_ROWS];
    for (int r = 0; r < num_rows; r++) {
        if (layer->softcap > 0) cap(scores + r * SPAN_STRIDE, state->lo[r], state->hi[r], layer->scale, layer->softcap);
        max[r] = row_max(scores + r * SPAN_STRIDE, state->lo[r], state->hi[r]);
    }
    update(state, max, factor, num_rows);
    for (int r = 0; r < num_rows; r++) {
        const float *s = scores + r * SPAN_STRIDE;
        int lo = state->lo[r], hi = state->hi[r];
        float *wide = (float *)weights + r * SPAN_STRIDE, max_seen = state->max[r];
        bf16 *narrow = (bf16 *)weights + r * SPAN_STRIDE;
        if (layer->dtype == DTYPE_F32) state->sum[r] += row_weights(s, wide, lo, hi, width, factor, max_seen, 1, DTYPE_F32);
        else if (dtype == DTYPE_F32) state->sum[r] += row_weights(s, wide, lo, hi, width, factor, max_seen, 0, DTYPE_F32);
        else state->sum[r] += row_weights(s, narrow, lo, hi, width, factor, max_seen, 0, DTYPE_BF16);
    }
    for (int r = 0; r < num_rows; r++)
        if (state->shrink[r] != 1)
            for (int d = 0; d < o_stride; d += LANES) v_store(out + r * o_stride + d, v_load(out + r * o_stride + d) * state->shrink[r]);
}
