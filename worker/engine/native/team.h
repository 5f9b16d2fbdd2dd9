/* A team of threads inside one OpenMP region: a barrier and a counter that hands out work.
 *
 * Work is taken one piece at a time, so a thread whose core is busy with something else takes less of it.
 * The barrier spins, then yields; the last thread to arrive sets the counter back to zero, so every phase
 * between two barriers has the counter to itself.
 */
#ifndef HEADRACE_TEAM_H
#define HEADRACE_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
#endif

#define CACHE_LINE 64
#define SPINS_BEFORE_YIELD 500

struct team {
    int size;
    _Alignas(CACHE_LINE) atomic_int arrived;
    _Alignas(CACHE_LINE) atomic_uint phase;
    _Alignas(CACHE_LINE) atomic_int next;
};

static inline void team_init(struct team *t, int size) {
    t->size = size;
    atomic_init(&t->arrived, 0);
    atomic_init(&t->phase, 0);
    atomic_init(&t->next, 0);
}

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void team_barrier(struct team *t) {
    if (t->size == 1) {
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        return;
    }
    unsigned phase = atomic_load_explicit(&t->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        atomic_store_explicit(&t->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&t->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS_BEFORE_YIELD) cpu_relax();
        else sched_yield();
    }
}

/* The next piece of this phase's work: 0, 1, 2, ... over all threads. */
static inline int team_take(struct team *t) { return atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed); }

/* Where thread `tid`'s share of `count` things begins, in multiples of `unit`; its end is where the next one's begins. */
static inline int team_share(const struct team *t, int tid, int count, int unit) {
    int64_t units = (count + unit - 1) / unit;
    int64_t begin = units * tid / t->size * unit;
    return begin < count ? (int)begin : count;
}

#endif
