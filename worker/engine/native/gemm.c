#include "gemm.h"

#include "amx.h"
#include "gemm_store.h"

#define BLOCK_FLOATS (ROW_BLOCK * PANEL)
#define MAX_BLOCKS 8  /* row blocks whose sums are held while a panel's steps are processed in pieces */
#define MAX_STEPS 18  /* steps of a piece: a block of rows and the piece of the panel nearly fit the first-level cache */
#define STEP_ELEMENTS (2 * TILE_ELEMENTS)
#define LINES_AHEAD 4 /* cache lines of the next panel prefetched in each step: more would delay this block's own loads */

#if HAVE_AMX || defined(__AVX512BF16__)
#define WIDE_FLOATS 0
#else
#define WIDE_FLOATS (512 * 1024) /* of rows widened to float32: they fit the second- or third-level cache */
#endif

/* What a thread needs for itself. */
struct scratch {
    float sums[MAX_BLOCKS * BLOCK_FLOATS];
    bf16 panel[MAX_STEPS * STEP_ELEMENTS]; /* a piece of a panel of int8, in bfloat16 */
    float wide[WIDE_FLOATS];               /* rows one after the other, where the processor does not multiply bfloat16 */
};

int64_t gemm_scratch_bytes(void) { return sizeof(struct scratch); }

/* sums[ROW_BLOCK][32] (+)= the block's rows x `steps` steps of a panel. */
struct block {
    const bf16 *rows;
    const float *wide; /* the same, widened, `wide_stride` apart */
    int wide_stride;
    const struct operand *a;
    const bf16 *weights;
    int num_rows, steps, add;
    float *sums;
    const char *ahead;       /* what the caches should get meanwhile */
    struct pending *pending; /* what may be stored meanwhile */
};

#if HAVE_AMX
static const struct tile_config tiles_of_depth_32 = {
    .palette = 1,
    .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

#define SUM_STRIDE (PANEL * (int)sizeof(float))

static void multiply_32(const struct block *b) {
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
        if (b->pending->count > 1) {
            store_next(b->pending);
            store_next(b->pending);
        }
        for (int l = 0; l < LINES_AHEAD; l++, ahead += CACHE_LINE) __builtin_prefetch(ahead, 0, 2);
        a0 += step, a1 += step, w += 2 * TILE_ELEMENTS;
    }
    store_rest(b->pending); /* its sums may be where these go */
    TILE_STORE(0, s0, SUM_STRIDE); TILE_STORE(1, s0 + 16, SUM_STRIDE); TILE_STORE(2, s1, SUM_STRIDE); TILE_STORE(3, s1 + 16, SUM_STRIDE);
}

static void multiply_16(const struct block *b) {
    const bf16 *a0 = b->rows, *w = b->weights;
    int64_t stride = b->a->row_stride * (int64_t)sizeof *a0, step = b->a->step_stride;
    if (b->add) {
        TILE_LOAD(0, b->sums, SUM_STRIDE); TILE_LOAD(1, b->sums + 16, SUM_STRIDE);
    } else {
        TILE_ZERO(0); TILE_ZERO(1);
    }
    for (int i = 0; i < b->steps; i++) {
        TILE_LOAD(4, a0, stride); TILE_LOAD(5, w, 64); TILE_DOT(0, 4, 5);
        TILE_LOAD(6, w + TILE_ELEMENTS, 64); TILE_DOT(1, 4, 6);
        a0 += step, w += 2 * TILE_ELEMENTS;
    }
    store_rest(b->pending);
    TILE_STORE(0, b->sums, SUM_STRIDE); TILE_STORE(1, b->sums + 16, SUM_STRIDE);
}

static void multiply(const struct block *b) {
    if (b->num_rows > TILE_ROWS) multiply_32(b);
    else multiply_16(b);
}

#elif defined(__AVX512BF16__)
#define ROWS_AT_ONCE 8

