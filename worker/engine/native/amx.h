/* The AMX tile unit, where the compiler was told of it (AMX-BF16).
 *
 * Tiles 0-3 accumulate 16 x 16 floats. A product of depth 32 takes a 16 x 32 first operand of bfloat16 and a second one
 * that is pair-interleaved: its row i has elements 2i and 2i+1 of each of 16 columns beside each other. Each kernel
 * configures the tiles as it enters.
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

#define AMX_BEGIN(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#define AMX_END() __asm__ volatile("tilerelease")

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
#define AMX_BEGIN(config)
#define AMX_END()
#endif

#endif
