#include "int8_cache.h"

#define LARGEST_CODE 127
#define SMALLEST_SCALE 1.17549435e-38f /* so that a row of zeros is not divided by zero */
#define ROUND_UP_TO_LANES(n) (((n) + LANES - 1) / LANES * LANES)

static float *scales_of(int8_t *group, int dim) { return (float *)(group + GROUP * dim); }

/* ---- write ---- */

static void load_row(const void *row, int dim, enum dtype dtype, float *out) {
    for (int d = 0; d < dim; d++) out[d] = dtype == DTYPE_F32 ? ((const float *)row)[d] : f32_of_bf16(((const bf16 *)row)[d]);
    for (int d = dim; d < ROUND_UP_TO_LANES(dim); d++) out[d] = 0;
}

static float scale_of(const float *row, int dim) {
    vf32 largest = {0}, finite = {0}; /* finite: 0, or NaN where something was not */
    for (int d = 0; d < dim; d += LANES) {
        vf32 x = v_load(row + d);
        largest = v_max(v_max(x, -x), largest);
        finite += x * 0.0f;
    }
    float scale = v_hmax(largest) / LARGEST_CODE;
    if (v_sum(finite) != 0) return NAN;
    return scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
}

/* Codes of a row, and its scale. */
static float quantize(const void *row, int dim, enum dtype dtype, int32_t *codes) {
    float x[ROUND_UP_TO_LANES(dim)];
    load_row(row, dim, dtype, x);
    float scale = scale_of(x, dim);
    if (scale != scale) memset(codes, 0, (size_t)dim * sizeof *codes);
    else
        for (int d = 0; d < dim; d++) codes[d] = (int32_t)rintf(x[d] / scale);
    return scale;
}

void int8_write_key(int8_t *group, int token, const void *key, int dim, enum dtype dtype) {
    int32_t codes[dim];
    scales_of(group, dim)[token] = quantize(key, dim, dtype, codes);
    for (int d = 0; d < dim; d++) group[d * GROUP + token] = (int8_t)codes[d];
}

void int8_write_value(int8_t *group, int token, const void *value, int dim, enum dtype dtype) {
    int32_t codes[dim];
    scales_of(group, dim)[token] = quantize(value, dim, dtype, codes);
    for (int d = 0; d < dim; d++) group[token * dim + d] = (int8_t)codes[d];
}

/* ---- read ---- */

/* Two vectors rounded to bfloat16, in pairs. NaN stays NaN: those of scales have nothing in their lower halves. */
static inline vu32 paired(vf32 first, vf32 second) { return ((vu32)first + 0x8000) >> 16 | (((vu32)second + 0x8000) & 0xffff0000u); }

static void read_keys_f32(const int8_t *group, const float *scales, int dim, float *out) {
    for (int i = 0; i < dim * GROUP; i += LANES) v_store(out + i, v_load_int8(group + i) * v_load(scales + i % GROUP));
}

static void read_keys_bf16(const int8_t *group, const float *scales, int dim, bf16 *out) {
    for (int d = 0; d < dim; d += 2, group += 2 * GROUP, out += 2 * GROUP)
        for (int t = 0; t < GROUP; t += LANES) {
            vf32 scale = v_load(scales + t);
            v_store_pairs(out + 2 * t, paired(v_load_int8(group + t) * scale, v_load_int8(group + GROUP + t) * scale));
        }
}

void int8_read_keys(const int8_t *group, int dim, enum dtype dtype, void *out) {
    const float *scales = scales_of((int8_t *)group, dim);
    if (dtype == DTYPE_F32) read_keys_f32(group, scales, dim, out);
    else read_keys_bf16(group, scales, dim, out);
}

static void read_values_f32(const int8_t *group, const float *scales, int dim, float *out) {
    for (int t = 0; t < GROUP; t++, group += dim, out += dim) {
        int d = 0;
        for (; d + LANES <= dim; d += LANES) v_store(out + d, v_load_int8(group + d) * scales[t]);
        for (; d < dim; d++) out[d] = group[d] * scales[t];
    }
}

static void read_values_bf16(const int8_t *group, const float *scales, int dim, bf16 *out) {
    for (int t = 0; t < GROUP; t += 2, group += 2 * dim, out += 2 * dim) {
        int d = 0;
        for (; d + LANES <= dim; d += LANES)
            v_store_pairs(out + 2 * d, paired(v_load_int8(group + d) * scales[t], v_load_int8(group + dim + d) * scales[t + 1]));
        for (; d < dim; d++) {
            out[2 * d] = bf16_of_f32(group[d] * scales[t]);
            out[2 * d + 1] = bf16_of_f32(group[dim + d] * scales[t + 1]);
        }
    }
}

void int8_read_values(const int8_t *group, int dim, enum dtype dtype, void *out) {
    const float *scales = scales_of((int8_t *)group, dim);
    if (dtype == DTYPE_F32) read_values_f32(group, scales, dim, out);
    else read_values_bf16(group, scales, dim, out);
}