static void multiply_rows(const struct block *b, int first, int count) {
    __m512 left[ROWS_AT_ONCE], right[ROWS_AT_ONCE];
    const bf16 *rows[ROWS_AT_ONCE], *w = b->weights;
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        int row = first + (r < count ? r : 0);
        rows[r] = b->rows + row / TILE_ROWS * b->a->tile_stride + row % TILE_ROWS * b->a->row_stride;
        left[r] = b->add ? _mm512_loadu_ps(b->sums + row * PANEL) : _mm512_setzero_ps();
        right[r] = b->add ? _mm512_loadu_ps(b->sums + row * PANEL + TILE_ROWS) : _mm512_setzero_ps();
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

static void multiply(const struct block *b) {
    store_rest(b->pending);
    for (int r = 0; r < b->num_rows; r += ROWS_AT_ONCE) multiply_rows(b, r, b->num_rows - r < ROWS_AT_ONCE ? b->num_rows - r : ROWS_AT_ONCE);
}

#else
#define PARTS (TILE_ROWS / LANES) /* vectors of a tile's 16 outputs */
#define ROWS_AT_ONCE 6            /* 12 of 16 registers of 8 lanes hold the sums of this many rows and a tile, or half as many and two tiles */
#define STEPS_AHEAD 4             /* of the weights, prefetched while the first rows are multiplied: the hardware prefetcher is too late */

/* `count` rows from `first` on against `tiles` of the panel's two tiles, from `tile` on. */
static inline __attribute__((always_inline)) void multiply_rows(const struct block *b, int first, const int count, int tile,
                                                                const int tiles) {
    vf32 sums[ROWS_AT_ONCE][2 * PARTS];
    const bf16 *w = b->weights + tile * TILE_ELEMENTS;
    int width = b->wide_stride;
    const float *rows = b->wide + first * width;
    float *to = b->sums + first * PANEL + tile * TILE_ROWS;
    for (int r = 0; r < count; r++)
        for (int i = 0; i < tiles * PARTS; i++) sums[r][i] = b->add ? v_load(to + r * PANEL + i * LANES) : v_set(0);
    for (int step = 0; step < b->steps; step++, w += STEP_ELEMENTS, rows += PANEL) {
        if (first == 0)
            for (int l = 0; l < tiles * TILE_ROWS; l++) __builtin_prefetch(w + STEPS_AHEAD * STEP_ELEMENTS + l * 2 * TILE_ROWS);
        for (int pair = 0; pair < PANEL; pair += 2) {
            vu32 pairs[2 * PARTS];
            for (int i = 0; i < tiles * PARTS; i++)
                pairs[i] = v_load_pairs(w + i / PARTS * TILE_ELEMENTS + pair * TILE_ROWS + i % PARTS * 2 * LANES);
            for (int k = pair; k < pair + 2; k++) {
                vf32 weights[2 * PARTS];
                for (int i = 0; i < tiles * PARTS; i++) weights[i] = v_hold(k % 2 ? v_odd_of(pairs[i]) : v_even_of(pairs[i]));
                for (int r = 0; r < count; r++)
                    for (int i = 0; i < tiles * PARTS; i++) sums[r][i] = v_fma(sums[r][i], v_set(rows[r * width + k]), weights[i]);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < tiles * PARTS; i++) v_store(to + r * PANEL + i * LANES, sums[r][i]);
}

/* Both tiles together if registers hold the sums, else one after the other. */
static inline __attribute__((always_inline)) void multiply_few(const struct block *b, int first, const int count) {
    const int tiles = LANES == 16 || count <= ROWS_AT_ONCE / 2 ? 2 : 1;
    for (int tile = 0; tile < 2; tile += tiles) multiply_rows(b, first, count, tile, tiles);
}

static void multiply(const struct block *b) {
    store_rest(b->pending);
    int row = 0;
    for (; row + ROWS_AT_ONCE <= b->num_rows; row += ROWS_AT_ONCE) multiply_few(b, row, ROWS_AT_ONCE);
    switch (b->num_rows - row) {
    case 5: multiply_few(b, row, 5); break;
    case 4: multiply_few(b, row, 4); break;
    case 3: multiply_few(b, row, 3); break;
    case 2: multiply_few(b, row, 2); break;
    case 1: multiply_few(b, row, 1); break;
    }
}
#endif

static int min_int(int a, int b) { return a < b ? a : b; }

/* Floats of such small integers have zero lower halves. */
static void codes_to_bf16(const int8_t *codes, int count, bf16 *out) {
    for (int i = 0; i < count; i += PANEL)
        for (int c = 0; c < TILE_ROWS; c += LANES)
            v_store_pairs(out + i + 2 * c, (vu32)v_load_int8(codes + i + c) >> 16 | (vu32)v_load_int8(codes + i + TILE_ROWS + c));
}

/* `steps` steps of the weights from step `first` on, in bfloat16: in place, or converted into `room`. */
static const bf16 *steps_of(const struct matrix *w, int64_t first, int steps, bf16 *room) {
    if (!w->scale) return (const bf16 *)w->tiles + first * STEP_ELEMENTS;
    codes_to_bf16((const int8_t *)w->tiles + first * STEP_ELEMENTS, steps * STEP_ELEMENTS, room);
    return room;
}

/* The rows by which one panel after the other is multiplied. */
static int rows_at_once(const struct matrix *w) {
    int most = MAX_BLOCKS * ROW_BLOCK;
#if WIDE_FLOATS
    int fit = WIDE_FLOATS / w->k;
    if (fit < most) most = fit < ROWS_AT_ONCE ? fit : fit / ROWS_AT_ONCE * ROWS_AT_ONCE;
#endif
    return most;
}

/* Rows are read once for each tile of outputs: widened once for all of them. */
static void widen_rows(struct operand a, int begin, int end, int k, float *wide) {
    for (int row = begin; row < end && WIDE_FLOATS; row++) {
        const bf16 *from = a.data + row / TILE_ROWS * a.tile_stride + row % TILE_ROWS * a.row_stride;
        for (int step = 0; step < k; step += PANEL, from += a.step_stride, wide += PANEL)
            for (int i = 0; i < PANEL; i += LANES) v_store(wide + i, v_load_bf16(from + i));
    }
}

/* One panel against rows [begin, end), at most `rows_at_once`. */
static void run_panel(const struct matrix *w, struct operand a, int panel, int begin, int end, const struct result *out, struct scratch *scratch,
                      struct pending *pending) {
    int steps = w->k / PANEL, pieces = (steps + MAX_STEPS - 1) / MAX_STEPS, size = (steps + pieces - 1) / pieces;
    int64_t before = (int64_t)panel * steps, step_bytes = STEP_ELEMENTS * (w->scale ? sizeof(int8_t) : sizeof(bf16));
    const char *ahead = (const char *)w->tiles + (before + steps) * step_bytes;
    for (int first = 0; first < steps; first += size) {
        int count = min_int(size, steps - first);
        const bf16 *weights = steps_of(w, before + first, count, scratch->panel);
        for (int row = begin; row < end; row += ROW_BLOCK, ahead += LINES_AHEAD * CACHE_LINE * count) {
            struct block b = {
                .rows = a.data + row / TILE_ROWS * a.tile_stride + first * a.step_stride, .a = &a,
                .wide = scratch->wide + (int64_t)(row - begin) * w->k + first * PANEL, .wide_stride = w->k,
                .weights = weights, .num_rows = min_int(end - row, ROW_BLOCK), .steps = count,
                .add = first > 0, .sums = scratch->sums + (row - begin) * PANEL, .ahead = ahead, .pending = pending,
            };
            multiply(&b);
            if (first + count == steps) *pending = (struct pending){w, out, b.sums, row, b.num_rows, panel * PANEL};
        }
    }
}

static int take(struct panels *panels) { return panels->team ? team_take(panels->team) : panels->next++; }

void gemm(const struct matrix *w, struct operand a, int begin, int end, struct panels panels, const struct result *out, void *room) {
    struct scratch *scratch = room;
    struct pending pending = {.count = 0};
    int num_panels = w->n / PANEL, most = rows_at_once(w), num_parts = (end - begin + most - 1) / most, widened = -1;
    AMX_BEGIN(tiles_of_depth_32);
    for (int i; (i = take(&panels)) < num_parts * num_panels;) {
        int part = i / num_panels, first = begin + part * most, last = min_int(end, first + most);
        if (part != widened) widen_rows(a, first, last, w->k, scratch->wide);
        widened = part;
        run_panel(w, a, i % num_panels, first, last, out, scratch, &pending);
    }
    store_rest(&pending);
    AMX_END();
}
