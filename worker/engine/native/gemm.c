#include "gemm.h"

#include "amx.h"

#define BLOCK_FLOATS (ROW_BLOCK * PANEL)
#define MAX_BLOCKS 8  /* row blocks whose sums are held while a panel's steps are worked off in pieces */
#define MAX_STEPS 18  /* steps of a piece: a block of rows and the piece of the panel nearly fit the first cache */

int64_t gemm_scratch_bytes(void) { return MAX_BLOCKS * BLOCK_FLOATS * sizeof(float); }

/* sums[32][32] (+)= the block's rows x `steps` steps of a panel. `ahead`: what to prefetch meanwhile, `lines` cache lines a step. */
struct block {
    const bf16 *rows;
    const struct operand *a;
    const bf16 *weights;
    int num_rows, steps, add;
    float *sums;
    const char *ahead;
};

#if HAVE_AMX
static const struct tile_config tiles_of_depth_32 = {
    .palette = 1,
    .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

#define SUM_STRIDE (PANEL * (int)sizeof(float))

static inline __attribute__((always_inline)) void block_32(const struct block *b, const int lines) {
    const bf16 *a0 = b->rows, *a1 = a0 + b->a->tile_stride, *w = b->weights;
    int64_t stride = b->a->row_stride * (int64_t)sizeof *a0, step = b->a->step_stride;
    float *s0 = b->sums, *s1 = s0 + TILE_ROWS * PANEL;
    const char *ahead = b->ahead;
    if (b->add) {
        TILE_LOAD(0, s0, SUM_STRIDE); TILE_LOAD(1, s0 + 16, SUM_STRIDE); TILE_LOAD(2, s1, SUM_STRIDE); TILE_LOAD(3, s1 + 16, SUM_STRIDE);
    } else {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    }
    for (int i = 0; i < b->steps; i++) {
        TILE_LOAD(4, a0, stride); TILE_LOAD(5, w, 64); TILE_DOT(0, 4, 5);
        TILE_LOAD(6, w + TILE_ELEMENTS, 64); TILE_DOT(1, 4, 6);
        TILE_LOAD(4, a1, stride); TILE_DOT(2, 4, 5); TILE_DOT(3, 4, 6);
        for (int l = 0; l < lines; l++) __builtin_prefetch(ahead + l * CACHE_LINE, 0, 2);
        a0 += step, a1 += step, w += 2 * TILE_ELEMENTS, ahead += lines * CACHE_LINE;
    }
    TILE_STORE(0, s0, SUM_STRIDE); TILE_STORE(1, s0 + 16, SUM_STRIDE); TILE_STORE(2, s1, SUM_STRIDE); TILE_STORE(3, s1 + 16, SUM_STRIDE);
}

static inline __attribute__((always_inline)) void block_16(const struct block *b, const int lines) {
    const bf16 *a0 = b->rows, *w = b->weights;
    int64_t stride = b->a->row_stride * (int64_t)sizeof *a0, step = b->a->step_stride;
    const char *ahead = b->ahead;
    if (b->add) {
        TILE_LOAD(0, b->sums, SUM_STRIDE); TILE_LOAD(1, b->sums + 16, SUM_STRIDE);
    } else {
        TILE_ZERO(0); TILE_ZERO(1);
    }
    for (int i = 0; i < b->steps; i++) {
        TILE_LOAD(4, a0, stride); TILE_LOAD(5, w, 64); TILE_DOT(0, 4, 5);
        TILE_LOAD(6, w + TILE_ELEMENTS, 64); TILE_DOT(1, 4, 6);
        for (int l = 0; l < lines; l++) __builtin_prefetch(ahead + l * CACHE_LINE, 0, 2);
        a0 += step, w += 2 * TILE_ELEMENTS, ahead += lines * CACHE_LINE;
    }
    TILE_STORE(0, b->sums, SUM_STRIDE); TILE_STORE(1, b->sums + 16, SUM_STRIDE);
}

/* The next panel's lines are asked for evenly over this panel's blocks of rows; the loop must know how many when it is compiled. */
static int multiply(const struct block *b, int num_blocks) {
#define WITH(lines) (b->num_rows > TILE_ROWS ? block_32(b, lines) : block_16(b, lines), (lines) * CACHE_LINE * b->steps)
    if (num_blocks == 1) return WITH(32);
    if (num_blocks == 2) return WITH(16);
    if (num_blocks <= 4) return WITH(8);
    return WITH(2);
#undef WITH
}

#elif defined(__AVX512BF16__) && !defined(HEADRACE_NO_AVX512)
#define ROWS_AT_ONCE 8

static void multiply_rows(const struct block *b, int first, int count) {
    __m512 left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];
    const bf16 *rows[ROWS_AT_ONCE], *w = b->weights;
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        int row = first + (r < count ? r : 0);
        rows[r] = b->rows + row / TILE_ROWS * b->a->tile_stride + row % TILE_ROWS * b->a->row_stride;
        left[r] = b->add ? _mm512_loadu_ps(b->sums + row * PANEL) : _mm512_setzero_ps();
        right[r] = b->add ? _mm512_loadu_ps(b->sums + row * PANEL + LANES) : _mm512_setzero_ps();
    }
    for (int i = 0; i < b->steps; i++, w += 2 * TILE_ELEMENTS)
        for (int k = 0; k < PANEL; k += 2) {
            __m512bh x = (__m512bh)_mm512_loadu_si512(w + k * LANES), y = (__m512bh)_mm512_loadu_si512(w + TILE_ELEMENTS + k * LANES);
            for (int r = 0; r < ROWS_AT_ONCE; r++) {
                uint32_t pair;
                memcpy(&pair, rows[r] + i * b->a->step_stride + k, sizeof pair);
                left[r] = _mm512_dpbf16_ps(left[r], (__m512bh)_mm512_set1_epi32((int)pair), x);
                right[r] = _mm512_dpbf16_ps(right[r], (__m512bh)_mm512_set1_epi32((int)pair), y);
            }
        }
    for (int r = 0; r < count; r++) {
        _mm512_storeu_ps(b->sums + (first + r) * PANEL, left[r]);
        _mm512_storeu_ps(b->sums + (first + r) * PANEL + LANES, right[r]);
    }
}

