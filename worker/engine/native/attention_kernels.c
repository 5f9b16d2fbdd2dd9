#include "attention_kernels.h"

#include "amx.h"

#if defined(__AVX512BF16__)
#define HAVE_AVX512_BF16 1
#else
#define HAVE_AVX512_BF16 0
#endif

/* ---- plain vectors: queries and weights in float32, keys and values in that or bfloat16 (`narrow`); any dims ---- */

#define PARTS (GROUP / LANES) /* vectors of a group of tokens */
#define MOST_ROWS 6           /* whose sums, sixteen each, fit sixteen registers of eight lanes and leave some over */
#define TOKENS_AT_ONCE 128    /* whose values are weighed together */
#define INLINED static inline __attribute__((always_inline))

/* Calls `rows(first, count)` for all of them, `count` a constant: sums of that many rows stay in registers. */
#define FOR_ROWS(num_rows, rows) \
    do { \
        int first = 0; \
        for (; first + MOST_ROWS <= (num_rows); first += MOST_ROWS) rows(first, MOST_ROWS); \
        switch ((num_rows) - first) { \
        case 5: rows(first, 5); break; \
        case 4: rows(first, 4); break; \
        case 3: rows(first, 3); break; \
        case 2: rows(first, 2); break; \
        case 1: rows(first, 1); break; \
        } \
    } while (0)

/* sums[r] += x[r] * sixteen columns of row n of a group whose rows are `width` wide. The rows of a narrow group lie in pairs, so that
 * sixteen columns are 64 bytes of both kinds; callers go through rows two at a time, which makes n % 2 a constant. */
INLINED void add_row(vf32 sums[][PARTS], const int count, const float *x, int x_stride, const float *group, int n, int width, const int narrow) {
    vf32 row[PARTS];
    for (int i = 0; i < PARTS; i++) {
        if (narrow) {
            vu32 pairs = v_load_pairs((const bf16 *)(group + n / 2 * width + i * LANES));
            row[i] = v_hold(n % 2 ? v_odd_of(pairs) : v_even_of(pairs));
        } else row[i] = v_hold(v_load(group + n * width + i * LANES));
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) sums[r][i] = v_fma(sums[r][i], v_set(x[r * x_stride]), row[i]);
}

INLINED void score_rows(const struct attn_shape *shape, const float *q, const float *keys, const int narrow, const int count, float *scores) {
    vf32 sums[MOST_ROWS][PARTS] = {0};
    for (int pair = 0; pair < shape->dim; pair += 1 + narrow)
        for (int d = pair; d <= pair + narrow; d++) add_row(sums, count, q + d, shape->q_stride, keys, d, GROUP, narrow);
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) v_store(scores + r * SPAN_STRIDE + i * LANES, sums[r][i]);
}

INLINED void scores_plain(const struct attn_shape *shape, const float *query, int num_rows, const void *const *groups, const int narrow,
                          float *scores) {
#define ROWS(r, count) score_rows(shape, query + r * shape->q_stride, groups[g], narrow, count, scores + r * SPAN_STRIDE + g * GROUP)
    for (int g = 0; g < GROUPS_AT_ONCE; g++) FOR_ROWS(num_rows, ROWS);
#undef ROWS
}

/* Sixteen columns of values from column c on. */
INLINED void weigh_columns(const struct attn_shape *shape, const float *weights, const void *const *values, int num_values, int c,
                           const int narrow, const int count, float *out) {
    vf32 sums[MOST_ROWS][PARTS];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) sums[r][i] = v_load(out + r * shape->o_stride + c + i * LANES);
    for (int n = 0; n < num_values; n++, weights += shape->depth)
        for (int pair = 0; pair < shape->depth; pair += 2)
            for (int t = pair; t < pair + 2; t++)
                add_row(sums, count, weights + t, SPAN_STRIDE, (const float *)values[n] + c, t, shape->v_dim, narrow);
    for (int r = 0; r < count; r++)
        for (int i = 0; i < PARTS; i++) v_store(out + r * shape->o_stride + c + i * LANES, sums[r][i]);
}

