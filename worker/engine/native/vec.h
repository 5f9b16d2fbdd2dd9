/* A register of floats at a time, in GCC's vector extension: one source for AVX-512, AVX2, NEON and plain C.
 *
 * Vectors are as long as the machine's registers: longer ones GCC keeps in memory. Layouts count in sixteens, so loops over them
 * go in steps of LANES.
 *
 * Rules kept here: NaN in gives NaN out (a step that computed NaN must be seen, not hidden), and nothing
 * depends on -ffast-math. bfloat16 is the upper half of a float; rounding is to nearest even.
 */
#ifndef HEADRACE_VEC_H
#define HEADRACE_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define V_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
#define LANES 8
#define V_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
#define LANES 4
#define V_LANE_NUMBERS 0, 1, 2, 3
#endif
#define LOG2E 1.44269504088896340736f

typedef uint16_t bf16;
typedef float vf32 __attribute__((vector_size(4 * LANES)));
typedef int32_t vi32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * LANES)));
typedef int8_t vi8 __attribute__((vector_size(LANES)));

static const vi32 v_iota = {V_LANE_NUMBERS};

static inline vf32 v_load(const float *p) { vf32 v; memcpy(&v, p, sizeof v); return v; }
static inline void v_store(float *p, vf32 v) { memcpy(p, &v, sizeof v); }
static inline vf32 v_set(float x) { return x - (vf32){0}; }
static inline vi32 v_set_i(int32_t x) { return x - (vi32){0}; }
static inline vf32 v_select(vi32 mask, vf32 a, vf32 b) { return (vf32)(((vi32)a & mask) | ((vi32)b & ~mask)); }

/* Whether any lane of a comparison's result is true. */
static inline int v_any(vi32 mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any != 0;
#endif
}

/* The larger of a and b; NaN if b is NaN. */
static inline vf32 v_max(vf32 a, vf32 b) {
#ifdef __AVX512F__
    return (vf32)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return v_select(a > b, a, b);
#endif
}

/* v, held in a register from here on: GCC otherwise reads memory again for each use, and moves other work in between. */
static inline vf32 v_hold(vf32 v) {
#if LANES == 8
    __asm__("" : "+x"(v));
#endif
    return v;
}

/* sum + a b, in sum's own register: GCC lets the result take the place of a or b, and where all sixteen are in use moves and spills it. */
static inline vf32 v_fma(vf32 sum, vf32 a, vf32 b) {
#if defined(__FMA__) && LANES == 8
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

static inline float v_sum(vf32 v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}

/* Largest lane; NaN lanes are ignored or returned, never made into a number (the exponentials show them). */
static inline float v_hmax(vf32 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

static inline float f32_of_bf16(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline bf16 bf16_of_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (f != f) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline vf32 v_load_bf16(const bf16 *p) {
    vu16 h;
    memcpy(&h, p, sizeof h);
    return (vf32)(__builtin_convertvector(h, vu32) << 16);
}

/* Pairs of bfloat16: the element before, and the one after, of each. */
static inline vu32 v_load_pairs(const bf16 *p) {
    vu32 u;
    memcpy(&u, p, sizeof u);
    return u;
}

static inline void v_store_pairs(bf16 *p, vu32 v) { memcpy(p, &v, sizeof v); }
static inline vf32 v_even_of(vu32 pairs) { return (vf32)(pairs << 16); }

static inline vf32 v_odd_of(vu32 pairs) {
#if LANES == 8 /* shifted twice: a mask would hold one of sixteen registers all the time */
    vu32 high = pairs >> 16;
    __asm__("" : "+x"(high));
    return (vf32)(high << 16);
#else
    return (vf32)(pairs & 0xffff0000u);
#endif
}

/* GCC splits conversions of bytes into scalars unless it is told the instruction. */
static inline vf32 v_load_int8(const int8_t *p) {
#ifdef __AVX512F__
    return (vf32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vf32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vi8 b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, vi32), vf32);
#endif
}

static inline void v_store_bf16(bf16 *p, vf32 v) {
#ifdef __AVX512BF16__
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    vu32 u = (vu32)v;
    vu32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu32 quiet = (u >> 16) | 0x40;
    vu32 nan = (vu32)(v != v);
    vu16 h = __builtin_convertvector((quiet & nan) | (rounded & ~nan), vu16);
    memcpy(p, &h, sizeof h);
#endif
}

/* 2**x for x <= 128, flushed to 0 below -126. Polynomials of least relative error on [-1/2, 1/2]: 1e-7 with `exact`, else 8e-5, a
 * fraction of bfloat16's rounding. */
static inline __attribute__((always_inline)) vf32 v_exp2_to(vf32 x, const int exact) {
#ifdef __AVX512DQ__
    vf32 f = (vf32)_mm512_reduce_ps((__m512)x, 0), n = x - f; /* of -inf: 0 and -inf */
#else
    x = v_max(v_set(-150.0f), x);
    vf32 n = (x + 12582912.0f) - 12582912.0f, f = x - n; /* 1.5 * 2**23: the addition rounds to an integer */
#endif
    vf32 p;
    if (exact) {
        p = v_set(1.32765e-3f) * f + 9.67554e-3f;
        p = p * f + 5.550713e-2f;
        p = p * f + 2.402212e-1f;
        p = p * f + 6.9314697e-1f;
        p = p * f + 1.00000007f;
    } else {
        p = v_set(5.517164e-2f) * f + 2.4261112e-1f;
        p = p * f + 6.9326099e-1f;
        p = p * f + 9.9992807e-1f;
    }
#ifdef __AVX512F__
    return (vf32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi32 e = __builtin_convertvector(v_select(n == n, n, v_set(0)), vi32);
    vf32 scaled = (vf32)((vi32)p + (e << 23));
    return v_select(e < -125, p * 0.0f, scaled); /* p * 0: still NaN where p is */
#endif
}

static inline vf32 v_exp2(vf32 x) { return v_exp2_to(x, 1); }

/* 1 / x for finite x > 0, to 1e-7. */
static inline vf32 v_reciprocal(vf32 x) {
#ifdef __AVX512F__
    vf32 r = (vf32)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

static inline vf32 v_sigmoid(vf32 x) { return v_reciprocal(1.0f + v_exp2(-v_max(v_set(-126.0f), LOG2E * x))); }
static inline vf32 v_tanh(vf32 x) { return 2.0f * v_sigmoid(2.0f * x) - 1.0f; }

#endif
