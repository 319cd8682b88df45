// Decode attention over a paged KV cache, for a partition of few SMs.
//
// Owns: one kernel and its launcher. One query token per sequence, up to 8 query heads per KV head.
// Promises: the device divides the work by `lengths`, so a captured graph stays valid when lengths
// change. No block waits for another, so it is safe in any partition. Every row of `out` is written
// (zeros for length 0).
// Must not: allocate, synchronise, or read pages without tokens of a sequence.
//
// A row is one KV head of one sequence; a unit is UNIT tokens of a row. All units of the batch, in
// the order (sequence, head, position), are cut into equal runs, one per warp ("stream-K", Osama et
// al. 2023): so the load of n SMs differs by at most one unit, whatever the lengths.
// Each warp is its own pipeline: it keeps a ring of half units (K, V, K, ...) in flight into its
// part of shared memory, across rows, and never waits for another warp.
// Scores are computed transposed (tokens x queries): the 8 columns of mma.m16n8k16 hold the query
// group, and every byte of K and V crosses shared memory once. Softmax is online (Milakov and
// Gimelshein 2018), in float32, base 2.
// If several warps share a row, each of its fragments leaves a partial result, and the last fragment
// to arrive merges them.
//
// An e4m3 cache (KV 1) is widened to float16 in registers, exactly, and multiplied as such; queries
// and softmax weights are float16 too. Bytes come in pairs, so the order of a head's elements in a
// fragment differs: see `widen`.
//
// Fragment legend (PTX ISA, mma.m16n8k16): lane = 4 g + t, g = 0..7, t = 0..3.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

#ifndef WARPS  // per block, one block per SM: 12 with 227 KiB of shared memory, 6 with about 100
#define WARPS 12
#endif

constexpr int TILE = 16;   // tokens of one mma; a page holds a multiple of it
constexpr int TILES = 2;   // of a unit
constexpr int UNIT = TILES * TILE;
constexpr int GROUP = 8;   // maximum query heads per KV head
constexpr int LEAST = 4;   // mean units of a run: shorter runs cost more to merge than they save
constexpr int FAN = 16;    // partial results merged at a time

struct Args {  // mirrored in attention.py
  const void* q;
  void* out;
  const void* k;
  const void* v;
  const int* table;
  const int* lengths;
  float* partial;      // [fragments]: entries, see below
  int* arrived;        // [fragments]: of a group of FAN fragments, at its first
  int* rows_arrived;   // [seqs][kv_heads]; these counters are zero between launches
  int64_t q_stride, out_stride;                    // elements between sequences; heads are contiguous
  int64_t page_stride, head_stride, token_stride;  // elements, of K and V alike
  int table_stride, seqs, kv_heads, group, page_tokens, pages;
  float scale_log2;  // softmax scale x log2(e), x the scale of K
  float per_v_scale;  // 1 / the scale of V, applied to the sums of weights that the output is divided by
  int head_dim, is_bf16, kv_fp8, sms;
  int chained;  // start before the previous kernel of the stream has ended (programmatic dependent launch)
};

struct Spot {
  int seq, head, unit;  // unit: in its row
};

template <bool FIRST, typename A, typename B>
struct Select {
  using type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using type = B;
};

template <typename T>
struct Element;
template <>
struct Element<__nv_bfloat16> {
  static __device__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 both = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&both);
  }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <>
