/* Row-wise arithmetic between the products. */
#ifndef HEADRACE_ELEMENTWISE_H
#define HEADRACE_ELEMENTWISE_H

#include "gemm.h"

/* 1 / sqrt(mean(x**2) + eps), over n elements, n a multiple of 16. */
static inline float inverse_rms(const float *x, int n, float eps) {
    vf32 sum = {0};
    for (int i = 0; i < n; i += LANES) sum += v_load(x + i) * v_load(x + i);
    return 1.0f / sqrtf(v_sum(sum) / (float)n + eps);
}

/* RMS norm of a row of the residual stream into a row of a tiled operand. */
static inline void norm_to_tiles(const float *x, const float *weight, int n, float eps, bf16 *out, int row) {
    float inverse = inverse_rms(x, n, eps);
    for (int i = 0; i < n; i += LANES) v_store_bf16(tiled_at(out, n, row, i), v_load(x + i) * inverse * v_load(weight + i));
}

static inline void norm_to_row(const float *x, const float *weight, int n, float eps, bf16 *out) {
    float inverse = inverse_rms(x, n, eps);
    for (int i = 0; i < n; i += LANES) v_store_bf16(out + i, v_load(x + i) * inverse * v_load(weight + i));
}

static inline void add_normed(float *x, const float *y, const float *weight, int n, float eps, float factor) {
    float inverse = inverse_rms(y, n, eps) * factor;
    for (int i = 0; i < n; i += LANES) v_store(x + i, v_load(x + i) + v_load(y + i) * inverse * v_load(weight + i));
}

/* RMS norm of one head in place. */
static inline void norm_head(bf16 *x, const float *weight, int dim, float eps) {
    float sum = 0;
    for (int i = 0; i < dim; i++) sum += f32_of_bf16(x[i]) * f32_of_bf16(x[i]);
    float inverse = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = 0; i < dim; i++) x[i] = bf16_of_f32(f32_of_bf16(x[i]) * inverse * weight[i]);
}

/* Rotates the first 2 * half dims of a head in place: dim i with dim i + half (Su et al., RoFormer, 2021; the halves as in GPT-NeoX). */
static inline void rotate_head(bf16 *x, const float *cosines, const float *sines, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf32 a = v_load_bf16(x + i), b = v_load_bf16(x + half + i), c = v_load(cosines + i), s = v_load(sines + i);
        v_store_bf16(x + i, a * c - b * s);
        v_store_bf16(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = f32_of_bf16(x[i]), b = f32_of_bf16(x[half + i]);
        x[i] = bf16_of_f32(a * cosines[i] - b * sines[i]);
        x[half + i] = bf16_of_f32(b * cosines[i] + a * sines[i]);
    }
}

#endif
