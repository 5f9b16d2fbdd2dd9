/* AVX-512, AVX-512 BF16 and AMX in plain C, for tests of the native kernels on CPUs that lack them. Included before everything else.
 *
 * Only what the kernels use, and only what the compiler's target lacks: AVX-512 F and DQ always, BF16 with EMULATE_AVX512_BF16 and up,
 * the tile unit with EMULATE_AMX. What is computed follows the operation sections of Intel's Software Developer's Manual, volume 2:
 * order of sums, one rounding of a product and its sum, denormals as zeros where the instruction treats them so. Tile accesses
 * on which the CPU would fault end the process (pytest -s shows which).
 */
#ifndef EMULATED_X86_H
#define EMULATED_X86_H

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef union {
    __m512 floats;
    __m512i ints;
    float f[16];
    uint32_t u[16];
} emulated_register;

#define EMULATED static inline __attribute__((unused))

/* Denormals as zeros. */
EMULATED float emulated_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

EMULATED float emulated_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* sums += a * b, of the even or the odd of each pair of bfloat16. */
EMULATED void emulated_multiply_add(float *sums, const uint32_t *a, const uint32_t *b, int odd) {
    for (int i = 0; i < 16; i++) {
        float x = emulated_flush(emulated_float(odd ? a[i] & 0xffff0000u : a[i] << 16));
        float y = emulated_flush(emulated_float(odd ? b[i] & 0xffff0000u : b[i] << 16));
        sums[i] = emulated_flush(fmaf(x, y, emulated_flush(sums[i])));
    }
}

/* ---- AVX-512 F and DQ ---- */

#ifndef __AVX512F__
#define __AVX512F__ 1
#define __AVX512DQ__ 1

EMULATED __m512 emulated_loadu_ps(const void *p) {
    __m512 v;
    memcpy(&v, p, sizeof v);
    return v;
}

EMULATED __m512i emulated_loadu_si512(const void *p) {
    __m512i v;
    memcpy(&v, p, sizeof v);
    return v;
}

EMULATED void emulated_storeu_ps(void *p, __m512 v) { memcpy(p, &v, sizeof v); }

EMULATED __m512i emulated_set1_epi32(int x) {
    emulated_register r;
    for (int i = 0; i < 16; i++) r.u[i] = (uint32_t)x;
    return r.ints;
}

EMULATED __m512i emulated_cvtepi8_epi32(__m128i bytes) {
    emulated_register r;
    int8_t b[16];
    memcpy(b, &bytes, sizeof b);
    for (int i = 0; i < 16; i++) r.u[i] = (uint32_t)b[i];
    return r.ints;
}

EMULATED __m512 emulated_cvtepi32_ps(__m512i v) {
    emulated_register r = {.ints = v};
    for (int i = 0; i < 16; i++) r.f[i] = (float)(int32_t)r.u[i];
    return r.floats;
}

/* The second operand where one is NaN or both are zeros. */
EMULATED float emulated_max(float a, float b) { return a > b ? a : b; }
EMULATED float emulated_add(float a, float b) { return a + b; }

EMULATED __m512 emulated_max_ps(__m512 a, __m512 b) {
    emulated_register x = {.floats = a}, y = {.floats = b};
    for (int i = 0; i < 16; i++) x.f[i] = emulated_max(x.f[i], y.f[i]);
    return x.floats;
}

/* Compilers make a reduction of halves: the upper with the lower. */
EMULATED float emulated_reduce(__m512 v, float (*operation)(float, float)) {
    emulated_register r = {.floats = v};
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) r.f[i] = operation(r.f[i + half], r.f[i]);
    return r.f[0];
}

/* 1 / x to 2**-14. */
EMULATED __m512 emulated_rcp14_ps(__m512 v) {
    emulated_register r = {.floats = v};
    for (int i = 0; i < 16; i++) r.f[i] = 1.0f / r.f[i];
    for (int i = 0; i < 16; i++) r.u[i] &= ~0x1ffu;
    return r.floats;
}

/* What rounding to an integer leaves of x (control 0); of infinity 0. */
EMULATED __m512 emulated_reduce_ps(__m512 v, int control) {
    emulated_register r = {.floats = v};
    if (control != 0) abort();
    for (int i = 0; i < 16; i++) r.f[i] = isinf(r.f[i]) ? 0 : r.f[i] - rintf(r.f[i]);
    return r.floats;
}

/* a * 2**floor(b). */
EMULATED __m512 emulated_scalef_ps(__m512 a, __m512 b) {
    emulated_register x = {.floats = a}, y = {.floats = b};
    for (int i = 0; i < 16; i++) {
        float e = floorf(y.f[i]);
        if (e != e || isinf(e)) x.f[i] *= exp2f(e); /* NaN, infinity or 0 */
        else x.f[i] = scalbnf(x.f[i], (int)fmaxf(fminf(e, 1000), -1000));
    }
    return x.floats;
}

EMULATED uint16_t emulated_test_epi32_mask(__m512i a, __m512i b) {
    emulated_register x = {.ints = a}, y = {.ints = b};
    uint16_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= (uint16_t)((x.u[i] & y.u[i]) != 0) << i;
    return mask;
}

#undef _mm512_reduce_ps
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_setzero_ps() ((__m512){0})
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_reduce_add_ps(v) emulated_reduce(v, emulated_add)
#define _mm512_reduce_max_ps(v) emulated_reduce(v, emulated_max)
#define _mm512_rcp14_ps emulated_rcp14_ps
#define _mm512_reduce_ps emulated_reduce_ps
#define _mm512_scalef_ps emulated_scalef_ps
#define _mm512_test_epi32_mask emulated_test_epi32_mask
#endif

/* ---- AVX-512 BF16 ---- */

#if (defined(EMULATE_AVX512_BF16) || defined(EMULATE_AMX)) && !defined(__AVX512BF16__)
#define __AVX512BF16__ 1

EMULATED __m512 emulated_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    emulated_register r = {.floats = sums}, x = {.ints = (__m512i)a}, y = {.ints = (__m512i)b};
    for (int odd = 1; odd >= 0; odd--) emulated_multiply_add(r.f, x.u, y.u, odd);
    return r.floats;
}

EMULATED __m256bh emulated_cvtneps_pbh(__m512 v) {
    emulated_register r = {.floats = v};
    uint16_t halves[16];
    __m256bh h;
    for (int i = 0; i < 16; i++) {
        float x = emulated_flush(r.f[i]);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        halves[i] = (uint16_t)((x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    memcpy(&h, halves, sizeof h);
    return h;
}

#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#endif

/* ---- AMX ---- */

#if defined(EMULATE_AMX) && (!defined(__AMX_TILE__) || !defined(__AMX_BF16__) || defined(HEADRACE_NO_AMX))
#include "emulated_amx.h"
#endif

#endif
