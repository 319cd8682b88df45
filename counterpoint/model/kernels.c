/* The CPU's kernels: the operators between matrix products, and attention over paged KV.

   Owns: norms, SwiGLU, RoPE with the write to the KV pages, attention.
   Batch invariance: a row's result depends, to the bit, on that row and its own context alone. It
   does not depend on other rows, on how the prompt was chunked, or on the number of threads. So sums
   have one fixed order: in attention over the head dimension from first to last, and over keys in
   blocks of BLOCK counted from position 0. A masked key adds an exact zero.
   Must not: keep state between calls, or read a KV row beyond a segment's length (any content).

   Plain C with GNU vectors, compiled for the CPU it runs on. Attention with a running maximum
   (online softmax): arXiv:2205.14135 section 3. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define VECS 4
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LANES 8
#define VECS 2
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LANES 4
#define VECS 4
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#define HALF 1
#else
#define HALF 0
#endif

#define ROWS 4   /* rows of a register tile */
#define BLOCK 64 /* keys whose scores are computed at once */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec value) { *(loose *)to = value; }
INLINE vec splat(float value) { return value - (vec){0}; }
INLINE vec choose(ivec yes, vec a, vec b) { return (vec)(((ivec)a & yes) | ((ivec)b & ~yes)); }

/* LANES numbers of a KV pool from `at` on. `half`: the pool has 16-bit floats; a constant in every
   inlined call. */
INLINE vec load_kv(const void *pool, long at, int half)
{
#if defined(__AVX512F__)
    if (half) return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)pool + at)));
#elif HALF
    if (half) return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)pool + at)));
#endif
    return load((const float *)pool + at);
}