struct Element<__half> {
  static __device__ uint32_t pack(float lo, float hi) {
    __half2 both = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&both);
  }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t movmatrix(uint32_t a) {
  uint32_t b;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float over_tokens_max(float x) {  // over the 8 lanes of one t
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
__device__ __forceinline__ float over_tokens_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// ---- division of work -------------------------------------------------------------------------------------------------

// cum[s] is the number of units of one row in the sequences before s. Requires 0 <= x < heads * cum[seqs].
__device__ __forceinline__ Spot locate(int x, const int* cum, int seqs, int heads) {
  int per_head = x / heads, low = 0, high = seqs;
  while (high - low > 1) {
    int middle = (low + high) >> 1;
    if (cum[middle] <= per_head) low = middle; else high = middle;
  }
  int units = cum[low + 1] - cum[low], rest = x - heads * cum[low], head = rest / units;
  return {low, head, rest - head * units};
}

// Run i of [0, total) in `runs` equal ones begins at begin_of(i); run_of is its inverse.
__device__ __forceinline__ int begin_of(int i, int total, int runs) { return int(int64_t(i) * total / runs); }
__device__ __forceinline__ int run_of(int x, int total, int runs) { return int(((int64_t(x) + 1) * runs - 1) / total); }

// ---- a warp's ring of half units in shared memory ----------------------------------------------------------------------
// A tile is [row bytes / 128][16 tokens][128 bytes], each 128-byte row's 16-byte chunks permuted by (chunk ^ (token & 7)), which frees
// ldmatrix of bank conflicts. A half unit is the unit's tiles of K, or of V.

// Half units in a warp's ring: 16 KiB for every row size. Even, so a slot always holds K or always V.
constexpr __host__ __device__ int halves(int row_bytes) { return 512 / row_bytes; }

template <int ELEMENT, int ROW_BYTES>  // bytes
struct Copier {
  static constexpr int CHUNKS = ROW_BYTES / 16, ROWS = 32 / CHUNKS, COPIES = TILE / ROWS;  // 16-byte chunks in a row, rows per copy
  const char *k, *v;
  uint32_t to;      // this lane's place in a tile, first copy
  uint32_t stride;  // bytes between tokens
  uint64_t policy;  // the cache is read once and should not evict others' data from the L2
  __device__ Copier(const Args& p, int lane) {
    int row = lane / CHUNKS, chunk = lane % CHUNKS;
    stride = uint32_t(p.token_stride) * ELEMENT;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    k = static_cast<const char*>(p.k) + row * stride + chunk * 16;
    v = static_cast<const char*>(p.v) + row * stride + chunk * 16;
    to = (chunk / 8) * (TILE * 128) + row * 128 + (((chunk % 8) ^ row) << 4);
  }
  // A tile's place in the pool, in units of 16 bytes.
  static __device__ uint32_t place(const Args& p, int seq, int head, int tile) {
    int per_page = p.page_tokens / TILE, page = p.table[int64_t(seq) * p.table_stride + tile / per_page];
    return uint32_t((page * p.page_stride + head * p.head_stride + (tile % per_page) * TILE * p.token_stride) / (16 / ELEMENT));
  }
  __device__ void issue(const char* pool, uint32_t place, uint32_t slot) const {
    const char* from = pool + uint64_t(place) * 16;
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                       slot + i * ROWS * 128 + (to ^ ((i * ROWS & 7) << 4))),
                   "l"(from + i * ROWS * stride), "l"(policy)
                   : "memory");
  }
};
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait() {  // all but the last PENDING groups have arrived, for the whole warp
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
}

// ---- e4m3 ------------------------------------------------------------------------------------------------------------
// ldmatrix moves pairs of bytes. Of K, a lane gets 4 consecutive elements of a token: of 16 elements in a chunk, 4 t .. 4 t + 3.
// The first and third stand for columns 2 t and 2 t + 1 of the mma, the others for 2 t + 8 and 2 t + 9, and the query's are taken in that
// order. Of V, transposed, it gets elements 2 g and 2 g + 1 of two tokens, which stand for rows g and g + 8 of the mma: so row g of
// the output is element 2 g.
// K does without the conversion unit, which V needs: moved to the place of a float16's exponent and mantissa, e4m3 is its value / 256
// (also below the normal numbers; but a NaN becomes 480 / 256).

constexpr float K_SHIFTED = 256;

