#include "attention_kernels.h"

#include "amx.h"

#if defined(__AVX512BF16__) && !defined(HEADRACE_NO_AVX512)
#define HAVE_AVX512_BF16 1
#else
#define HAVE_AVX512_BF16 0
#endif

/* ---- plain vectors: any dims, bfloat16 and float32 ---- */

#define ROWS_AT_ONCE 4
#define PARTS (GROUP / LANES) /* vectors of a group of tokens */
#define INLINED static inline __attribute__((always_inline))

/* Calls `rows(first, count)` for all of them, `count` a constant: sums of that many rows stay in registers. */
#define FOR_ROWS(num_rows, rows) \
    do { \
        int first = 0; \
        for (; first + ROWS_AT_ONCE <= (num_rows); first += ROWS_AT_ONCE) rows(first, ROWS_AT_ONCE); \
        if ((num_rows) - first == 3) rows(first, 3); \
        if ((num_rows) - first == 2) rows(first, 2); \
        if ((num_rows) - first == 1) rows(first, 1); \
    } while (0)

INLINED void score_rows_bf16(const struct attn_shape *shape, const bf16 *q, const bf16 *k, const int count, float *scores) {
    vf32 sums[ROWS_AT_ONCE][PARTS] = {0};
    for (int d = 0; d < shape->dim; d += 2) {
        vu32 pairs[PARTS];
        for (int i = 0; i < PARTS; i++) pairs[i] = v_load_pairs(k + d * GROUP + 2 * i * LANES);
        for (int r = 0; r < count; r++) {
            vu32 pair = v_set_pair(q + r * shape->q_stride + d);
            for (int i = 0; i < PARTS; i++) sums[r][i] += v_even_of(pair) * v_even_of(pairs[i]);
            for (int i = 0; i < PARTS; i++) sums[r][i] += v_odd_of(pair) * v_odd_of(pairs[i]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) v_store(scores + r * SPAN_STRIDE + i * LANES, sums[r][i]);
}

INLINED void score_rows_f32(const struct attn_shape *shape, const float *q, const float *k, const int count, float *scores) {
    vf32 sums[ROWS_AT_ONCE][PARTS] = {0};
    for (int d = 0; d < shape->dim; d++)
        for (int i = 0; i < PARTS; i++) {
            vf32 keys = v_load(k + d * GROUP + i * LANES);
            for (int r = 0; r < count; r++) sums[r][i] += q[r * shape->q_stride + d] * keys;
        }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) v_store(scores + r * SPAN_STRIDE + i * LANES, sums[r][i]);
}

/* `width` vectors of values from column d on. */
INLINED void weigh_rows_bf16(const struct attn_shape *shape, const bf16 *weights, const void *const *values, int num_values, int d,
                             const int width, const int count, float *out) {
    vf32 sums[ROWS_AT_ONCE][PARTS];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++) sums[r][i] = v_load(out + r * shape->o_stride + d + i * LANES);
    for (int n = 0; n < num_values; n++)
        for (int t = 0; t < shape->depth; t += 2) {
            vu32 pairs[PARTS];
            for (int i = 0; i < width; i++) pairs[i] = v_load_pairs((const bf16 *)values[n] + t * shape->v_dim + 2 * (d + i * LANES));
            for (int r = 0; r < count; r++) {
                vu32 pair = v_set_pair(weights + r * SPAN_STRIDE + n * shape->depth + t);
                for (int i = 0; i < width; i++) sums[r][i] += v_even_of(pair) * v_even_of(pairs[i]);
                for (int i = 0; i < width; i++) sums[r][i] += v_odd_of(pair) * v_odd_of(pairs[i]);
            }
        }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++) v_store(out + r * shape->o_stride + d + i * LANES, sums[r][i]);
}

INLINED void weigh_rows_f32(const struct attn_shape *shape, const float *weights, const void *const *values, int num_values, int d,
                            const int width, const int count, float *out) {
    vf32 sums[ROWS_AT_ONCE][PARTS];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++) sums[r][i] = v_load(out + r * shape->o_stride + d + i * LANES);
    for (int n = 0; n < num_values; n++)
        for (int t = 0; t < shape->depth; t++)
            for (int i = 0; i < width; i++) {
                vf32 v = v_load((const float *)values[n] + t * shape->v_dim + d + i * LANES);
                for (int r = 0; r < count; r++) sums[r][i] += weights[r * SPAN_STRIDE + n * shape->depth + t] * v;
            }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i++) v_store(out + r * shape->o_stride + d + i * LANES, sums[r][i]);
}