/* Saturates at 65504, the largest 16-bit float. */
INLINE void store_kv(void *pool, long at, vec value, int half)
{
#if HALF
    if (half) {
        value = choose(value > splat(65504.0f), splat(65504.0f), value);
        value = choose(value < splat(-65504.0f), splat(-65504.0f), value);
    }
#endif
#if defined(__AVX512F__)
    if (half) {
        _mm256_storeu_si256((__m256i *)((uint16_t *)pool + at), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#elif HALF
    if (half) {
        _mm_storeu_si128((__m128i *)((uint16_t *)pool + at), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    store((float *)pool + at, value);
}

INLINE float sum_lanes(vec value)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += value[i];
    return sum;
}

/* e to the x, relative error about 2e-7; exactly 0 below -87. Cody-Waite reduction, then a
   polynomial on [-ln2/2, ln2/2]. */
INLINE vec exponential(vec x)
{
    ivec alive = x > splat(-87.0f);
    x = choose(alive, x, splat(-87.0f));
    x = choose(x < splat(88.0f), x, splat(88.0f));
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits are the nearest whole number */
    vec whole = shifted - 12582912.0f;
    vec rest = x - whole * 0.693145752f;
    rest = rest - whole * 1.42860677e-6f;
    vec sum = splat(1.0f / 720);
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    ivec power = ((ivec)shifted << 23) + (ivec)splat(1.0f);
    return choose(alive, sum * (vec)power, splat(0));
}

/* ------------------------------------------------------------------ rows */

INLINE float square_sum(const float *x, long width)
{
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= width; i += LANES) sum += load(x + i) * load(x + i);
    float total = sum_lanes(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return total;
}

INLINE void norm_row(float *out, const float *x, const float *weight, long width, float eps)
{
    float scale = 1.0f / sqrtf(square_sum(x, width) / (float)width + eps);
    for (long i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

/* out[rows, width] = RMS norm of x */
void cp_rms_norm(float *out, const float *x, const float *weight, long rows, long width, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long r = 0; r < rows; r++) norm_row(out + r * width, x + r * width, weight, width, eps);
}

/* x += delta; out = RMS norm of x */
void cp_add_rms_norm(float *out, float *x, const float *delta, const float *weight, long rows, long width, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long r = 0; r < rows; r++) {
        for (long i = r * width; i < (r + 1) * width; i++) x[i] += delta[i];
        norm_row(out + r * width, x + r * width, weight, width, eps);
    }
}

/* out[rows, width] = silu(x[:, :width]) * x[:, width:] */
void cp_silu_mul(float *out, const float *x, long rows, long width, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *gate = x + 2 * r * width, *up = gate + width;
        float *to = out + r * width;
        for (long i = 0; i < width; i += LANES) {
            vec g, u;
            if (i + LANES <= width) {
                g = load(gate + i);
                u = load(up + i);
                store(to + i, g / (1.0f + exponential(-g)) * u);
            } else {
                float edge[2][LANES] = {{0}};
                memcpy(edge[0], gate + i, (width - i) * 4);
                memcpy(edge[1], up + i, (width - i) * 4);
                g = load(edge[0]);
                store(edge[0], g / (1.0f + exponential(-g)) * load(edge[1]));
                memcpy(to + i, edge[0], (width - i) * 4);
            }
        }
    }
}

INLINE void rotate_head(float *x, const float *cosine, const float *sine, long half_dim)
{
    for (long i = 0; i < half_dim; i++) {
        float first = x[i], second = x[i + half_dim];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half_dim] = second * cosine[i] + first * sine[i];
    }
}

INLINE void append_row(float *x, void *k, void *v, const float *cosine, const float *sine, const float *query_norm,
                       const float *key_norm, long kv_row, long heads, long kv_heads, long dim, float eps, int half)
{
    long features = kv_heads * dim;
    const float *key = x + heads * dim;
    for (long h = 0; h < heads + kv_heads; h++, x += dim) {
        const float *norm = h < heads ? query_norm : key_norm;
        if (norm) norm_row(x, x, norm, dim, eps);
        rotate_head(x, cosine, sine, dim / 2);
    }
    for (long i = 0; i < features; i += LANES) {
        store_kv(k, kv_row * features + i, load(key + i), half);
        store_kv(v, kv_row * features + i, load(key + features + i), half);
    }
}

/* x[rows, heads + 2 * kv_heads, dim] is Q, K, V of each token. Q and K are normed and rotated in
   place; row r of K and V goes to row kv_rows[r] of k and v. cosine and sine are [rows, dim / 2]; a
   norm may be null; dim is a multiple of LANES. */
void cp_rope_and_append(float *x, void *k, void *v, const float *cosine, const float *sine, const float *query_norm,
                        const float *key_norm, const int64_t *kv_rows, long rows, long heads, long kv_heads, long dim, float eps,
                        int half, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (long r = 0; r < rows; r++) {
        float *row = x + r * (heads + 2 * kv_heads) * dim;
        const float *c = cosine + r * dim / 2, *s = sine + r * dim / 2;
        if (half)
            append_row(row, k, v, c, s, query_norm, key_norm, kv_rows[r], heads, kv_heads, dim, eps, 1);
        else
            append_row(row, k, v, c, s, query_norm, key_norm, kv_rows[r], heads, kv_heads, dim, eps, 0);
    }
}

/* ------------------------------------------------------------------ attention */

/* Transposes rows[LANES] of LANES numbers, by log2(LANES) perfect shuffles. */
INLINE void transpose(vec *rows)
{
    for (int stage = 1; stage < LANES; stage *= 2) {
        vec next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], LOW);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], HIGH);
        }
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

/* columns[dim][BLOCK]: the keys of a block, one per column; zeros beyond `count`. */
INLINE void pack_keys(float *columns, const void *k, const long *keys, long count, long dim, int half)
{
    for (long first = 0; first < BLOCK; first += LANES)
        for (long a = 0; a < dim; a += LANES) {
            vec tile[LANES];
            for (int i = 0; i < LANES; i++) tile[i] = first + i < count ? load_kv(k, keys[first + i] + a, half) : splat(0);
            transpose(tile);
            for (int i = 0; i < LANES; i++) store(columns + (a + i) * BLOCK + first, tile[i]);
        }
}

/* scores[rows][BLOCK] = q[rows][dim] times columns[dim][BLOCK] */
INLINE void score(int rows, float *scores, const float *q, const float *columns, long dim)
{
    for (long first = 0; first < BLOCK; first += VECS * LANES) {
        vec sum[ROWS][VECS] = {{{0}}};
        for (long a = 0; a < dim; a++) {
            vec key[VECS];
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) key[i] = load(columns + a * BLOCK + first + i * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec query = splat(q[r * dim + a]);
#pragma GCC unroll 4
                for (int i = 0; i < VECS; i++) sum[r][i] += query * key[i];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < VECS; i++) store(scores + r * BLOCK + first + i * LANES, sum[r][i]);
    }
}