__device__ __forceinline__ uint32_t shifted_even(uint32_t w) {  // bytes 0 and 2
  return (w << 7 & 0x3f803f80u) | (w << 8 & 0x80008000u);
}
__device__ __forceinline__ uint32_t shifted_odd(uint32_t w) {  // bytes 1 and 3
  return (w >> 1 & 0x3f803f80u) | (w & 0x80008000u);
}
__device__ __forceinline__ uint32_t widen(uint32_t two_bytes) {  // the low two
  uint32_t both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(uint16_t(two_bytes)));
  return both;
}
// K, from one ldmatrix of 16 tokens x 32 elements: the fragments of two steps.
__device__ __forceinline__ void widen_k(const uint32_t (&r)[4], uint32_t (&first)[4], uint32_t (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first[i] = shifted_even(r[i]), first[i + 2] = shifted_odd(r[i]);
    second[i] = shifted_even(r[i + 2]), second[i + 2] = shifted_odd(r[i + 2]);
  }
}
// V, from one transposed ldmatrix: likewise.
__device__ __forceinline__ void widen_v(const uint32_t (&r)[4], uint32_t (&first)[4], uint32_t (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // tokens 0 to 7, 8 to 15
    const uint32_t a = __byte_perm(r[2 * i], 0, 0x3120), b = __byte_perm(r[2 * i + 1], 0, 0x3120);
    first[2 * i] = widen(a), first[2 * i + 1] = widen(a >> 16);
    second[2 * i] = widen(b), second[2 * i + 1] = widen(b >> 16);
  }
}
__device__ __forceinline__ uint32_t as_half(uint32_t two, __nv_bfloat16) {  // two elements
  return Element<__half>::pack(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ uint32_t as_half(uint32_t two, __half) { return two; }

// ---- partial results --------------------------------------------------------------------------------------------------
// An entry: O [group][D] (not yet divided), then (m, l) [8], m in base-2 logits. Fragment (run, row) has entry run + row:
// along the units, each border of a run or row counts one up, so entries are distinct, and those of a row are consecutive.

template <typename T, int D, int PIECES>
struct Merged {  // a lane holds elements 4 (32 j + lane) .. + 3 of [group][D], j < PIECES
  float4 o[PIECES];
  float m[PIECES], l[PIECES];

  // n entries, `step` floats apart.
  __device__ Merged(const float* entry, int64_t step, int n, int group, int lane) {
    const int size = group * D;
#pragma unroll
    for (int j = 0; j < PIECES; ++j) o[j] = make_float4(0, 0, 0, 0), m[j] = -INFINITY, l[j] = 0;
#pragma unroll 4
    for (int e = 0; e < n; ++e) {
      const float* from = entry + e * step;
      float4 x[PIECES];
      float2 ml[PIECES];
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const int at = min(4 * (32 * j + lane), size - 4);
        x[j] = __ldcg(reinterpret_cast<const float4*>(from + at));
        ml[j] = __ldcg(reinterpret_cast<const float2*>(from + size) + at / D);
      }
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const float top = fmaxf(m[j], ml[j].x), keep = exp2_fast(m[j] - top), add = exp2_fast(ml[j].x - top);
        m[j] = top, l[j] = l[j] * keep + ml[j].y * add;
        o[j].x = o[j].x * keep + x[j].x * add, o[j].y = o[j].y * keep + x[j].y * add;
        o[j].z = o[j].z * keep + x[j].z * add, o[j].w = o[j].w * keep + x[j].w * add;
      }
    }
    __syncwarp();  // every lane has read m and l before one writes them
  }
  __device__ void to_entry(float* entry, int group, int lane) const {
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
      const int at = 4 * (32 * j + lane);
      if (at >= group * D) continue;
      *reinterpret_cast<float4*>(entry + at) = o[j];
      if (at % D == 0) reinterpret_cast<float2*>(entry + group * D)[at / D] = make_float2(m[j], l[j]);
    }
  }
  __device__ void to_out(T* out, int group, int lane) const {
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
      const int at = 4 * (32 * j + lane);
      if (at >= group * D) continue;
      const float inverse = 1.0f / l[j];
      *reinterpret_cast<uint2*>(out + at) =
          make_uint2(Element<T>::pack(o[j].x * inverse, o[j].y * inverse), Element<T>::pack(o[j].z * inverse, o[j].w * inverse));
    }
  }
};

struct Fragment {
  int row, run, first, last;  // first and last: runs of the row's first and last fragment
};

