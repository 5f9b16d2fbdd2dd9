/* Sixteen floats at a time, in GCC's vector extension: one source for AVX-512, AVX2, NEON and plain C.
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

#define LANES 16
#define LOG2E 1.44269504088896340736f

typedef uint16_t bf16;
typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef int8_t v16b __attribute__((vector_size(16)));

static const v16i v_iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline v16f v_load(const float *p) { v16f v; memcpy(&v, p, sizeof v); return v; }
static inline void v_store(float *p, v16f v) { memcpy(p, &v, sizeof v); }
static inline v16f v_set(float x) { return x - (v16f){0}; }
static inline v16f v_select(v16i mask, v16f a, v16f b) { return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask)); }

/* The larger of a and b; where b is NaN, NaN. */
static inline v16f v_max(v16f a, v16f b) {
#ifdef __AVX512F__
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return v_select(a > b, a, b);
#endif
}

static inline float v_sum(v16f v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}

/* Largest lane; NaN lanes are ignored or returned, never made into a number (the exponentials show them). */
static inline float v_hmax(v16f v) {
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

static inline v16f v_load_bf16(const bf16 *p) {
    v16h h;
    memcpy(&h, p, sizeof h);
    return (v16f)(__builtin_convertvector(h, v16u) << 16);
}

/* Sixteen pairs of bfloat16; in halves where GCC would take a longer vector than a register apart into integers. */
static inline void v_store_pairs(bf16 *p, v16u v) {
#ifdef __AVX512F__
    memcpy(p, &v, sizeof v);
#else
    v8u low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    memcpy(p, &low, sizeof low);
    memcpy(p + LANES, &high, sizeof high);
#endif
}

/* GCC takes conversions of bytes apart into scalars where it is not told the instruction. */
static inline v16f v_load_int8(const int8_t *p) {
#ifdef __AVX512F__
    return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))));
    return (v16f)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    v16b b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, v16i), v16f);
#endif
}

static inline void v_store_bf16(bf16 *p, v16f v) {
#ifdef __AVX512BF16__
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    v16u u = (v16u)v;
    v16u rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    v16u quiet = (u >> 16) | 0x40;
    v16u nan = (v16u)(v != v);
    v16h h = __builtin_convertvector((quiet & nan) | (rounded & ~nan), v16h);
    memcpy(p, &h, sizeof h);
#endif
}

/* 2**x for x <= 128, flushed to 0 below -126. Polynomials of least relative error on [-1/2, 1/2]: 1e-7 with `exact`, else 8e-5, a
 * fraction of bfloat16's rounding. */
static inline __attribute__((always_inline)) v16f v_exp2_to(v16f x, const int exact) {
#ifdef __AVX512DQ__
    v16f f = (v16f)_mm512_reduce_ps((__m512)x, 0), n = x - f; /* of -inf: 0 and -inf */
#else
    x = v_max(v_set(-150.0f), x);
    v16f n = (x + 12582912.0f) - 12582912.0f, f = x - n; /* 1.5 * 2**23: the addition rounds to an integer */
#endif
    v16f p;
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
    return (v16f)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    v16i e = __builtin_convertvector(v_select(n == n, n, v_set(0)), v16i);
    v16f scaled = (v16f)((v16i)p + (e << 23));
    return v_select(e < -125, p * 0.0f, scaled); /* p * 0: still NaN where p is */
#endif
}

static inline v16f v_exp2(v16f x) { return v_exp2_to(x, 1); }

/* 1 / x for finite x > 0, to 1e-7. */
static inline v16f v_reciprocal(v16f x) {
#ifdef __AVX512F__
    v16f r = (v16f)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

static inline v16f v_sigmoid(v16f x) { return v_reciprocal(1.0f + v_exp2(-v_max(v_set(-126.0f), LOG2E * x))); }
static inline v16f v_tanh(v16f x) { return 2.0f * v_sigmoid(2.0f * x) - 1.0f; }

#endif
