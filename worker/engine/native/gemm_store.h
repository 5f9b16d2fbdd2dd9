/* Storing a product's sums. */
#ifndef HEADRACE_GEMM_STORE_H
#define HEADRACE_GEMM_STORE_H

#include "gemm.h"

#define VECTORS (PANEL / LANES)

static inline vf32 activated(vf32 x, enum activation activation) {
    if (activation == SILU) return x * v_sigmoid(x);
    return 0.5f * x * (1.0f + v_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

/* Of equal values, the first: panels come in any order. */
static inline void keep_best(struct best *best, vf32 x, vi32 index, int columns) {
    vi32 inside = index < columns;
    vi32 better = inside & ((x > best->value) | ((x == best->value) & (index < best->index)));
    best->value = v_select(better, x, best->value);
    best->index = (index & better) | (best->index & ~better);
    best->nan |= inside & (x != x);
}

/* One row of a panel; `column` is its first. */
static inline __attribute__((always_inline)) void store_row(const struct result *out, int row, int column, const vf32 *sums) {
    int64_t at = row * out->stride + column;
    float *to = (float *)out->data + at;
    switch (out->store) {
    case STORE_BF16:
        for (int i = 0; i < VECTORS; i++) v_store_bf16((bf16 *)out->data + at + i * LANES, sums[i]);
        break;
    case STORE_F32:
        for (int i = 0; i < VECTORS; i++) v_store(to + i * LANES, sums[i]);
        break;
    case ADD_F32:
        for (int i = 0; i < VECTORS; i++) v_store(to + i * LANES, v_load(to + i * LANES) + out->factor * sums[i]);
        break;
    case STORE_GATED: {
        bf16 *gated = tiled_at(out->data, (int)out->stride, row, column / 2);
        for (int i = 0; i < VECTORS / 2; i++) v_store_bf16(gated + i * LANES, activated(sums[i], out->activation) * sums[i + VECTORS / 2]);
        break;
    }
    case KEEP_BEST:
        for (int i = 0; i < VECTORS; i++) keep_best((struct best *)out->data + row, sums[i], v_iota + (column + i * LANES), out->columns);
        break;
    }
}

/* The last panel of a matrix whose number of outputs is not a multiple of 32; this only happens with float32 results. */
static inline __attribute__((always_inline)) void store_part(const struct result *out, int row, int column, const vf32 *sums) {
    float panel[PANEL];
    for (int i = 0; i < VECTORS; i++) v_store(panel + i * LANES, sums[i]);
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
    const float *bias = p->w->bias, *scale = p->w->scale;
    vf32 sums[VECTORS];
    for (int i = 0; i < VECTORS; i++) sums[i] = v_load(p->sums + i * LANES);
    if (scale)
        for (int i = 0; i < VECTORS; i++) sums[i] *= v_load(scale + p->column + i * LANES);
    if (bias)
        for (int i = 0; i < VECTORS; i++) sums[i] += v_load(bias + p->column + i * LANES);
    if (p->column + PANEL > p->out->columns && p->out->store == STORE_F32) store_part(p->out, p->row, p->column, sums);
    else store_row(p->out, p->row, p->column, sums);
    p->sums += PANEL, p->row++, p->count--;
}

static inline void store_rest(struct pending *p) {
    while (p->count > 0) store_next(p);
}

#endif
