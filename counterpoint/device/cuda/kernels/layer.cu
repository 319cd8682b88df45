// The operations between a decoder layer's matrix products, and products of few rows.
//
// Owns: norms, SwiGLU, their quantising forms, RoPE with the write to the paged KV pool, the gather
// of a context, and a matrix times a few vectors.
// Promises: elements are read and written once, 16 bytes at a time; arithmetic is float32, rounded
// once. `add_rms_norm` equals an add and then `rms_norm`, bit for bit. A launch may be chained: it
// starts before the previous kernel of the stream has ended, and reads that kernel's output only
// after it has (programmatic dependent launch).
// Must not: allocate, synchronise.
//
// Elements are bfloat16 or float16; those of a KV pool may also be e4m3, with one scale for K and one
// for V. Row sizes are multiples of 8 elements. Quantised rows (y8, e4m3, with scales) are made from
// the plain result rounded to its dtype, so fused and separate kernels give the same bits.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

struct Args {  // mirrored in layer.py; each kernel's comment names the fields it reads
  const void *x, *weight, *weight2;
  const float *cos, *sin;
  void *y, *k, *v;
  const void* rows;
  void* y8;      // quantised rows
  float* scales;  // of them
  int64_t page_stride, token_stride, head_stride;  // elements, of the K and V pools alike
  int count, size, heads, kv_heads, head_dim, page_tokens, n, units;
  float eps, k_scale, v_scale;
  int is_bf16, chained, kv_fp8;
};

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename T>
__device__ __forceinline__ float2 two(uint32_t x);
template <>
__device__ __forceinline__ float2 two<__nv_bfloat16>(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 two<__half>(uint32_t x) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}
template <typename T>
__device__ __forceinline__ uint32_t packed(float a, float b);
template <>
__device__ __forceinline__ uint32_t packed<__nv_bfloat16>(float a, float b) {
  __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t packed<__half>(float a, float b) {
  __half2 x = __floats2half2_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&x);
}

struct Eight {
  float x[8];
};
template <typename T>
__device__ __forceinline__ Eight unpack(uint4 v) {
  float2 a = two<T>(v.x), b = two<T>(v.y), c = two<T>(v.z), d = two<T>(v.w);
  return {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
}
template <typename T>
__device__ __forceinline__ uint4 pack(const Eight& f) {
  return {packed<T>(f.x[0], f.x[1]), packed<T>(f.x[2], f.x[3]), packed<T>(f.x[4], f.x[5]), packed<T>(f.x[6], f.x[7])};
}

__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float over_block(float x) {
  __shared__ float sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = over_warp(x);
  if (lane == 0) sums[warp] = x;
  __syncthreads();
  return over_warp(lane < blockDim.x / 32 ? sums[lane] : 0.0f);
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

__device__ __forceinline__ float largest_of_block(float x) {
  __shared__ float tops[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = largest_of_warp(x);
  if (lane == 0) tops[warp] = x;
  __syncthreads();
  return largest_of_warp(lane < blockDim.x / 32 ? tops[lane] : 0.0f);
}

// ---- e4m3. Beyond the largest number it saturates; NaN stays NaN.

constexpr float LARGEST = 448.0f, LEAST = 1e-12f;  // LEAST: of a row's largest, as in model/fp8.py

__device__ __forceinline__ uint32_t fp8x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  return low | uint32_t(__nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3)) << 16;
}
__device__ __forceinline__ uint2 to_fp8(const Eight& f, float factor) {
  return {fp8x4(f.x[0] * factor, f.x[1] * factor, f.x[2] * factor, f.x[3] * factor),
          fp8x4(f.x[4] * factor, f.x[5] * factor, f.x[6] * factor, f.x[7] * factor)};
}
__device__ __forceinline__ Eight from_fp8(uint2 v, float factor) {
  Eight f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? v.x : v.y;
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(word >> i % 2 * 16), __NV_E4M3);
    const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&both));
    f.x[2 * i] = wide.x * factor, f.x[2 * i + 1] = wide.y * factor;
  }
  return f;
}

// One row of `vectors` pieces of 8, each thread with every blockDim-th of them in f: to p.y8, its scale to p.scales.
template <int VECTORS>
__device__ __forceinline__ void quantise_row(const Args& p, const Eight (&f)[VECTORS], int vectors) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (threadIdx.x + i * blockDim.x < vectors)
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(f[i].x[j]));
  top = fmaxf(largest_of_block(top), LEAST);
  const float factor = LARGEST / top;
  uint2* const to = static_cast<uint2*>(p.y8) + int64_t(blockIdx.x) * vectors;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) to[at] = to_fp8(f[i], factor);
  }
  if (threadIdx.x == 0) p.scales[blockIdx.x] = top / LARGEST;
}

