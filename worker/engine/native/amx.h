/* The AMX tile unit, where the compiler was told of it (AMX-BF16).
 *
 * One configuration serves every kernel here: tiles 0-3 accumulate 16 x 16 floats; 4 and 5 hold a 16 x 32
 * operand and its 32 x 16 counterpart of bfloat16; 6 and 7 the same, 16 deep (a group of 16 tokens, or the
 * rest of a depth that is no multiple of 32). The second operand is pair-interleaved: row i has elements
 * 2i and 2i+1 of each column beside each other.
 *
 * The statements are inline assembly with a memory clobber: GCC 12's own intrinsics may be moved across
 * the stores that prepare a tile.
 */
#ifndef HEADRACE_AMX_H
#define HEADRACE_AMX_H

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(HEADRACE_NO_AMX)
#define HAVE_AMX 1

#include <stdint.h>

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

static inline void amx_begin(void) {
    static const struct tile_config config = {
        .palette = 1,
        .bytes_per_row = {64, 64, 64, 64, 64, 64, 32, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 8},
    };
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

static inline void amx_end(void) { __asm__ volatile("tilerelease"); }

/* Strides are in bytes. */
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
/* c += a b */
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

#else
#define HAVE_AMX 0
static inline void amx_begin(void) {}
static inline void amx_end(void) {}
#endif

#endif