/* The columns from c on, fewer than sixteen. */
static void weigh_last(const struct attn_shape *shape, const float *weights, int num_rows, const void *const *values, int num_values, int c,
                       const int narrow, float *out) {
    for (int n = 0; n < num_values; n++, weights += shape->depth)
        for (int r = 0; r < num_rows; r++)
            for (int t = 0; t < shape->depth; t++)
                for (int i = c; i < shape->v_dim; i++) {
                    const bf16 *pairs = (const bf16 *)values[n] + t / 2 * 2 * shape->v_dim + 2 * i;
                    float value = narrow ? f32_of_bf16(pairs[t % 2]) : ((const float *)values[n])[t * shape->v_dim + i];
                    out[r * shape->o_stride + i] += weights[r * SPAN_STRIDE + t] * value;
                }
}

/* Columns outside, rows inside: sixteen columns of so many tokens stay in the first cache for all rows. */
INLINED void weigh_tokens(const struct attn_shape *shape, const float *weights, int num_rows, const void *const *values, int num_values,
                          const int narrow, float *out) {
#define ROWS(r, count) \
    weigh_columns(shape, weights + r * SPAN_STRIDE, values, num_values, c, narrow, count, out + r * shape->o_stride)
    for (int c = 0; c + GROUP <= shape->v_dim; c += GROUP) FOR_ROWS(num_rows, ROWS);
#undef ROWS
}

INLINED void values_plain(const struct attn_shape *shape, const float *weights, int num_rows, const void *const *values, int num_values,
                          const int narrow, float *out) {
    int step = TOKENS_AT_ONCE / shape->depth;
    for (int n = 0; n < num_values; n += step)
        weigh_tokens(shape, weights + n * shape->depth, num_rows, values + n, num_values - n < step ? num_values - n : step, narrow, out);
    weigh_last(shape, weights, num_rows, values, num_values, shape->v_dim / GROUP * GROUP, narrow, out);
}

/* ---- AVX512-BF16: all in bfloat16; v_dim a multiple of 16 ---- */

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

/* ---- AMX: all in bfloat16; both dims multiples of 16 ---- */

#if HAVE_AMX
static int serves_amx(const struct attn_shape *shape) { return shape->dim % 16 == 0 && shape->v_dim % 16 == 0; }

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

int attn_dtype(const struct attn_layer *layer) {
    int whole = layer->v_dim % 16 == 0 && (HAVE_AVX512_BF16 || (HAVE_AMX && layer->head_dim % 16 == 0));
    return layer->dtype == DTYPE_BF16 && whole ? DTYPE_BF16 : DTYPE_F32;
}

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
        if (shape->kv_dtype == DTYPE_F32) scores_plain(shape, query, num_rows, groups, 0, scores);
        else scores_plain(shape, query, num_rows, groups, 1, scores);
        return;
    }
#if HAVE_AMX
    if (serves_amx(shape)) {
        scores_amx(shape, query, num_rows, groups, scores);
        return;
    }
#endif
#if HAVE_AVX512_BF16
    scores_avx512(shape, query, num_rows, groups, scores);
#endif
}

void attn_values(const struct attn_shape *shape, const void *weights, int num_rows, const void *const *values, int count, float *out) {
    if (shape->dtype == DTYPE_F32) {
        if (shape->kv_dtype == DTYPE_F32) values_plain(shape, weights, num_rows, values, count, 0, out);
        else values_plain(shape, weights, num_rows, values, count, 1, out);
        return;
    }
#if HAVE_AMX
    if (serves_amx(shape)) {
        if (shape->depth == 32) values_amx(shape, weights, num_rows, values, count, out, 32);
        else values_amx(shape, weights, num_rows, values, count, out, 16);
        return;
    }
#endif
#if HAVE_AVX512_BF16
    values_avx512(shape, weights, num_rows, values, count, out);
#endif
}
