/* A whole step of a decoder of the Llama family: embedding to logits, in one parallel region.
 *
 * Activations between products are bfloat16; the residual stream, sums, norms and rotations are float32.
 */
#ifndef HEADRACE_DECODER_H
#define HEADRACE_DECODER_H

#include "attention.h"
#include "gemm.h"

/* Mirrored by `DecoderLayerStruct` in library.py. */
struct decoder_layer {
    struct attn_layer attn;
    struct matrix qkv, o, gate_up, down;    /* gate_up: 16 gates, their 16 ups, and so on */
    const float *attn_norm, *mlp_norm;      /* [hidden], of what a branch reads */
    const float *attn_out_norm, *mlp_out_norm; /* [hidden], of what a branch adds to the residual, or NULL */
    const float *q_norm, *k_norm;           /* [head_dim], or NULL */
    const float *rope;                      /* [positions][rotary_dim]: cosines, then sines of half the dims each; NULL: no rotation */
};

/* Mirrored by `DecoderStruct` in library.py. */
struct decoder {
    const struct decoder_layer *layers; /* of the same shapes; they may differ in window, rotation and the like */
    const bf16 *embedding; /* [vocab][hidden] */
    const float *final_norm;
    struct matrix head;
    int32_t num_layers, widest /* the layer with the widest window */, hidden, intermediate, vocab, rotary_dim, activation;
    float norm_eps, embedding_factor, residual_factor, logits_factor, logits_softcap;
};

/* The phases of a step, including waiting for other threads. Mirrored by `PHASES` in library.py. */
enum phase { PHASE_EMBED, PHASE_NORM, PHASE_QKV, PHASE_PLACE, PHASE_ATTENTION, PHASE_O, PHASE_GATE_UP, PHASE_DOWN, PHASE_LOGITS, NUM_PHASES };

/* Mirrored by `StepStruct` in library.py. */
struct step {
    struct attn_batch batch;
    const int64_t *token_ids, *positions; /* [num_tokens] */
    const int64_t *logits_rows;           /* [num_logits] */
    bf16 *hidden;                         /* [num_tokens][hidden], after the final norm */
    float *logits;                        /* [num_logits][vocab], or NULL: only the largest is wanted */
    int64_t *likeliest;                   /* [num_logits], without `logits`: the token of the largest; -1 if it is not finite */
    double *phase_seconds;                /* [NUM_PHASES], of the first thread, added to; or NULL */
    int32_t num_logits;
};

int64_t decoder_workspace_bytes(const struct decoder *decoder, int32_t num_seqs, int32_t num_tokens, int32_t num_logits, int32_t num_threads);

void decoder_step(const struct decoder *decoder, const struct step *step, int num_threads, char *workspace);

#endif