#if !HAVE_AVX512_BF16
static void scores_bf16(const struct attn_shape *shape, const bf16 *query, int num_rows, const void *const *groups, float *scores) {
    for (int g = 0; g < GROUPS_AT_ONCE; g++) {
#define ROWS(r, count) score_rows_bf16(shape, query + r * shape->q_stride, groups[g], count, scores + r * SPAN_STRIDE + g * GROUP)
        FOR_ROWS(num_rows, ROWS);
#undef ROWS
    }
}
#endif

static void scores_f32(const struct attn_shape *shape, const float *query, int num_rows, const void *const *groups, float *scores) {
    for (int g = 0; g < GROUPS_AT_ONCE; g++) {
#define ROWS(r, count) score_rows_f32(shape, query + r * shape->q_stride, groups[g], count, scores + r * SPAN_STRIDE + g * GROUP)
        FOR_ROWS(num_rows, ROWS);
#undef ROWS
    }
}

static void values_bf16(const struct attn_shape *shape, const bf16 *weights, int num_rows, const void *const *values, int count, float *out) {
    int v_dim = shape->v_dim, depth = shape->depth, d = 0;
#define ROWS(r, n) weigh_rows_bf16(shape, weights + r * SPAN_STRIDE, values, count, d, WIDTH, n, out + r * shape->o_stride)
#define WIDTH PARTS
    for (; d + PARTS * LANES <= v_dim; d += PARTS * LANES) FOR_ROWS(num_rows, ROWS);
#undef WIDTH
#define WIDTH 1
    for (; d + LANES <= v_dim; d += LANES) FOR_ROWS(num_rows, ROWS);
#undef WIDTH
#undef ROWS
    for (int i = 0; i < count && d < v_dim; i++)
        for (int r = 0; r < num_rows; r++)
            for (int t = 0; t < depth; t++)
                for (int c = d; c < v_dim; c++)
                    out[r * shape->o_stride + c] += f32_of_bf16(weights[r * SPAN_STRIDE + i * depth + t]) *
                                                    f32_of_bf16(((const bf16 *)values[i])[t / 2 * 2 * v_dim + 2 * c + t % 2]);
}

static void values_f32(const struct attn_shape *shape, const float *weights, int num_rows, const void *const *values, int count, float *out) {
    int v_dim = shape->v_dim, depth = shape->depth, d = 0;
#define ROWS(r, n) weigh_rows_f32(shape, weights + r * SPAN_STRIDE, values, count, d, WIDTH, n, out + r * shape->o_stride)
#define WIDTH PARTS
    for (; d + PARTS * LANES <= v_dim; d += PARTS * LANES) FOR_ROWS(num_rows, ROWS);
#undef WIDTH
#define WIDTH 1
    for (; d + LANES <= v_dim; d += LANES) FOR_ROWS(num_rows, ROWS);
#undef WIDTH
#undef ROWS
    for (int i = 0; i < count && d < v_dim; i++)
        for (int r = 0; r < num_rows; r++)
            for (int t = 0; t < depth; t++)
                for (int c = d; c < v_dim; c++)
                    out[r * shape->o_stride + c] += weights[r * SPAN_STRIDE + i * depth + t] * ((const float *)values[i])[t * v_dim + c];
}

/* ---- AVX512-BF16: even dims; v_dim a multiple of 16 ---- */

#if HAVE_AVX512_BF16
#define ROW_BLOCK 4

static inline __m512bh pair_of(const bf16 *p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return (__m512bh)_mm512_set1_epi32((int)u);
}

