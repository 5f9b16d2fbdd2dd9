/* The functions that Python calls: each opens one parallel region over the process's OpenMP threads. */

#include "amx.h"
#include "attention.h"
#include "decoder.h"
#include "likely_tokens.h"

/* Which kernels were built. */
const char *headrace_isa(void) {
#if HAVE_AMX
    return "amx";
#elif defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "portable";
#endif
}

int64_t headrace_workspace_bytes(const struct attn_layer *layer, int32_t num_seqs, int32_t num_tokens, int32_t num_threads) {
    return attn_workspace_bytes(layer, num_seqs, num_tokens, num_threads);
}

/* One layer's cache write and attention for a whole ragged batch. Strides count elements from token to token. */
void headrace_attend(const struct attn_layer *layer, const struct attn_batch *batch, const void *query, int64_t query_stride,
                     const void *key, int64_t key_stride, const void *value, int64_t value_stride, void *out, int64_t out_stride,
                     int32_t num_threads, void *workspace) {
    struct team team;
    struct attn_plan plan;
    team_init(&team, num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        int tid = omp_get_thread_num();
#pragma omp single
        {
            team.size = omp_get_num_threads(); /* the runtime may give fewer than asked */
            attn_plan(layer, batch, team.size, workspace, &plan);
        }
        int begin = team_share(&team, tid, batch->num_tokens, 1), end = team_share(&team, tid + 1, batch->num_tokens, 1);
        attn_write(layer, batch, key, key_stride, value, value_stride, begin, end);
        team_barrier(&team);
        attn_run(layer, batch, &plan, query, query_stride, out, out_stride, &team, tid);
    }
}

int64_t headrace_decoder_workspace_bytes(const struct decoder *decoder, int32_t num_seqs, int32_t num_tokens, int32_t num_logits,
                                         int32_t num_threads) {
    return decoder_workspace_bytes(decoder, num_seqs, num_tokens, num_logits, num_threads);
}

/* A whole step of a decoder. */
void headrace_decoder_step(const struct decoder *decoder, const struct step *step, int32_t num_threads, void *workspace) {
    decoder_step(decoder, step, num_threads, workspace);
}

/* The first half of finding the likely tokens; the caller makes room for what was counted. */
void headrace_measure_likely_tokens(const struct likely_tokens *likely, int32_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int row = 0; row < likely->num_rows; row++) measure_likely_tokens(likely, row);
}

/* The second half. */
void headrace_list_likely_tokens(const struct likely_tokens *likely, int32_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int row = 0; row < likely->num_rows; row++) list_likely_tokens(likely, row);
}