// Register the fragments that this warp has written, one in each of the first `count` lanes; merge the rows (and the groups of FAN
// fragments of a long row) that are complete with them.
template <typename T, int D, int PIECES>
__device__ __noinline__ void count_in(const Args& p, const Fragment mine, int count, int lane) {
  const int64_t size = p.group * D + 2 * GROUP;
  __threadfence();
  __syncwarp();
  const int n = mine.last - mine.first + 1, in_row = (mine.run - mine.first) / FAN * FAN, need = n > FAN ? min(FAN, n - in_row) : n;
  int* const counter = n > FAN ? p.arrived + mine.first + mine.row + in_row : p.rows_arrived + mine.row;
  const bool complete = lane < count && atomicAdd(counter, 1) == need - 1;
  if (complete) *counter = 0;  // for the next launch
  unsigned left = __ballot_sync(~0u, complete);
  if (left) __threadfence();
  for (; left; left &= left - 1) {
    const int from = __ffs(left) - 1, row = __shfl_sync(~0u, mine.row, from), all = __shfl_sync(~0u, n, from);
    const int at = __shfl_sync(~0u, in_row, from), seq = row / p.kv_heads, head = row % p.kv_heads;
    float* const entries = p.partial + (__shfl_sync(~0u, mine.first, from) + row) * size;
    T* const to = static_cast<T*>(p.out) + seq * p.out_stride + head * p.group * D;
    if (all <= FAN) {
      Merged<T, D, PIECES>(entries, size, all, p.group, lane).to_out(to, p.group, lane);
      continue;
    }
    Merged<T, D, PIECES>(entries + at * size, size, min(FAN, all - at), p.group, lane).to_entry(entries + at * size, p.group, lane);
    __threadfence();
    __syncwarp();
    int before = 0, groups = (all + FAN - 1) / FAN;
    if (lane == 0) before = atomicAdd(p.rows_arrived + row, 1);
    if (__shfl_sync(~0u, before, 0) != groups - 1) continue;
    __threadfence();
    if (lane == 0) p.rows_arrived[row] = 0;
    Merged<T, D, PIECES>(entries, size * FAN, groups, p.group, lane).to_out(to, p.group, lane);
  }
}

// ---- the kernel -------------------------------------------------------------------------------------------------------

// lens[s]: tokens of sequence s; cum[s]: units of one row in the sequences before s. For the whole block.
__device__ void plan(const Args& p, int* cum, int* lens) {
  const int lane = threadIdx.x % 32;
  for (int s = threadIdx.x; s < p.seqs; s += WARPS * 32) lens[s] = p.lengths[s];
  __syncthreads();
  if (threadIdx.x < 32) {
    int before = 0;
    for (int s0 = 0; s0 < p.seqs; s0 += 32) {
      const int s = s0 + lane;
      int x = s < p.seqs ? (lens[s] + UNIT - 1) / UNIT : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int y = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += y;
      }
      if (s < p.seqs) cum[s + 1] = before + x;
      before += __shfl_sync(~0u, x, 31);
    }
    if (lane == 0) cum[0] = 0;
  }
  __syncthreads();
}