static inline __m512bh pairs_at(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

static void scores_avx512(const struct attn_shape *shape, const bf16 *query, int num_rows, const void *const *groups, float *scores) {
    for (int g = 0; g < GROUPS_AT_ONCE; g += 2) {
        const bf16 *k0 = groups[g], *k1 = groups[g + 1];
        for (int r0 = 0; r0 < num_rows; r0 += ROW_BLOCK) {
            int rows = num_rows - r0 < ROW_BLOCK ? num_rows - r0 : ROW_BLOCK;
            const bf16 *q = query + r0 * shape->q_stride;
            __m512 a[ROW_BLOCK] = {0}, b[ROW_BLOCK] = {0};
            for (int d = 0; d < shape->dim; d += 2) {
                __m512bh x = pairs_at(k0 + d * GROUP), y = pairs_at(k1 + d * GROUP);
                for (int r = 0; r < ROW_BLOCK; r++) { /* rows past num_rows are computed and dropped: the query tile has room */
                    __m512bh w = pair_of(q + r * shape->q_stride + d);
                    a[r] = _mm512_dpbf16_ps(a[r], w, x);
                    b[r] = _mm512_dpbf16_ps(b[r], w, y);
                }
            }
            for (int r = 0; r < rows; r++) {
                _mm512_storeu_ps(scores + (r0 + r) * SPAN_STRIDE + g * GROUP, a[r]);
                _mm512_storeu_ps(scores + (r0 + r) * SPAN_STRIDE + (g + 1) * GROUP, b[r]);
            }
        }
    }
}

static void values_avx512(const struct attn_shape *shape, const bf16 *weights, int num_rows, const void *const *values, int count,
                          float *out) {
    for (int r0 = 0; r0 < num_rows; r0 += ROW_BLOCK) {
        const bf16 *w = weights + r0 * SPAN_STRIDE;
        int rows = num_rows - r0 < ROW_BLOCK ? num_rows - r0 : ROW_BLOCK;
        for (int d = 0; d < shape->v_dim; d += LANES) {
            float *o = out + r0 * shape->o_stride + d;
            __m512 acc[ROW_BLOCK] = {0};
            for (int r = 0; r < rows; r++) acc[r] = _mm512_loadu_ps(o + r * shape->o_stride);
            for (int i = 0; i < count; i++) {
                const bf16 *v = (const bf16 *)values[i] + 2 * d;
                for (int t = 0; t < shape->depth; t += 2) {
                    __m512bh x = pairs_at(v + t * shape->v_dim);
                    for (int r = 0; r < ROW_BLOCK; r++) acc[r] = _mm512_dpbf16_ps(acc[r], pair_of(w + r * SPAN_STRIDE + i * shape->depth + t), x);
                }
            }
            for (int r = 0; r < rows; r++) _mm512_storeu_ps(o + r * shape->o_stride, acc[r]);
        }
    }
}
#endif

/* ---- AMX: both dims multiples of 16 ---- */

#if HAVE_AMX
#define TILE_ROWS 16
#define TILE_BYTES 1024
#define SCORE_STRIDE (SPAN_STRIDE * (int)sizeof(float))
#define WEIGHT_STRIDE (SPAN_STRIDE * (int)sizeof(bf16))

/* Sixteen rows against four groups. */
static void scores_amx_1x4(const bf16 *q, int dim, int q_stride, const void *const *groups, float *scores) {
    const char *k0 = groups[0], *k1 = groups[1], *k2 = groups[2], *k3 = groups[3];
    int stride = q_stride * (int)sizeof *q;
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    int d = 0, at = 0;
    for (; d + 32 <= dim; d += 32, at += TILE_BYTES) {
        TILE_LOAD(4, q + d, stride);
        TILE_LOAD(5, k0 + at, 64); TILE_DOT(0, 4, 5);
        TILE_LOAD(5, k1 + at, 64); TILE_DOT(1, 4, 5);
        TILE_LOAD(5, k2 + at, 64); TILE_DOT(2, 4, 5);
        TILE_LOAD(5, k3 + at, 64); TILE_DOT(3, 4, 5);
    }
    if (d < dim) {
        TILE_LOAD(6, q + d, stride);
        TILE_LOAD(7, k0 + at, 64); TILE_DOT(0, 6, 7);
        TILE_LOAD(7, k1 + at, 64); TILE_DOT(1, 6, 7);
        TILE_LOAD(7, k2 + at, 64); TILE_DOT(2, 6, 7);
        TILE_LOAD(7, k3 + at, 64); TILE_DOT(3, 6, 7);
    }
    TILE_STORE(0, scores, SCORE_STRIDE);
    TILE_STORE(1, scores + GROUP, SCORE_STRIDE);
    TILE_STORE(2, scores + 2 * GROUP, SCORE_STRIDE);
    TILE_STORE(3, scores + 3 * GROUP, SCORE_STRIDE);
}

/* Thirty-two rows against two groups. */
static void scores_amx_2x2(const bf16 *q, int dim, int q_stride, const void *const *groups, float *scores) {
    const char *k0 = groups[0], *k1 = groups[1];
    const bf16 *q1 = q + TILE_ROWS * q_stride;
    float *scores1 = scores + TILE_ROWS * SPAN_STRIDE;
    int stride = q_stride * (int)sizeof *q;
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    int d = 0, at = 0;
    for (; d + 32 <= dim; d += 32, at += TILE_BYTES) {
        TILE_LOAD(4, q + d, stride); TILE_LOAD(5, k0 + at, 64); TILE_DOT(0, 4, 5);
        TILE_LOAD(5, k1 + at, 64); TILE_DOT(1, 4, 5);
        TILE_LOAD(4, q1 + d, stride); TILE_DOT(3, 4, 5);
        TILE_LOAD(5, k0 + at, 64); TILE_DOT(2, 4, 5);
    }
    if (d < dim) {
        TILE_LOAD(6, q + d, stride); TILE_LOAD(7, k0 + at, 64); TILE_DOT(0, 6, 7);
        TILE_LOAD(7, k1 + at, 64); TILE_DOT(1, 6, 7);
        TILE_LOAD(6, q1 + d, stride); TILE_DOT(3, 6, 7);
        TILE_LOAD(7, k0 + at, 64); TILE_DOT(2, 6, 7);
    }
    TILE_STORE(0, scores, SCORE_STRIDE);
    TILE_STORE(1, scores + GROUP, SCORE_STRIDE);
    TILE_STORE(2, scores1, SCORE_STRIDE);
    TILE_STORE(3, scores1 + GROUP, SCORE_STRIDE);
}

static void scores_amx(const struct attn_shape *shape, const bf16 *query, int num_rows, const void *const *groups, float *scores) {
    if (num_rows <= TILE_ROWS) {
        scores_amx_1x4(query, shape->dim, shape->q_stride, groups, scores);
        return;
    }
    for (int g = 0; g < GROUPS_AT_ONCE; g += 2) scores_amx_2x2(query, shape->dim, shape->q_stride, groups + g, scores + g * GROUP);
}

#define LOAD_WEIGHTS(p) if (depth == 32) TILE_LOAD(4, p, WEIGHT_STRIDE); else TILE_LOAD(6, p, WEIGHT_STRIDE)
#define LOAD_VALUES(p) if (depth == 32) TILE_LOAD(5, p, v_stride); else TILE_LOAD(7, p, v_stride)
#define WEIGH(sums) if (depth == 32) TILE_DOT(sums, 4, 5); else TILE_DOT(sums, 6, 7)

/* Sixteen rows, 64 columns of values from `column`. */
static inline __attribute__((always_inline)) void values_1x4(const bf16 *w, const void *const *values, int count, int v_dim, int column,
                                                             float *o, int o_stride, const int depth) {
    int stride = o_stride * (int)sizeof *o, v_stride = v_dim * 2 * (int)sizeof *w;
    TILE_LOAD(0, o, stride); TILE_LOAD(1, o + 16, stride); TILE_LOAD(2, o + 32, stride); TILE_LOAD(3, o + 48, stride);
    for (int i = 0; i < count; i++) {
        const bf16 *v = (const bf16 *)values[i] + 2 * column;
        LOAD_WEIGHTS(w + i * depth);
        LOAD_VALUES(v); WEIGH(0);
        LOAD_VALUES(v + 32); WEIGH(1);
        LOAD_VALUES(v + 64); WEIGH(2);
        LOAD_VALUES(v + 96); WEIGH(3);
    }
    TILE_STORE(0, o, stride); TILE_STORE(1, o + 16, stride); TILE_STORE(2, o + 32, stride); TILE_STORE(3, o + 48, stride);
}

/* Thirty-two rows, 32 columns. */
static inline __attribute__((always_inline)) void values_2x2(const bf16 *w, const void *const *values, int count, int v_dim, int column,
                                                             float *o, int o_stride, const int depth) {
    int stride = o_stride * (int)sizeof *o, v_stride = v_dim * 2 * (int)sizeof *w;
    const bf16 *w1 = w + TILE_ROWS * SPAN_STRIDE;
    float *o1 = o + TILE_ROWS * o_stride;
    TILE_LOAD(0, o, stride); TILE_LOAD(1, o + 16, stride); TILE_LOAD(2, o1, stride); TILE_LOAD(3, o1 + 16, stride);
    for (int i = 0; i < count; i++) {
        const bf16 *v = (const bf16 *)values[i] + 2 * column;
        LOAD_WEIGHTS(w + i * depth);
        LOAD_VALUES(v); WEIGH(0);
        LOAD_VALUES(v + 32); WEIGH(1);
        LOAD_WEIGHTS(w1 + i * depth); WEIGH(3);
        LOAD_VALUES(v); WEIGH(2);
    }
    TILE_STORE(0, o, stride); TILE_STORE(1, o + 16, stride); TILE_STORE(2, o1, stride); TILE_STORE(3, o1 + 16, stride);
}

/* Sixteen rows, 16 columns. */
static inline __attribute__((always_inline)) void values_1x1(const bf16 *w, const void *const *values, int count, int v_dim, int column,
                                                             float *o, int o_stride, const int depth) {
    int stride = o_stride * (int)sizeof *o, v_stride = v_dim * 2 * (int)sizeof *w;
    TILE_LOAD(0, o, stride);
    for (int i = 0; i < count; i++) {
        LOAD_WEIGHTS(w + i * depth);
        LOAD_VALUES((const bf16 *)values[i] + 2 * column); WEIGH(0);
    }
    TILE_STORE(0, o, stride);
}

static inline __attribute__((always_inline)) void values_amx(const struct attn_shape *shape, const bf16 *weights, int num_rows,
                                                             const void *const *values, int count, float *out, const int depth) {
    int v_dim = shape->v_dim, stride = shape->o_stride, column = 0;
    if (num_rows > TILE_ROWS)
        for (; column + 32 <= v_dim; column += 32) values_2x2(weights, values, count, v_dim, column, out + column, stride, depth);
    else
        for (; column + 64 <= v_dim; column += 64) values_1x4(weights, values, count, v_dim, column, out + column, stride, depth);
    for (; column < v_dim; column += 16) {
        values_1x1(weights, values, count, v_dim, column, out + column, stride, depth);
        if (num_rows > TILE_ROWS)
            values_1x1(weights + TILE_ROWS * SPAN_STRIDE, values, count, v_dim, column, out + TILE_ROWS * stride + column, stride, depth);
    }
}
#endif

void attn_prepare(int num_rows) {
#if HAVE_AMX
    uint8_t rows = (uint8_t)(num_rows < TILE_ROWS ? num_rows : TILE_ROWS);
    struct tile_config config = {
        .palette = 1,
        .bytes_per_row = {64, 64, 64, 64, 64, 64, 32, 64},
        .rows = {rows, rows, rows, rows, rows, 16, rows, 8},
    };
    AMX_BEGIN(config);
#else
    (void)num_rows;
#endif
}

void attn_finish(void) { AMX_END(); }

void attn_scores(const struct attn_shape *shape, const void *query, int num_rows, const void *const *groups, float *scores) {
    if (shape->dtype == DTYPE_F32) {
        scores_f32(shape, query, num_rows, groups, scores);
        return;
    }
#if HAVE_AMX
    if (shape->dim % 16 == 0 && shape->v_dim % 16 == 0) {
        scores_amx(shape, query, num_rows, groups, scores);
        return;
    }
#endif
#if HAVE_AVX512_BF16
    scores_avx512(shape, query, num_rows, groups, scores);
#else
    scores_bf16(shape, query, num_rows, groups, scores);
#endif
}

void attn_values(const struct attn_shape *shape, const void *weights, int num_rows, const void *const *values, int count, float *out) {
    if (shape->dtype == DTYPE_F32) {
        values_f32(shape, weights, num_rows, values, count, out);
        return;
    }
#if HAVE_AMX
    if (shape->dim % 16 == 0 && shape->v_dim % 16 == 0) {
        if (shape->depth == 32) values_amx(shape, weights, num_rows, values, count, out, 32);
        else values_amx(shape, weights, num_rows, values, count, out, 16);
        return;
    }
#endif
#if HAVE_AVX512_BF16
    if (shape->v_dim % LANES == 0) {
        values_avx512(shape, weights, num_rows, values, count, out);
        return;
    }
#endif
    values_bf16(shape, weights, num_rows, values, count, out);
}