// ---- norms. One block per row. x [count, size], weight [size]; y [count, size]. With ADD, y is delta on the way in, and x += delta.
// With QUANTISE, the result is y8 and scales instead of y.

constexpr int NORM_THREADS = 512;

template <typename T, bool ADD, bool QUANTISE, int VECTORS>  // VECTORS: 16-byte pieces per thread; rows of up to 16384 elements take 4
__global__ void __launch_bounds__(NORM_THREADS, 2048 / NORM_THREADS / VECTORS) norm_kernel(const Args p) {
  let_next_start();
  const int vectors = p.size / 8;
  uint4* const x = static_cast<uint4*>(const_cast<void*>(p.x)) + int64_t(blockIdx.x) * vectors;
  uint4* const y = static_cast<uint4*>(p.y) + int64_t(blockIdx.x) * vectors;
  const uint4* const weight = static_cast<const uint4*>(p.weight);
  uint4 w[VECTORS];
  Eight f[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) w[i] = weight[at];
  }
  wait_for_previous();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    f[i] = unpack<T>(x[at]);
    if (ADD) {
      const Eight d = unpack<T>(y[at]);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[i].x[j] += d.x[j];
      const uint4 rounded = pack<T>(f[i]);
      x[at] = rounded;
      f[i] = unpack<T>(rounded);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += f[i].x[j] * f[i].x[j];
  }
  const float scale = 1.0f / sqrtf(over_block(sum) / p.size + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    const Eight g = unpack<T>(w[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[i].x[j] = f[i].x[j] * scale * g.x[j];
    if (QUANTISE) f[i] = unpack<T>(pack<T>(f[i]));
    else y[at] = pack<T>(f[i]);
  }
  if (QUANTISE) quantise_row<VECTORS>(p, f, vectors);
}

// ---- quantisation alone, and after SwiGLU. One block per row. x [count, size], or with SILU [count, 2 size]: gate, then up.

constexpr int QUANTISE_THREADS = 512;

template <typename T, bool SILU, int VECTORS>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_kernel(const Args p) {
  let_next_start();
  const int vectors = p.size / 8;
  const uint4* const x = static_cast<const uint4*>(p.x) + int64_t(blockIdx.x) * (SILU ? 2 : 1) * vectors;
  Eight f[VECTORS];
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    f[i] = unpack<T>(x[at]);
    if (SILU) {
      const Eight up = unpack<T>(x[vectors + at]);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[i].x[j] = f[i].x[j] / (1.0f + __expf(-f[i].x[j])) * up.x[j];
      f[i] = unpack<T>(pack<T>(f[i]));
    }
  }
  quantise_row<VECTORS>(p, f, vectors);
}

// ---- SwiGLU. x [count, 2 size]: gate, then up; y [count, size].

template <typename T>
__global__ void __launch_bounds__(256) silu_mul_kernel(const Args p) {
  let_next_start();
  const int vectors = p.size / 8, at = blockIdx.y * 256 + threadIdx.x;
  if (at >= vectors) return;
  const uint4* const x = static_cast<const uint4*>(p.x) + int64_t(blockIdx.x) * 2 * vectors;
  wait_for_previous();
  Eight gate = unpack<T>(x[at]);
  const Eight up = unpack<T>(x[vectors + at]);
#pragma unroll
  for (int j = 0; j < 8; ++j) gate.x[j] = gate.x[j] / (1.0f + __expf(-gate.x[j])) * up.x[j];
  static_cast<uint4*>(p.y)[int64_t(blockIdx.x) * vectors + at] = pack<T>(gate);
}

template <bool FIRST, typename A, typename B>
struct Select {
  using type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using type = B;
};
// Eight elements to a pool: e4m3 times `factor`, or as they are.
template <typename T>
__device__ __forceinline__ void put(uint8_t* to, const Eight& f, float factor) {
  *reinterpret_cast<uint2*>(to) = to_fp8(unpack<T>(pack<T>(f)), factor);
}
template <typename T>
__device__ __forceinline__ void put(T* to, const Eight& f, float) {
  *reinterpret_cast<uint4*>(to) = pack<T>(f);
}

// ---- RoPE and the KV pool. x [count, heads + 2 kv_heads, head_dim]: Q, K, V; cos, sin [count, head_dim / 2]; weight, weight2
// [head_dim]: norms of Q and K, or null; y [count, heads, head_dim]; k, v: pools; rows [count] int64: where in them.

