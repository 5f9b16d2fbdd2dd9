/* The tile unit of emulated_x86.h: palette 1, one unit a thread whatever file its instructions are in. */
#ifndef EMULATED_AMX_H
#define EMULATED_AMX_H

#undef HEADRACE_NO_AMX
#undef __AMX_TILE__
#undef __AMX_BF16__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#include "../../worker/engine/native/amx.h"

#define INSTRUCTION static __attribute__((unused, noinline)) /* they are many, and long */
#define EMULATED_TILES 8
#define EMULATED_ROWS 16
#define EMULATED_ROW_BYTES 64

struct emulated_tile {
    int rows, row_bytes; /* 0: not configured */
    uint32_t data[EMULATED_ROWS][EMULATED_ROW_BYTES / 4];
};

__attribute__((weak, visibility("hidden"))) _Thread_local struct emulated_tile emulated_tiles[EMULATED_TILES];

EMULATED void emulated_fault_if(int fault, const char *instruction) {
    if (!fault) return;
    fprintf(stderr, "emulated AMX: the CPU would fault on %s\n", instruction);
    abort();
}

EMULATED struct emulated_tile *emulated_tile(int number, const char *instruction) {
    emulated_fault_if(emulated_tiles[number].rows == 0, instruction);
    return &emulated_tiles[number];
}

EMULATED void emulated_tilerelease(void) { memset(emulated_tiles, 0, sizeof emulated_tiles); }

INSTRUCTION void emulated_ldtilecfg(const struct tile_config *config) {
    static const uint8_t reserved[sizeof config->reserved];
    int fault = config->palette != 1 || config->start_row != 0 || memcmp(config->reserved, reserved, sizeof reserved) != 0;
    emulated_tilerelease();
    for (int t = 0; t < 16; t++) {
        int rows = config->rows[t], row_bytes = config->bytes_per_row[t];
        fault |= rows > EMULATED_ROWS || row_bytes > EMULATED_ROW_BYTES || !rows != !row_bytes || (t >= EMULATED_TILES && rows);
        if (!fault && t < EMULATED_TILES) emulated_tiles[t].rows = rows, emulated_tiles[t].row_bytes = row_bytes;
    }
    emulated_fault_if(fault, "ldtilecfg");
}

INSTRUCTION void emulated_tilezero(int number) {
    struct emulated_tile *t = emulated_tile(number, "tilezero");
    memset(t->data, 0, sizeof t->data);
}

INSTRUCTION void emulated_tileloadd(int number, const void *from, int64_t stride) {
    struct emulated_tile *t = emulated_tile(number, "tileloadd");
    emulated_tilezero(number);
    for (int r = 0; r < t->rows; r++) memcpy(t->data[r], (const char *)from + r * stride, (size_t)t->row_bytes);
}

INSTRUCTION void emulated_tilestored(int number, void *to, int64_t stride) {
    struct emulated_tile *t = emulated_tile(number, "tilestored");
    for (int r = 0; r < t->rows; r++) memcpy((char *)to + r * stride, t->data[r], (size_t)t->row_bytes);
}

/* A row's sums of even and of odd products are kept apart, and meet at the end. */
EMULATED void emulated_dot_row(struct emulated_tile *c, const struct emulated_tile *a, const struct emulated_tile *b, int row) {
    float sums[2][16] = {0};
    for (int k = 0; k < a->row_bytes / 4; k++) {
        uint32_t pair[16];
        for (int i = 0; i < 16; i++) pair[i] = a->data[row][k];
        for (int odd = 0; odd < 2; odd++) emulated_multiply_add(sums[odd], pair, b->data[k], odd);
    }
    for (int i = 0; i < c->row_bytes / 4; i++) {
        float sum = emulated_flush(emulated_flush(emulated_float(c->data[row][i])) + emulated_flush(sums[0][i] + sums[1][i]));
        memcpy(&c->data[row][i], &sum, sizeof sum);
    }
}

INSTRUCTION void emulated_tdpbf16ps(int sums, int first, int second) {
    struct emulated_tile *c = emulated_tile(sums, "tdpbf16ps");
    const struct emulated_tile *a = emulated_tile(first, "tdpbf16ps"), *b = emulated_tile(second, "tdpbf16ps");
    emulated_fault_if(c == a || a == b || b == c, "tdpbf16ps: operands the same");
    emulated_fault_if(c->rows != a->rows || c->row_bytes != b->row_bytes || a->row_bytes != 4 * b->rows, "tdpbf16ps: shapes");
    emulated_fault_if(c->row_bytes % 4 != 0, "tdpbf16ps: part of a column");
    for (int row = 0; row < c->rows; row++) emulated_dot_row(c, a, b, row);
}

#undef AMX_BEGIN
#undef AMX_END
#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_DOT
#define AMX_BEGIN(config) emulated_ldtilecfg(&(config))
#define AMX_END() emulated_tilerelease()
#define TILE_LOAD emulated_tileloadd
#define TILE_STORE emulated_tilestored
#define TILE_ZERO emulated_tilezero
#define TILE_DOT emulated_tdpbf16ps

#endif
