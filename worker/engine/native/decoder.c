#include "decoder.h"

#include <time.h>

#include "elementwise.h"

/* From this many rows per thread on, each thread takes its own rows through all weights; below, threads share the weights' panels.
 * A thread's own rows stay in its cache; its own panels are read from memory once. */
#define WIDE_ROWS 96
/* A thread takes this many of its own rows at once from product to product, so that one product's output is cached for the next. */
#define WIDE_BLOCK 256
#define WIDE_UNIT 32 /* shares of rows are multiples of it: whole tiles, and equal ones for the usual budgets */

/* A thread's view of a running step. */
struct run {
    const struct decoder *decoder;
    const struct step *step;
    struct team *team;
    struct attn_plan *plan;
    float *residual, *branch;        /* [rows][hidden] */
    bf16 *normed, *gated;            /* tiled */
    bf16 *qkv, *attended, *selected; /* plain rows; selected: tiled, the rows whose logits are wanted */
    char *scratch;                   /* this thread's, for products */
    struct best *best;               /* [threads][rows whose logits are wanted] */
    int tid, wide, begin, end;       /* this thread's rows */
    double since;                    /* when the phase began that is running */
};

#ifndef HEADRACE_CLOCK
#define HEADRACE_CLOCK CLOCK_MONOTONIC
#endif

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(HEADRACE_CLOCK, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Books the time since the last call under `phase`. */
static void book(struct run *run, enum phase phase) {
    if (!run->step->phase_seconds || run->tid) return;
    double now = now_seconds();
    run->step->phase_seconds[phase] += now - run->since;
    run->since = now;
}

struct carver { char *at; };

static void *carve(struct carver *c, int64_t bytes) {
    char *piece = c->at;
    c->at += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return piece;
}

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Gives a run its buffers, and returns what follows them. With a workspace at NULL: their size. */
static char *carve_buffers(const struct decoder *d, int num_tokens, int num_logits, int num_threads, char *workspace, struct run *run) {
    struct carver c = {workspace};
    const struct decoder_layer *layer = d->layers;
    int64_t rows = round_up(num_tokens, ROW_BLOCK), logits = round_up(num_logits, ROW_BLOCK);
    run->residual = carve(&c, rows * d->hidden * (int64_t)sizeof(float));
    run->branch = layer->attn_out_norm ? carve(&c, rows * d->hidden * (int64_t)sizeof(float)) : NULL;
    run->normed = carve(&c, rows * d->hidden * (int64_t)sizeof(bf16));
    run->gated = carve(&c, rows * d->intermediate * (int64_t)sizeof(bf16));
    run->qkv = carve(&c, rows * layer->qkv.n * (int64_t)sizeof(bf16));
    run->attended = carve(&c, rows * layer->o.k * (int64_t)sizeof(bf16));
    run->selected = carve(&c, logits * d->hidden * (int64_t)sizeof(bf16));
    run->best = carve(&c, (int64_t)num_threads * num_logits * (int64_t)sizeof(struct best));
    run->scratch = carve(&c, num_threads * gemm_scratch_bytes());
    return c.at;
}

int64_t decoder_workspace_bytes(const struct decoder *d, int32_t num_seqs, int32_t num_tokens, int32_t num_logits, int32_t num_threads) {
    struct run run;
    int64_t buffers = carve_buffers(d, num_tokens, num_logits, num_threads, NULL, &run) - (char *)NULL;
    return buffers + attn_workspace_bytes(&d->layers[0].attn, num_seqs, num_tokens, num_threads);
}

/* Ends a phase whose results other threads read next. A thread's own rows are read only by itself. */
static void end_phase(struct run *run) {
    if (!run->wide) team_barrier(run->team);
}

static void product(struct run *run, const struct matrix *w, struct operand rows, struct result result) {
    if (run->wide) gemm(w, rows, run->begin, run->end, (struct panels){NULL, 0}, &result, run->scratch);
    else gemm(w, rows, 0, run->step->batch.num_tokens, (struct panels){run->team, 0}, &result, run->scratch);
    end_phase(run);
}

static void embed(struct run *run) {
    const struct decoder *d = run->decoder;
    for (int row = run->begin; row < run->end; row++) {
        const bf16 *from = d->embedding + run->step->token_ids[row] * d->hidden;
        float *to = run->residual + (int64_t)row * d->hidden;
        for (int i = 0; i < d->hidden; i += LANES) v_store(to + i, v_load_bf16(from + i) * d->embedding_factor);
    }
}

static void norm(struct run *run, const float *weight) {
    const struct decoder *d = run->decoder;
    for (int row = run->begin; row < run->end; row++)
        norm_to_tiles(run->residual + (int64_t)row * d->hidden, weight, d->hidden, d->norm_eps, run->normed, row);
    end_phase(run);
}

/* Adds a branch's output to the residual stream, normed first if the model does so. */
static void add_branch(struct run *run, const struct matrix *w, struct operand rows, const float *out_norm) {
    const struct decoder *d = run->decoder;
    struct result result = {.store = ADD_F32, .data = run->residual, .stride = d->hidden, .columns = d->hidden, .factor = d->residual_factor};
    if (!out_norm) {
        product(run, w, rows, result);
        return;
    }
    result.store = STORE_F32;
    result.data = run->branch;
    product(run, w, rows, result);
    for (int row = run->begin; row < run->end; row++) {
        int64_t at = (int64_t)row * d->hidden;
        add_normed(run->residual + at, run->branch + at, out_norm, d->hidden, d->norm_eps, d->residual_factor);
    }
    /* the rows are this thread's own in the next norm too */
}

/* Norms and rotates queries and keys of this thread's rows, and stores keys and values. */
static void place_heads(struct run *run, const struct decoder_layer *layer) {
    const struct attn_layer *a = &layer->attn;
    int width = layer->qkv.n, half = run->decoder->rotary_dim / 2, q_width = a->num_heads * a->head_dim, k_width = a->num_kv_heads * a->head_dim;
    for (int row = run->begin; row < run->end; row++) {
        bf16 *heads = run->qkv + (int64_t)row * width;
        const float *rope = layer->rope ? layer->rope + run->step->positions[row] * 2 * half : NULL;
        for (int h = 0; h < a->num_heads + a->num_kv_heads; h++) {
            bf16 *head = heads + h * a->head_dim;
            const float *weight = h < a->num_heads ? layer->q_norm : layer->k_norm;
            if (weight) norm_head(head, weight, a->head_dim, run->decoder->norm_eps);
            if (rope) rotate_head(head, rope, rope + half, half);
        }
    }
    attn_write(a, &run->step->batch, run->qkv + q_width, width, run->qkv + q_width + k_width, width, run->begin, run->end);
}

/* Norm, queries, keys and values of this thread's rows. */
static void before_attention(struct run *run, const struct decoder_layer *layer) {
    norm(run, layer->attn_norm);
    book(run, PHASE_NORM);
    product(run, &layer->qkv, tiled_rows(run->normed, run->decoder->hidden),
            (struct result){.store = STORE_BF16, .data = run->qkv, .stride = layer->qkv.n, .columns = layer->qkv.n});
    book(run, PHASE_QKV);
    place_heads(run, layer);
    book(run, PHASE_PLACE);
}

static void after_attention(struct run *run, const struct decoder_layer *layer) {
    const struct decoder *d = run->decoder;
    add_branch(run, &layer->o, plain_rows(run->attended, layer->o.k), layer->attn_out_norm);
    book(run, PHASE_O);
    norm(run, layer->mlp_norm);
    book(run, PHASE_NORM);
    product(run, &layer->gate_up, tiled_rows(run->normed, d->hidden),
            (struct result){.store = STORE_GATED, .data = run->gated, .stride = d->intermediate, .columns = layer->gate_up.n,
                            .activation = (enum activation)d->activation});
    book(run, PHASE_GATE_UP);
    add_branch(run, &layer->down, tiled_rows(run->gated, d->intermediate), layer->mlp_out_norm);
    book(run, PHASE_DOWN);
}

/* Does a part of a layer for all of this thread's rows. */
static void in_blocks(struct run *run, void (*part)(struct run *, const struct decoder_layer *), const struct decoder_layer *layer) {
    int begin = run->begin, end = run->end, step = run->wide ? WIDE_BLOCK : end - begin;
    do {
        run->end = run->begin + step < end ? run->begin + step : end;
        part(run, layer);
        run->begin = run->end;
    } while (run->begin < end);
    run->begin = begin;
}

static void run_layer(struct run *run, const struct decoder_layer *layer) {
    in_blocks(run, before_attention, layer);
    team_barrier(run->team);
    attn_run(&layer->attn, &run->step->batch, run->plan, run->qkv, layer->qkv.n, run->attended, layer->o.k, run->team, run->tid);
    team_barrier(run->team);
    book(run, PHASE_ATTENTION);
    in_blocks(run, after_attention, layer);
}

/* The final norm of all rows, and the rows whose logits are wanted, gathered. */
static void finish_rows(struct run *run) {
    const struct decoder *d = run->decoder;
    const struct step *s = run->step;
    for (int row = run->begin; row < run->end; row++)
        norm_to_row(run->residual + (int64_t)row * d->hidden, d->final_norm, d->hidden, d->norm_eps, s->hidden + (int64_t)row * d->hidden);
    team_barrier(run->team);
    int begin = team_share(run->team, run->tid, s->num_logits, 1), end = team_share(run->team, run->tid + 1, s->num_logits, 1);
    for (int i = begin; i < end; i++)
        for (int column = 0; column < d->hidden; column += TILE_ROWS)
            memcpy(tiled_at(run->selected, d->hidden, i, column), s->hidden + s->logits_rows[i] * d->hidden + column, TILE_ROWS * sizeof(bf16));
    team_barrier(run->team);
}

static void logits(struct run *run) {
    const struct decoder *d = run->decoder;
    const struct step *s = run->step;
    struct result result = {.store = STORE_F32, .data = s->logits, .stride = d->vocab, .columns = d->vocab};
    gemm(&d->head, tiled_rows(run->selected, d->hidden), 0, s->num_logits, (struct panels){run->team, 0}, &result, run->scratch);
    if (d->logits_factor == 1 && d->logits_softcap == 0) return;
    team_barrier(run->team);
    int64_t count = (int64_t)s->num_logits * d->vocab, begin = count * run->tid / run->team->size, end = count * (run->tid + 1) / run->team->size;
    for (int64_t i = begin; i < end; i++) {
        float x = s->logits[i] * d->logits_factor;
        s->logits[i] = d->logits_softcap > 0 ? d->logits_softcap * tanhf(x / d->logits_softcap) : x;
    }
}

/* The index of the largest of a row's results, over all threads and lanes. */
static int64_t best_of(const struct run *run, int row) {
    float value = -INFINITY;
    int64_t index = -1;
    for (int t = 0; t < run->team->size; t++) {
        const struct best *b = run->best + (int64_t)t * run->step->num_logits + row;
        for (int lane = 0; lane < LANES; lane++) {
            if (b->nan[lane]) return -1;
            if (b->value[lane] > value || (b->value[lane] == value && b->index[lane] < index)) value = b->value[lane], index = b->index[lane];
        }
    }
    return value < INFINITY ? index : -1;
}

/* Greedy choice without logits in memory. The model's changes to its logits after the product keep their order. */
static void likeliest(struct run *run) {
    const struct decoder *d = run->decoder;
    int count = run->step->num_logits;
    struct best *best = run->best + (int64_t)run->tid * count;
    for (int i = 0; i < count; i++) best[i] = (struct best){v_set(-INFINITY), v_set_i(INT32_MAX), v_set_i(0)};
    struct result result = {.store = KEEP_BEST, .data = best, .columns = d->vocab};
    gemm(&d->head, tiled_rows(run->selected, d->hidden), 0, count, (struct panels){run->team, 0}, &result, run->scratch);
    team_barrier(run->team);
    for (int i = team_share(run->team, run->tid, count, 1); i < team_share(run->team, run->tid + 1, count, 1); i++)
        run->step->likeliest[i] = best_of(run, i);
}

static void run_step(struct run *run) {
    const struct decoder *d = run->decoder;
    int num_tokens = run->step->batch.num_tokens, unit;
    run->wide = num_tokens >= WIDE_ROWS * run->team->size || run->team->size == 1;
    unit = run->wide ? WIDE_UNIT : 1;
    run->begin = team_share(run->team, run->tid, num_tokens, unit);
    run->end = team_share(run->team, run->tid + 1, num_tokens, unit);
    run->scratch += run->tid * gemm_scratch_bytes();
    if (run->step->phase_seconds) run->since = now_seconds();
    embed(run);
    book(run, PHASE_EMBED);
    for (int i = 0; i < d->num_layers; i++) run_layer(run, &d->layers[i]);
    finish_rows(run);
    if (run->step->num_logits > 0 && run->step->logits) logits(run);
    else if (run->step->num_logits > 0) likeliest(run);
    book(run, PHASE_LOGITS);
}

void decoder_step(const struct decoder *decoder, const struct step *step, int num_threads, char *workspace) {
    struct team team;
    struct attn_plan plan;
    struct run shared = {.decoder = decoder, .step = step, .team = &team, .plan = &plan};
    const struct attn_batch *batch = &step->batch;
    char *rest = carve_buffers(decoder, batch->num_tokens, step->num_logits, num_threads, workspace, &shared);
    team_init(&team, num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        struct run run = shared;
        run.tid = omp_get_thread_num();
#pragma omp single
        {
            team.size = omp_get_num_threads(); /* the runtime may give fewer than asked */
            attn_plan(&decoder->layers[decoder->widest].attn, batch, team.size, rest, &plan);
        }
        run_step(&run);
    }
}