template <typename T, int D, bool FP8>
__global__ void __launch_bounds__(WARPS * 32, 1) decode_attention(const __grid_constant__ Args p) {
  constexpr int ELEMENT = FP8 ? 1 : 2, ROW_BYTES = D * ELEMENT, TILE_BYTES = TILE * ROW_BYTES, HALF_BYTES = TILES * TILE_BYTES;
  constexpr int HALVES = halves(ROW_BYTES), STEPS = D / 16;
  using Copy = Copier<ELEMENT, ROW_BYTES>;
  using Wide = typename Select<FP8, __half, T>::type;  // operand type
  extern __shared__ char raw[];
  const uint32_t base = (uint32_t(__cvta_generic_to_shared(raw)) + 127) & ~127u;
  int* const cum = reinterpret_cast<int*>(raw + (base - uint32_t(__cvta_generic_to_shared(raw))) + WARPS * HALVES * HALF_BYTES);
  int* const lens = cum + p.seqs + 1;  // cum: [seqs + 1], lens: [seqs]

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = p.group;
  const int seqs = p.seqs, kv_heads = p.kv_heads;
  T* const out = static_cast<T*>(p.out);

#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  plan(p, cum, lens);
  for (int s = blockIdx.x; s < seqs; s += gridDim.x)  // padding rows of a batch bucket
    if (lens[s] <= 0)
      for (int i = threadIdx.x; i < kv_heads * group * D; i += WARPS * 32) out[s * p.out_stride + i] = T(0.0f);

  // This warp's run. Neighbouring runs are on different SMs, so a small batch uses all SMs.
  const int total = kv_heads * cum[seqs], runs = min(int(gridDim.x) * WARPS, (total + LEAST - 1) / LEAST);
  const int run = warp * gridDim.x + blockIdx.x;
  if (run >= runs) return;
  const int begin = begin_of(run, total, runs), end = begin_of(run + 1, total, runs);
  const float scale_log2 = p.scale_log2 * (FP8 ? K_SHIFTED : 1);
  const Copy copier(p, lane);
  const uint32_t ring = base + warp * HALVES * HALF_BYTES;

  // Fetching runs ahead of computing. Lane i knows where the tiles of unit ids_begin + i lie, and of the one 32 later.
  struct Places {
    uint32_t tile[TILES];
    int tiles;  // that hold tokens
  };
  auto places_of = [&](int x) {
    Places places{};
    if (x < end) {
      const Spot at = locate(x, cum, seqs, kv_heads);
      const int first = at.unit * TILES;
      places.tiles = min(TILES, (lens[at.seq] + TILE - 1) / TILE - first);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        if (i < places.tiles) places.tile[i] = Copy::place(p, at.seq, at.head, first + i);
    }
    return places;
  };
  Places ids = places_of(begin + lane), ids_next;
  int ids_begin = begin, ahead = begin;
  uint32_t ahead_tile[TILES];  // of the next unit to be fetched
  int ahead_tiles;             // none past the run's end
  auto step_ahead = [&] {
    if (ahead - ids_begin == 32) {
      ids = ids_next;
      ids_begin += 32;
      ids_next = places_of(ids_begin + 32 + lane);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) ahead_tile[i] = __shfl_sync(~0u, ids.tile[i], ahead - ids_begin);
    ahead_tiles = __shfl_sync(~0u, ids.tiles, ahead - ids_begin);
    ++ahead;
  };
  auto fetch = [&](const char* pool, uint32_t slot) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (i < ahead_tiles) copier.issue(pool, ahead_tile[i], slot + i * TILE_BYTES);
    commit();
  };
#pragma unroll 1
  for (int i = 0; i < HALVES; ++i) {
    if (i % 2 == 0) step_ahead();
    fetch(i % 2 ? copier.v : copier.k, ring + i * HALF_BYTES);
  }
  ids_next = places_of(begin + 32 + lane);

  // ldmatrix addresses in a tile: K rows are tokens; V is read transposed. Step s adds (s / 4) tiles of 64 columns and permutes.
  const int k_row = lane & 15, k_high = lane >> 4, v_row = (lane & 7) + (lane >> 4) * 8, v_high = (lane >> 3) & 1;
  const uint32_t k_lane = k_row * 128 + ((k_high ^ (k_row & 7)) << 4), v_lane = v_row * 128 + ((v_high ^ (v_row & 7)) << 4);

  int slot = 0;
  auto next_slot = [&] { slot = slot == HALVES - 1 ? 0 : slot + 1; };
  int written = 0;
  Fragment mine{};  // of lane i: the i-th fragment written
  for (int x = begin; x < end;) {
    // One fragment: the units of one row in this run.
    const Spot at = locate(x, cum, seqs, kv_heads);
    const int row_begin = x - at.unit, row_end = row_begin + cum[at.seq + 1] - cum[at.seq], fragment_end = min(row_end, end);
    const int row = at.seq * kv_heads + at.head, query = at.head * group;
    int left = lens[at.seq] - at.unit * UNIT;  // tokens from here to the end of the sequence
    uint32_t q[STEPS][2];
    {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.q) + at.seq * p.q_stride + (query + g) * D);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint32_t a = g < group ? from[s * 8 + (FP8 ? 2 * t : t)] : 0, b = g < group ? from[s * 8 + (FP8 ? 2 * t + 1 : t + 4)] : 0;
        q[s][0] = FP8 ? as_half(__byte_perm(a, b, 0x5410), T()) : a;
        q[s][1] = FP8 ? as_half(__byte_perm(a, b, 0x7632), T()) : b;
      }
    }
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, o[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) o[s][0] = o[s][1] = o[s][2] = o[s][3] = 0;