static int multiply(const struct block *b, int num_blocks) {
    (void)num_blocks;
    for (int r = 0; r < b->num_rows; r += ROWS_AT_ONCE) multiply_rows(b, r, b->num_rows - r < ROWS_AT_ONCE ? b->num_rows - r : ROWS_AT_ONCE);
    return 0;
}

#else

static inline v16f widened(v16u pairs, int odd) { return (v16f)(odd ? pairs & 0xffff0000u : pairs << 16); }

static int multiply(const struct block *b, int num_blocks) {
    (void)num_blocks;
    for (int row = 0; row < b->num_rows; row++) {
        const bf16 *a = b->rows + row / TILE_ROWS * b->a->tile_stride + row % TILE_ROWS * b->a->row_stride, *w = b->weights;
        float *s = b->sums + row * PANEL;
        v16f left = b->add ? v_load(s) : v_set(0), right = b->add ? v_load(s + LANES) : v_set(0);
        for (int i = 0; i < b->steps; i++, a += b->a->step_stride, w += 2 * TILE_ELEMENTS)
            for (int k = 0; k < PANEL; k++) {
                v16u x, y;
                memcpy(&x, w + k / 2 * 2 * LANES, sizeof x);
                memcpy(&y, w + TILE_ELEMENTS + k / 2 * 2 * LANES, sizeof y);
                left += f32_of_bf16(a[k]) * widened(x, k % 2);
                right += f32_of_bf16(a[k]) * widened(y, k % 2);
            }
        v_store(s, left);
        v_store(s + LANES, right);
    }
    return 0;
}
#endif

static inline v16f activated(v16f x, enum activation activation) {
    if (activation == SILU) return x * v_sigmoid(x);
    return 0.5f * x * (1.0f + v_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
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
    }
}

/* The last panel of a matrix whose outputs are no multiple of 32; only float32 results are ever that odd. */
static void store_part(const struct result *out, int row, int column, const float *sums, const float *bias) {
    float *to = (float *)out->data + row * out->stride + column;
    for (int i = 0; i < out->columns - column; i++) to[i] = sums[i] + (bias ? bias[column + i] : 0);
}

static void store_block(const struct matrix *w, const struct result *out, int row, int num_rows, int column, const float *sums) {
    v16f left = {0}, right = {0};
    if (w->bias) left = v_load(w->bias + column), right = v_load(w->bias + column + LANES);
    for (int r = 0; r < num_rows; r++, sums += PANEL) {
        if (column + PANEL > out->columns) store_part(out, row + r, column, sums, w->bias);
        else store_row(out, row + r, column, v_load(sums) + left, v_load(sums + LANES) + right);
    }
}

static int min_int(int a, int b) { return a < b ? a : b; }

/* One panel against rows [begin, end), at most MAX_BLOCKS blocks of them. */
static const char *run_panel(const struct matrix *w, struct operand a, int panel, int begin, int end, int num_blocks,
                             const struct result *out, float *scratch, const char *ahead) {
    int steps = w->k / PANEL, pieces = (steps + MAX_STEPS - 1) / MAX_STEPS, size = (steps + pieces - 1) / pieces;
    for (int first = 0; first < steps; first += size) {
        int count = min_int(size, steps - first);
        for (int row = begin; row < end; row += ROW_BLOCK) {
            float *sums = scratch + (row - begin) * PANEL;
            struct block b = {
                .rows = a.data + row / TILE_ROWS * a.tile_stride + first * a.step_stride, .a = &a,
                .weights = w->tiles + ((int64_t)panel * steps + first) * 2 * TILE_ELEMENTS,
                .num_rows = min_int(end - row, ROW_BLOCK), .steps = count, .add = first > 0, .sums = sums, .ahead = ahead,
            };
            ahead += multiply(&b, num_blocks);
            if (first + count == steps) store_block(w, out, row, b.num_rows, panel * PANEL, sums);
        }
    }
    return ahead;
}

static int take(struct panels *panels) { return panels->team ? team_take(panels->team) : panels->next++; }

void gemm(const struct matrix *w, struct operand a, int begin, int end, struct panels panels, const struct result *out, float *scratch) {
    int num_panels = w->n / PANEL, num_blocks = (end - begin + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t panel_elements = (int64_t)w->k * PANEL;
    AMX_BEGIN(tiles_of_depth_32);
    for (int panel = take(&panels), next; panel < num_panels; panel = next) {
        next = take(&panels);
        const char *ahead = (const char *)(w->tiles + (next < num_panels ? next : panel) * panel_elements);
        for (int row = begin; row < end; row += MAX_BLOCKS * ROW_BLOCK)
            ahead = run_panel(w, a, panel, row, min_int(end, row + MAX_BLOCKS * ROW_BLOCK), num_blocks, out, scratch, ahead);
    }
    AMX_END();
}
