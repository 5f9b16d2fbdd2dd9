/* What becomes of a product's sums. */
#ifndef HEADRACE_GEMM_STORE_H
#define HEADRACE_GEMM_STORE_H

#include "gemm.h"

static inline v16f activated(v16f x, enum activation activation) {
    if (activation == SILU) return x * v_sigmoid(x);
    return 0.5f * x * (1.0f + v_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

/* Of equal values, the first: panels come in any order. */
static inline void keep_best(struct best *best, v16f x, v16i index, int columns) {
    v16i inside = index < columns;
    v16i better = inside & ((x > best->value) | ((x == best->value) & (index < best->index)));
    best->value = v_select(better, x, best->value);
    best->index = (index & better) | (best->index & ~better);
    best->nan |= inside & (x != x);
}

/* One row of a panel, `left` and `right` its two halves, `column` its first. */
static inline void store_row(const struct result *out, int row, int column, v16f left, v16f right) {
    int64_t at = row * out->stride + column;
    switch (out->store) {
    case STORE_BF16:
        v_store_bf16((bf16 *)out->data + at, left);
        v_store_bf16((bf16 *)out->data + at + LANES, right);
        break;
    case STORE_F32:
        v_store((float *)out->data + at, left);
        v_store((float *)out->data + at + LANES, right);
        break;
    case ADD_F32: {
        float *to = (float *)out->data + at;
        v_store(to, v_load(to) + out->factor * left);
        v_store(to + LANES, v_load(to + LANES) + out->factor * right);
        break;
    }
    case STORE_GATED:
        v_store_bf16(tiled_at(out->data, (int)out->stride, row, column / 2), activated(left, out->activation) * right);
        break;
    case KEEP_BEST: {
        struct best *best = (struct best *)out->data + row;
        keep_best(best, left, v_iota + column, out->columns);
        keep_best(best, right, v_iota + (column + LANES), out->columns);
        break;
    }
    }
}

/* The last panel of a matrix whose outputs are no multiple of 32; only float32 results are ever that odd. */
static void store_part(const struct result *out, int row, int column, v16f left, v16f right) {
    float panel[PANEL];
    v_store(panel, left);
    v_store(panel + LANES, right);
    memcpy((float *)out->data + row * out->stride + column, panel, (size_t)(out->columns - column) * sizeof *panel);
}

/* Sums that are complete but not yet stored: they are while the tile unit works on the next block. */
struct pending {
    const struct matrix *w;
    const struct result *out;
    const float *sums; /* of the next row, PANEL apart */
    int row, count, column;
};

static inline __attribute__((always_inline)) void store_next(struct pending *p) {
    v16f left = v_load(p->sums), right = v_load(p->sums + LANES);
    if (p->w->scale) left *= v_load(p->w->scale + p->column), right *= v_load(p->w->scale + p->column + LANES);
    if (p->w->bias) left += v_load(p->w->bias + p->column), right += v_load(p->w->bias + p->column + LANES);
    if (p->column + PANEL > p->out->columns && p->out->store == STORE_F32) store_part(p->out, p->row, p->column, left, right);
    else store_row(p->out, p->row, p->column, left, right);
    p->sums += PANEL, p->row++, p->count--;
}

static inline void store_rest(struct pending *p) {
    while (p->count > 0) store_next(p);
}

#endif