#pragma unroll 1
    for (; x < fragment_end; ++x, left -= UNIT) {
      // Scores c[tile][token g, g + 8][query 2t, 2t + 1], each in two sums.
      float c[TILES][2][4] = {};
      uint32_t at_slot = ring + slot * HALF_BYTES;
      wait<HALVES - 1>();
#pragma unroll
      for (int s = 0; s < ROW_BYTES / 32; ++s)
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          uint32_t a[4];
          ldmatrix(a, (at_slot + i * TILE_BYTES + s / 4 * TILE * 128) + (k_lane ^ ((s % 4 * 2) << 4)));
          if constexpr (FP8) {
            uint32_t first[4], second[4];
            widen_k(a, first, second);
            Element<Wide>::mma(c[i][0], first, q[2 * s][0], q[2 * s][1]);
            Element<Wide>::mma(c[i][1], second, q[2 * s + 1][0], q[2 * s + 1][1]);
          } else {
            Element<Wide>::mma(c[i][s % 2], a, q[s][0], q[s][1]);
          }
        }
      __syncwarp();
      step_ahead();
      fetch(copier.k, at_slot);
      next_slot();

      float top0 = m[0], top1 = m[1];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) c[i][0][j] = (c[i][0][j] + c[i][1][j]) * scale_log2;
        if (left < UNIT) {
          if (i * TILE + g >= left) c[i][0][0] = c[i][0][1] = -INFINITY;
          if (i * TILE + g + 8 >= left) c[i][0][2] = c[i][0][3] = -INFINITY;
        }
        top0 = fmaxf(top0, fmaxf(c[i][0][0], c[i][0][2]));
        top1 = fmaxf(top1, fmaxf(c[i][0][1], c[i][0][3]));
      }
      top0 = over_tokens_max(top0), top1 = over_tokens_max(top1);
      if (__any_sync(~0u, top0 > m[0] || top1 > m[1])) {
        float keep0 = exp2_fast(m[0] - top0), keep1 = exp2_fast(m[1] - top1);
        m[0] = top0, m[1] = top1;
        l[0] *= keep0, l[1] *= keep1;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) o[s][0] *= keep0, o[s][1] *= keep1, o[s][2] *= keep0, o[s][3] *= keep1;
      }
      uint32_t b[TILES][2];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float w0 = exp2_fast(c[i][0][0] - m[0]), w1 = exp2_fast(c[i][0][1] - m[1]);
        float w2 = exp2_fast(c[i][0][2] - m[0]), w3 = exp2_fast(c[i][0][3] - m[1]);
        l[0] += w0 + w2, l[1] += w1 + w3;
        b[i][0] = movmatrix(Element<Wide>::pack(w0, w1)), b[i][1] = movmatrix(Element<Wide>::pack(w2, w3));
      }

      at_slot = ring + slot * HALF_BYTES;
      wait<HALVES - 1>();
      if (left >= UNIT) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int s = 0; s < ROW_BYTES / 32; ++s) {
            uint32_t a[4];
            ldmatrix_trans(a, (at_slot + i * TILE_BYTES + s / 4 * TILE * 128) + (v_lane ^ ((s % 4 * 2) << 4)));
            if constexpr (FP8) {
              uint32_t first[4], second[4];
              widen_v(a, first, second);
              Element<Wide>::mma(o[2 * s], first, b[i][0], b[i][1]);
              Element<Wide>::mma(o[2 * s + 1], second, b[i][0], b[i][1]);
            } else {
              Element<Wide>::mma(o[s], a, b[i][0], b[i][1]);
            }
          }
      } else {  // memory beyond the sequence may hold anything, also NaN
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          const int rest = left - i * TILE;
          const uint32_t low = (2 * t < rest ? 0xffffu : 0) | (2 * t + 1 < rest ? 0xffff0000u : 0);
          const uint32_t high = (2 * t + 8 < rest ? 0xffffu : 0) | (2 * t + 9 < rest ? 0xffff0000u : 0);
          auto add = [&](float (&to)[4], uint32_t (&a)[4]) {
            a[0] &= low, a[1] &= low, a[2] &= high, a[3] &= high;
            Element<Wide>::mma(to, a, b[i][0], b[i][1]);
          };
#pragma unroll
          for (int s = 0; s < ROW_BYTES / 32; ++s) {
            uint32_t a[4];
            ldmatrix_trans(a, (at_slot + i * TILE_BYTES + s / 4 * TILE * 128) + (v_lane ^ ((s % 4 * 2) << 4)));
            if constexpr (FP8) {
              uint32_t first[4], second[4];
              widen_v(a, first, second);
              add(o[2 * s], first), add(o[2 * s + 1], second);
            } else {
              add(o[s], a);
            }
          }
        }
      }
      __syncwarp();
      fetch(copier.v, at_slot);
      next_slot();
    }

    l[0] = over_tokens_sum(l[0]) * p.per_v_scale, l[1] = over_tokens_sum(l[1]) * p.per_v_scale;
    T* const to_row = out + at.seq * p.out_stride + query * D;
    if (at.unit == 0 && fragment_end == row_end) {  // the whole row: write it
      const float inverse0 = 1.0f / l[0], inverse1 = 1.0f / l[1];
      uint32_t* to = reinterpret_cast<uint32_t*>(to_row + g * D) + (FP8 ? 2 * t : t);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        uint32_t low = movmatrix(Element<T>::pack(o[s][0] * inverse0, o[s][1] * inverse1));
        uint32_t high = movmatrix(Element<T>::pack(o[s][2] * inverse0, o[s][3] * inverse1));
        if constexpr (FP8) {  // low: elements 4 t and 4 t + 2, high: those behind them
          if (g < group)
            *reinterpret_cast<uint2*>(to + s * 8) = make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
        } else {
          if (g < group) to[s * 8] = low, to[s * 8 + 4] = high;
        }
      }
    } else {
      float* entry = p.partial + int64_t(run + row) * (group * D + 2 * GROUP);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (2 * t + i < group) {
          float* to = entry + (2 * t + i) * D + (FP8 ? 2 * g : g);
#pragma unroll
          for (int s = 0; s < STEPS; ++s) to[s * 16] = o[s][i], to[s * 16 + (FP8 ? 1 : 8)] = o[s][2 + i];
          if (g == 0) reinterpret_cast<float2*>(entry + group * D)[2 * t + i] = make_float2(m[i], l[i]);
        }
      if (lane == written) mine = {row, run, run_of(row_begin, total, runs), run_of(row_end - 1, total, runs)};
      ++written;  // at most 2: a row that started in an earlier run, and one that continues in the next
    }
  }
  if (written && group * 2 > GROUP) count_in<T, D, GROUP * D / 128>(p, mine, written, lane);
  else if (written) count_in<T, D, GROUP * D / 256>(p, mine, written, lane);
}