/* out[rows][dim] = out * shrink[rows] + weights[rows][BLOCK] times values[count][dim] */
INLINE void gather_values(int rows, float *out, const float *shrink, const float *weights, const float *const *values, long count,
                          long dim)
{
    for (long a = 0; a < dim; a += VECS * LANES) {
        int vecs = dim - a < VECS * LANES ? (int)((dim - a) / LANES) : VECS;
        vec sum[ROWS][VECS];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vecs; i++) sum[r][i] = load(out + r * dim + a + i * LANES) * shrink[r];
        if (vecs == VECS) {
            for (long t = 0; t < count; t++)
#pragma GCC unroll 4
                for (int i = 0; i < VECS; i++) {
                    vec value = load(values[t] + a + i * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) sum[r][i] += splat(weights[r * BLOCK + t]) * value;
                }
        } else {
            for (long t = 0; t < count; t++)
                for (int i = 0; i < vecs; i++) {
                    vec value = load(values[t] + a + i * LANES);
                    for (int r = 0; r < rows; r++) sum[r][i] += splat(weights[r * BLOCK + t]) * value;
                }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vecs; i++) store(out + r * dim + a + i * LANES, sum[r][i]);
    }
}

/* Online softmax: scores of one row become weights relative to the running maximum; `seen` keys of
   the block count. Returns the factor for the values gathered before. */
INLINE float soften(float *scores, long seen, float *maximum, float *total)
{
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    int32_t left = seen < BLOCK ? (int32_t)seen : BLOCK;
    vec tops = splat(*maximum);
    for (int32_t t = 0; t < BLOCK; t += LANES) {
        vec value = choose(lane < left - t, load(scores + t), splat(-INFINITY));
        tops = choose(value > tops, value, tops);
        store(scores + t, value);
    }
    float top = *maximum;
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    float shrink = *maximum == top ? 1.0f : exponential(splat(*maximum - top))[0];
    vec sum = load(total) * shrink;
    for (long t = 0; t < BLOCK; t += LANES) {
        vec weight = exponential(load(scores + t) - top);
        sum += weight;
        store(scores + t, weight);
    }
    store(total, sum);
    *maximum = top;
    return shrink;
}

typedef struct {
    float *q, *out, *scores, *columns, *values, *maximum, *shrink, *total;
} scratch;

static int make_scratch(scratch *s, long rows, long dim)
{
    rows += ROWS;
    s->q = malloc(sizeof(float) * (rows * (2 * dim + BLOCK + 2 + LANES) + 2 * dim * BLOCK));
    if (!s->q) return 0;
    s->out = s->q + rows * dim;
    s->scores = s->out + rows * dim;
    s->columns = s->scores + rows * BLOCK;
    s->values = s->columns + dim * BLOCK;
    s->maximum = s->values + dim * BLOCK;
    s->shrink = s->maximum + rows;
    s->total = s->shrink + rows;
    return 1;
}

/* at[BLOCK]: offsets in the pool of the keys of positions [first, first + BLOCK), up to `length`. */
INLINE void locate(long *at, const int64_t *pages, long page_tokens, long kv_heads, long dim, long kv_head, long first, long length)
{
    long last = first + BLOCK < length ? first + BLOCK : length;
    for (long t = first; t < last;) {
        long offset = t % page_tokens, stop = t - offset + page_tokens;
        long place = ((pages[t / page_tokens] * page_tokens + offset) * kv_heads + kv_head) * dim;
        for (; t < stop && t < last; t++, place += kv_heads * dim) at[t - first] = place;
    }
}

/* Pages are scattered: the CPU's prefetcher does not predict the next one. */
INLINE void fetch_ahead(const void *k, const void *v, long at, long dim, int half)
{
    long bytes = half ? 2 : 4;
    for (long line = at * bytes; line < (at + dim) * bytes; line += 64) {
        __builtin_prefetch((const char *)k + line);
        __builtin_prefetch((const char *)v + line);
    }
}

#define EACH_TILE(rows, r, call)                       \
    for (long r = 0; r < (rows); r += ROWS) {          \
        switch ((rows) - r) {                          \
        case 1: call(1); break;                        \
        case 2: call(2); break;                        \
        case 3: call(3); break;                        \
        default: call(4);                              \
        }                                              \
    }

/* `tokens` consecutive tokens of one request, the first at `position`, against one KV head and its
   group of query heads. */
