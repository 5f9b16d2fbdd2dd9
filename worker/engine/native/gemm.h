/* Matrix products of bfloat16 rows with packed weights, accumulated in float32.
 *
 * Weights [n][k] are packed in panels of 32 outputs, a panel in steps of 32 inputs, a step in two tiles of 16 outputs:
 * [n / 32][k / 32][2][16 input pairs][16 outputs][2], zeros where n or k is padded. A panel is contiguous and is
 * streamed once for all rows; each tile is the second operand of a tile product.
 *
 * Weights of int8 lie in the same order but for the two inputs of a pair: [16 input pairs][2][16 outputs]. A piece of a panel is
 * made into bfloat16, which holds the codes exactly, once for all rows that are multiplied with it; the outputs' scales meet the sums.
 *
 * Rows come plain, or in tiles of 16 rows x 32 columns, which lie in one piece (written by kernels, read by the next).
 */
#ifndef HEADRACE_GEMM_H
#define HEADRACE_GEMM_H

#include "team.h"
#include "vec.h"

#define PANEL 32      /* outputs in a panel, inputs in a step */
#define TILE_ROWS 16
#ifdef __AVX512F__
#define ROW_BLOCK 32  /* rows that are multiplied together: two tiles of the tile unit */
#else
#define ROW_BLOCK 48  /* also a multiple of the six rows whose sums fit the registers */
#endif
#define TILE_ELEMENTS (TILE_ROWS * PANEL)

/* Packed weights. Mirrored by `MatrixStruct` in library.py. */
struct matrix {
    const void *tiles;         /* bf16, or int8_t if there is a scale */
    const float *bias, *scale; /* [n], or NULL */
    int32_t n, k;              /* both padded to multiples of 32 */
};

struct operand {
    const bf16 *data;
    int64_t row_stride, step_stride, tile_stride; /* elements: next row of a tile; 32 columns on; 16 rows on */
};

static inline struct operand plain_rows(const bf16 *data, int64_t stride) {
    return (struct operand){data, stride, PANEL, TILE_ROWS * stride};
}

static inline struct operand tiled_rows(const bf16 *data, int columns) {
    return (struct operand){data, PANEL, TILE_ELEMENTS, (int64_t)columns * TILE_ROWS};
}

/* Where 16 columns of a row lie in a tiled matrix; `column` is a multiple of 16. */
static inline bf16 *tiled_at(bf16 *data, int columns, int row, int column) {
    int64_t tile = (int64_t)(row / TILE_ROWS) * (columns / PANEL) + column / PANEL;
    return data + tile * TILE_ELEMENTS + row % TILE_ROWS * PANEL + column % PANEL;
}

enum store { STORE_BF16, STORE_F32, ADD_F32, STORE_GATED, KEEP_BEST };
enum activation { SILU = 0, GELU_TANH = 1 };

/* The largest of a row's results so far, of those in each lane, and where they are; `nan` is set in lanes that had a NaN. */
struct best {
    vf32 value;
    vi32 index, nan;
};

struct result {
    enum store store;
    void *data;                 /* KEEP_BEST: a `struct best` for each row */
    int64_t stride;             /* elements from row to row; STORE_GATED: columns of the tiled matrix */
    int32_t columns;            /* columns that are stored; those of a padded last panel beyond them are not */
    float factor;               /* of what ADD_F32 adds */
    enum activation activation; /* STORE_GATED: a panel is 16 gates and their 16 values, data gets act(gate) * value */
};

/* The panels that a thread takes on: all, in order, or those that the team has left over; again for each part of many rows. */
struct panels { struct team *team; int next; };

/* result[row] <- weights x operand[row] for rows [begin, end); begin is a multiple of 32. `scratch`: gemm_scratch_bytes(). */
void gemm(const struct matrix *w, struct operand a, int begin, int end, struct panels panels, const struct result *out, void *scratch);

int64_t gemm_scratch_bytes(void);

#endif