template <typename T, int HALF, bool KV_FP8>
__global__ void __launch_bounds__(256) rope_and_append_kernel(const Args p) {
  using Cached = typename Select<KV_FP8, uint8_t, T>::type;
  constexpr int PER_HEAD = HALF / 8;  // threads to a head: each turns 8 pairs
  let_next_start();
  const int64_t token = blockIdx.x;
  const int heads = p.heads + p.kv_heads, items = heads * PER_HEAD, lane = threadIdx.x % 32;
  wait_for_previous();
  const T* const x = static_cast<const T*>(p.x) + token * (heads + p.kv_heads) * (2 * HALF);
  const int64_t row = static_cast<const int64_t*>(p.rows)[token];
  const int64_t to = row / p.page_tokens * p.page_stride + row % p.page_tokens * p.token_stride;
  Cached* const k = static_cast<Cached*>(p.k) + to;
  Cached* const v = static_cast<Cached*>(p.v) + to;
  T* const q = static_cast<T*>(p.y) + token * p.heads * (2 * HALF);
  for (int base = threadIdx.x - lane; base < items; base += blockDim.x) {
    const int item = base + lane, head = item / PER_HEAD, at = item % PER_HEAD * 8;
    const bool some = item < items;
    Eight a{}, b{};
    if (some) {
      a = unpack<T>(*reinterpret_cast<const uint4*>(x + head * 2 * HALF + at));
      b = unpack<T>(*reinterpret_cast<const uint4*>(x + head * 2 * HALF + HALF + at));
    }
    if (p.weight) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += a.x[j] * a.x[j] + b.x[j] * b.x[j];
#pragma unroll
      for (int step = PER_HEAD / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const float scale = 1.0f / sqrtf(sum / (2 * HALF) + p.eps);
      const T* const norm = static_cast<const T*>(head < p.heads ? p.weight : p.weight2);
      const Eight g = unpack<T>(*reinterpret_cast<const uint4*>(norm + at)), h = unpack<T>(*reinterpret_cast<const uint4*>(norm + HALF + at));
#pragma unroll
      for (int j = 0; j < 8; ++j) a.x[j] *= scale * g.x[j], b.x[j] *= scale * h.x[j];
    }
    if (!some) continue;
    const float4* const cos = reinterpret_cast<const float4*>(p.cos + token * HALF + at);
    const float4* const sin = reinterpret_cast<const float4*>(p.sin + token * HALF + at);
    const float4 c0 = cos[0], c1 = cos[1], s0 = sin[0], s1 = sin[1];
    const float c[8] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w}, s[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
    Eight first, second;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      first.x[j] = a.x[j] * c[j] - b.x[j] * s[j];
      second.x[j] = b.x[j] * c[j] + a.x[j] * s[j];
    }
    if (head < p.heads) {
      put<T>(q + head * 2 * HALF + at, first, 1.0f);
      put<T>(q + head * 2 * HALF + at + HALF, second, 1.0f);
    } else {
      put<T>(k + (head - p.heads) * p.head_stride + at, first, 1.0f / p.k_scale);
      put<T>(k + (head - p.heads) * p.head_stride + at + HALF, second, 1.0f / p.k_scale);
    }
  }
  constexpr int VECTORS = 2 * HALF / 8;
  for (int i = threadIdx.x; i < p.kv_heads * VECTORS; i += blockDim.x) {
    const int head = i / VECTORS, at = i % VECTORS * 8;
    const uint4 piece = *reinterpret_cast<const uint4*>(x + (heads + head) * 2 * HALF + at);
    put<T>(v + head * p.head_stride + at, unpack<T>(piece), 1.0f / p.v_scale);
  }
}

// ---- gather. rows [count] int32 of the pools x (K) and weight (V), to k and v [count, kv_heads, head_dim].

template <typename T>
__global__ void __launch_bounds__(256) gather_fp8_kernel(const Args p) {
  let_next_start();
  wait_for_previous();
  const int64_t row = static_cast<const int*>(p.rows)[blockIdx.x];
  const int64_t from = row / p.page_tokens * p.page_stride + row % p.page_tokens * p.token_stride;
  const int per_head = p.head_dim / 8, vectors = p.kv_heads * per_head;
  const uint8_t* const k = static_cast<const uint8_t*>(p.x) + from;
  const uint8_t* const v = static_cast<const uint8_t*>(p.weight) + from;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const int64_t offset = i / per_head * p.head_stride + i % per_head * 8, to = int64_t(blockIdx.x) * vectors + i;
    static_cast<uint4*>(p.k)[to] = pack<T>(from_fp8(*reinterpret_cast<const uint2*>(k + offset), p.k_scale));
    static_cast<uint4*>(p.v)[to] = pack<T>(from_fp8(*reinterpret_cast<const uint2*>(v + offset), p.v_scale));
  }
}