// ---- the launcher -----------------------------------------------------------------------------------------------------

template <typename T, int D, bool FP8>
cudaError_t launch(const Args& p, cudaStream_t stream) {
  auto kernel = decode_attention<T, D, FP8>;
  const int row = D * (FP8 ? 1 : 2), bytes = 128 + WARPS * halves(row) * UNIT * row + (2 * p.seqs + 1) * 4;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute chained{};
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.sms);
  config.blockDim = dim3(WARPS * 32);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &chained;
  config.numAttrs = p.chained ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

extern "C" int counterpoint_decode_attention(const void* args, void* stream) {
  const Args& p = *static_cast<const Args*>(args);
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (p.group < 1 || p.group > GROUP || p.page_tokens % TILE) return cudaErrorInvalidValue;
#if WITH_FP8
  if (p.kv_fp8 && p.head_dim == 128) return p.is_bf16 ? launch<__nv_bfloat16, 128, true>(p, on) : launch<__half, 128, true>(p, on);
#endif
  if (p.kv_fp8) return cudaErrorInvalidValue;
  if (p.head_dim == 128) return p.is_bf16 ? launch<__nv_bfloat16, 128, false>(p, on) : launch<__half, 128, false>(p, on);
  if (p.head_dim == 64) return p.is_bf16 ? launch<__nv_bfloat16, 64, false>(p, on) : launch<__half, 64, false>(p, on);
  return cudaErrorInvalidValue;
}