INLINE void attend(const scratch *s, float *out, const float *q, long q_stride, const void *k, const void *v, const int64_t *pages,
                   long page_tokens, long kv_heads, long dim, long kv_head, long group, long tokens, long position, int half)
{
    long rows = tokens * group, length = position + tokens, heads = kv_heads * group;
    float scale = 1.0f / sqrtf((float)dim);
    long places[2][BLOCK], *at = places[0], *next = places[1];
    const float *values[BLOCK];
    for (long r = 0; r < rows; r++) {
        const float *from = q + r / group * q_stride + (kv_head * group + r % group) * dim;
        for (long a = 0; a < dim; a++) s->q[r * dim + a] = from[a] * scale;
        s->maximum[r] = -INFINITY;
    }
    memset(s->out, 0, sizeof(float) * rows * dim);
    memset(s->total, 0, sizeof(float) * rows * LANES);
    locate(next, pages, page_tokens, kv_heads, dim, kv_head, 0, length);
    for (long first = 0; first < length; first += BLOCK) {
        long count = length - first < BLOCK ? length - first : BLOCK;
        long *now = next;
        next = at;
        at = now;
        locate(next, pages, page_tokens, kv_heads, dim, kv_head, first + BLOCK, length);
        for (long t = 0; t < length - first - BLOCK && t < BLOCK; t++) fetch_ahead(k, v, next[t], dim, half);
        for (long t = 0; t < count; t++) values[t] = half ? s->values + t * dim : (const float *)v + at[t];
        pack_keys(s->columns, k, at, count, dim, half);
        if (half)
            for (long t = 0; t < count; t++)
                for (long a = 0; a < dim; a += LANES) store(s->values + t * dim + a, load_kv(v, at[t] + a, 1));
#define SCORE(n) score(n, s->scores + r * BLOCK, s->q + r * dim, s->columns, dim)
        EACH_TILE(rows, r, SCORE)
        for (long r = 0; r < rows; r++)
            s->shrink[r] =
                soften(s->scores + r * BLOCK, position + r / group + 1 - first, s->maximum + r, s->total + r * LANES);
#define GATHER(n) gather_values(n, s->out + r * dim, s->shrink + r, s->scores + r * BLOCK, values, count, dim)
        EACH_TILE(rows, r, GATHER)
    }
    for (long r = 0; r < rows; r++) {
        float *to = out + (r / group * heads + kv_head * group + r % group) * dim;
        float share = 1.0f / sum_lanes(load(s->total + r * LANES));
        for (long a = 0; a < dim; a++) to[a] = s->out[r * dim + a] * share;
    }
}

/* Causal attention of a pass cut into tiles. tiles[tile_count][4]: first row of q, tokens (at most
   max_tokens), position of the first token, row of the block table. q is [*, heads, dim] with
   q_stride between tokens, out the same without gaps. Returns 1 if memory is short, else 0. */
int cp_attention(float *out, const float *q, const void *k, const void *v, const int64_t *tiles, const int64_t *block_table,
                 long tile_count, long max_tokens, long q_stride, long table_stride, long page_tokens, long heads, long kv_heads,
                 long dim, int half, int threads)
{
    long group = heads / kv_heads;
    long chunk = tile_count < 4 * threads ? 1 : kv_heads; /* with many tiles, one thread takes all heads of a page */
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        scratch s = {0};
        if (!make_scratch(&s, max_tokens * group, dim)) failed = 1;
#pragma omp for schedule(dynamic, chunk)
        for (long item = 0; item < tile_count * kv_heads; item++) {
            const int64_t *tile = tiles + item / kv_heads * 4;
            const int64_t *pages = block_table + tile[3] * table_stride;
            float *to = out + tile[0] * heads * dim;
            const float *from = q + tile[0] * q_stride;
            long kv_head = item % kv_heads;
            if (failed) continue;
            if (half)
                attend(&s, to, from, q_stride, k, v, pages, page_tokens, kv_heads, dim, kv_head, group, tile[1], tile[2], 1);
            else
                attend(&s, to, from, q_stride, k, v, pages, page_tokens, kv_heads, dim, kv_head, group, tile[1], tile[2], 0);
        }
        if (!failed) free(s.q);
    }
    return failed;
}

/* Whether the pool may have 16-bit floats. */
int cp_half(void) { return HALF; }