__global__ void __launch_bounds__(256) gather_kernel(const Args p) {
  let_next_start();
  wait_for_previous();
  const int64_t row = static_cast<const int*>(p.rows)[blockIdx.x];
  const int64_t from = row / p.page_tokens * p.page_stride + row % p.page_tokens * p.token_stride;
  const int per_head = p.head_dim / 8, vectors = p.kv_heads * per_head;
  const uint16_t* const k = static_cast<const uint16_t*>(p.x) + from;
  const uint16_t* const v = static_cast<const uint16_t*>(p.weight) + from;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const int64_t offset = i / per_head * p.head_stride + i % per_head * 8, to = int64_t(blockIdx.x) * vectors + i;
    static_cast<uint4*>(p.k)[to] = *reinterpret_cast<const uint4*>(k + offset);
    static_cast<uint4*>(p.v)[to] = *reinterpret_cast<const uint4*>(v + offset);
  }
}

// ---- a few rows. x [ROWS, size], weight [n, size], y [ROWS, n] = x weight^T. A warp takes one row of the weight after another; its
// first loads start before the previous kernel has ended, because no kernel writes weights.

constexpr int FEW_THREADS = 512, AHEAD = 8;

template <typename T, int ROWS>
__global__ void __launch_bounds__(FEW_THREADS) few_rows_kernel(const Args p) {
  extern __shared__ uint4 x[];  // [ROWS][vectors]
  let_next_start();
  const int vectors = p.size / 8, lane = threadIdx.x % 32;
  const int warps = gridDim.x * (FEW_THREADS / 32), warp = blockIdx.x * (FEW_THREADS / 32) + threadIdx.x / 32;
  const uint4* const weight = static_cast<const uint4*>(p.weight);
  uint4 w[AHEAD];
  auto fetch = [&](int row, int first) {
    const uint4* const from = weight + int64_t(row) * vectors;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = first + i * 32 + lane;
      w[i] = row < p.n && at < vectors ? __ldcs(from + at) : uint4{0, 0, 0, 0};
    }
  };
  fetch(warp, 0);
  wait_for_previous();
  for (int i = threadIdx.x; i < ROWS * vectors; i += FEW_THREADS) x[i] = static_cast<const uint4*>(p.x)[i];
  __syncthreads();
  for (int row = warp; row < p.n; row += warps) {
    float sum[ROWS] = {};
    for (int first = 0; first < vectors; first += AHEAD * 32) {
      uint4 now[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) now[i] = w[i];
      const bool last = first + AHEAD * 32 >= vectors;
      fetch(last ? row + warps : row, last ? 0 : first + AHEAD * 32);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int at = first + i * 32 + lane;
        if (at >= vectors) continue;
        const Eight f = unpack<T>(now[i]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const Eight g = unpack<T>(x[r * vectors + at]);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[r] += f.x[j] * g.x[j];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float total = over_warp(sum[r]);
      if (lane == 0) static_cast<T*>(p.y)[int64_t(r) * p.n + row] = T(total);
    }
  }
}

// ---- launchers ---------------------------------------------------------------------------------------------------------

