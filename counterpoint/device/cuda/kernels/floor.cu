// The smallest logit that top-k and top-p keep, without a sort.
//
// Owns: one kernel. Promises: exact in the order of the logits (ties at the floor stay); a row's
// floor depends only on that row.
// Must not: allocate, synchronise.
//
// One block per row. Logits are at most 0 (the row's maximum is 0), so the bits of their magnitude,
// as integers, order them in reverse: smaller key, larger logit. The search cuts the range of keys in
// four, 16 times over the row, which stays in the L2. Top-k asks how many keys are smaller, top-p how
// much mass they have: both grow with the key.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int THREADS = 1024;
constexpr uint32_t LAST = 0x7f800000u;  // the key of -infinity

struct Three {
  float x[3];
};

__device__ Three over_block(Three mine) {
  __shared__ Three sums[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < 3; ++j)
#pragma unroll
    for (int step = 16; step; step /= 2) mine.x[j] += __shfl_xor_sync(~0u, mine.x[j], step);
  __syncthreads();  // the last sums have been read
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  mine = sums[lane];
#pragma unroll
  for (int j = 0; j < 3; ++j)
#pragma unroll
    for (int step = 16; step; step /= 2) mine.x[j] += __shfl_xor_sync(~0u, mine.x[j], step);
  return mine;
}

__device__ __forceinline__ uint32_t key_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The largest key t in [0, most] for which the sum over smaller keys is less than `wanted`; of ones, or (MASS) of exp(x).
template <bool MASS>
__device__ uint32_t search(const float* x, int size, uint32_t most, float wanted) {
  uint32_t low = 0, high = most + 1;  // low is such a key, high is not or is beyond
  while (high - low > 1) {
    const uint32_t step = (high - low + 3) / 4;
    const uint32_t cut[3] = {min(low + step, high), min(low + 2 * step, high), min(low + 3 * step, high)};
    Three sum{};
#pragma unroll 8
    for (int i = threadIdx.x; i < size; i += THREADS) {
      const float value = x[i];
      const uint32_t key = key_of(value);
      if (key >= cut[2]) continue;
      const float part = MASS ? __expf(value) : 1.0f;
      sum.x[2] += part;
      if (key < cut[1]) sum.x[1] += part;
      if (key < cut[0]) sum.x[0] += part;
    }
    sum = over_block(sum);
    const uint32_t from = low, to = high;
    for (int j = 0; j < 3; ++j) {
      if (cut[j] < to && sum.x[j] < wanted) low = max(low, cut[j]);
      if (cut[j] > from && !(sum.x[j] < wanted)) high = min(high, cut[j]);
    }
    if (low >= high) break;  // a row that is not finite
  }
  return low;
}

__global__ void __launch_bounds__(THREADS) floor_kernel(const float* x, int64_t stride, int size, const int64_t* top_k, const float* top_p, float* floor) {
  const float* const row = x + blockIdx.x * stride;
  const int64_t k = top_k[blockIdx.x];
  const float p = top_p ? top_p[blockIdx.x] : 1.0f;
  uint32_t most = LAST;
  if (k > 0 && k < size) most = search<false>(row, size, LAST, float(k));
  if (p < 1.0f) {
    Three mass{};
    for (int i = threadIdx.x; i < size; i += THREADS)
      if (key_of(row[i]) <= most) mass.x[0] += __expf(row[i]);
    mass = over_block(mass);
    most = search<true>(row, size, most, p * mass.x[0]);
  }
  if (threadIdx.x == 0) floor[blockIdx.x] = -__uint_as_float(most);
}

}  // namespace

extern "C" int counterpoint_filter_floor(const void* x, long long stride, int rows, int size, const void* top_k, const void* top_p, void* floor,
                                         void* stream) {
  floor_kernel<<<rows, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const float*>(x), stride, size,
                                                                        static_cast<const int64_t*>(top_k), static_cast<const float*>(top_p),
                                                                        static_cast<float*>(floor));
  return cudaGetLastError();
}