template <typename Kernel>
cudaError_t launch(Kernel kernel, dim3 grid, int threads, int bytes, const Args& p, cudaStream_t stream) {
  if (bytes > 48 * 1024) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute chained{};
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &chained;
  config.numAttrs = p.chained ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <typename T, bool ADD, bool QUANTISE>
cudaError_t norm(const Args& p, cudaStream_t stream) {
  const int vectors = p.size / 8, each = (vectors + NORM_THREADS - 1) / NORM_THREADS;
  const int pieces = each <= 2 ? each : 4, threads = ((vectors + pieces - 1) / pieces + 31) / 32 * 32;
  if (p.size % 8 || each < 1 || each > 4) return cudaErrorInvalidValue;
  if (pieces == 1) return launch(norm_kernel<T, ADD, QUANTISE, 1>, dim3(p.count), threads, 0, p, stream);
  if (pieces == 2) return launch(norm_kernel<T, ADD, QUANTISE, 2>, dim3(p.count), threads, 0, p, stream);
  return launch(norm_kernel<T, ADD, QUANTISE, 4>, dim3(p.count), threads, 0, p, stream);
}

template <typename T, bool SILU>
cudaError_t quantise(const Args& p, cudaStream_t stream) {
  const int vectors = p.size / 8, each = (vectors + QUANTISE_THREADS - 1) / QUANTISE_THREADS;
  if (p.size % 8 || each < 1 || each > 8) return cudaErrorInvalidValue;
  const int pieces = each <= 2 ? each : each <= 4 ? 4 : 8, threads = ((vectors + pieces - 1) / pieces + 31) / 32 * 32;
  if (pieces == 1) return launch(quantise_kernel<T, SILU, 1>, dim3(p.count), threads, 0, p, stream);
  if (pieces == 2) return launch(quantise_kernel<T, SILU, 2>, dim3(p.count), threads, 0, p, stream);
  if (pieces == 4) return launch(quantise_kernel<T, SILU, 4>, dim3(p.count), threads, 0, p, stream);
  return launch(quantise_kernel<T, SILU, 8>, dim3(p.count), threads, 0, p, stream);
}

template <typename T, bool KV_FP8>
cudaError_t rope_of(const Args& p, cudaStream_t stream) {
  const int items = (p.heads + p.kv_heads) * (p.head_dim / 16), threads = items < 256 ? (items + 31) / 32 * 32 : 256;
  if (p.head_dim == 128) return launch(rope_and_append_kernel<T, 64, KV_FP8>, dim3(p.count), threads, 0, p, stream);
  if (p.head_dim == 64) return launch(rope_and_append_kernel<T, 32, KV_FP8>, dim3(p.count), threads, 0, p, stream);
  if (p.head_dim == 256) return launch(rope_and_append_kernel<T, 128, KV_FP8>, dim3(p.count), threads, 0, p, stream);
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t rope(const Args& p, cudaStream_t stream) {
  return p.kv_fp8 ? rope_of<T, true>(p, stream) : rope_of<T, false>(p, stream);
}

template <typename T>
cudaError_t gather(const Args& p, cudaStream_t stream) {
  if (p.kv_fp8) return launch(gather_fp8_kernel<T>, dim3(p.count), 128, 0, p, stream);
  return launch(gather_kernel, dim3(p.count), 128, 0, p, stream);
}

template <typename T>
cudaError_t few_rows(const Args& p, cudaStream_t stream) {
  const int bytes = p.count * p.size * 2, needed = (p.n + FEW_THREADS / 32 - 1) / (FEW_THREADS / 32);
  const int blocks = p.units;  // one fills an SM: its registers, and enough loads in flight
  const dim3 grid(needed < blocks ? needed : blocks);
  if (p.size % 8 || bytes > 200 * 1024) return cudaErrorInvalidValue;
  if (p.count == 1) return launch(few_rows_kernel<T, 1>, grid, FEW_THREADS, bytes, p, stream);
  if (p.count == 2) return launch(few_rows_kernel<T, 2>, grid, FEW_THREADS, bytes, p, stream);
  if (p.count == 4) return launch(few_rows_kernel<T, 4>, grid, FEW_THREADS, bytes, p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

#define BY_TYPE(call, p) ((p).is_bf16 ? call<__nv_bfloat16>(p, stream) : call<__half>(p, stream))
#define BY_TYPE_AND(call, p, ...) ((p).is_bf16 ? call<__nv_bfloat16, __VA_ARGS__>(p, stream) : call<__half, __VA_ARGS__>(p, stream))

template <typename T>
static cudaError_t silu(const Args& p, cudaStream_t stream) {
  if (p.size % 8) return cudaErrorInvalidValue;
  return launch(silu_mul_kernel<T>, dim3(p.count, (p.size / 8 + 255) / 256), 256, 0, p, stream);
}

#define ENTRY(name, result)                                                \
  extern "C" int counterpoint_##name(const void* args, void* on) {         \
    const Args& p = *static_cast<const Args*>(args);                       \
    const cudaStream_t stream = static_cast<cudaStream_t>(on);             \
    return result;                                                         \
  }
ENTRY(rms_norm, BY_TYPE_AND(norm, p, false, false))
ENTRY(add_rms_norm, BY_TYPE_AND(norm, p, true, false))
ENTRY(add_rms_norm_quantised, BY_TYPE_AND(norm, p, true, true))
ENTRY(quantise, BY_TYPE_AND(quantise, p, false))
ENTRY(silu_mul_quantised, BY_TYPE_AND(quantise, p, true))
ENTRY(silu_mul, BY_TYPE(silu, p))
ENTRY(rope_and_append, BY_TYPE(rope, p))
ENTRY(gather, BY_TYPE(gather, p))
ENTRY(few_rows, BY_TYPE(few_rows, p))
