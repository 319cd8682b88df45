// Reads memory as fast as the SMs can: the ceiling that other kernels are measured against.
//
// Owns: one kernel and its launcher. Promises: each launch reads every piece of the buffer once.
// Pieces are assigned to warps in advance, or taken by warps from a counter; then SMs farther from
// memory read fewer.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int THREADS = 512, LOADS = 8, PIECE = 32768;  // 2 blocks an SM with 8 loads of 16 bytes in flight in each thread: 128 KiB

template <bool CLAIMED>
__global__ void __launch_bounds__(THREADS, 2) read(const char* from, int pieces, int* scratch) {
  const int lane = threadIdx.x % 32, worker = (blockIdx.x * THREADS + threadIdx.x) / 32, workers = gridDim.x * (THREADS / 32);
  uint32_t mixed = 0;
  for (int piece = worker; piece < pieces;) {
    int next = piece + workers;
    if (CLAIMED && lane == 0) next = workers + atomicAdd(scratch, 1);
    const char* at = from + int64_t(piece) * PIECE + lane * 16;
#pragma unroll 1
    for (int i = 0; i < PIECE; i += LOADS * 512) {
      uint4 x[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w)
                     : "l"(at + i + j * 512));
#pragma unroll
      for (int j = 0; j < LOADS; ++j) mixed ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    piece = CLAIMED ? __shfl_sync(~0u, next, 0) : next;
  }
  if (mixed == 0x9e3779b9u) scratch[1] = 1;  // keeps the loads from being optimised away
}

}  // namespace

// scratch: 2 ints.
extern "C" int counterpoint_read(const void* from, int64_t bytes, void* scratch, int sms, int claimed, void* stream) {
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  const char* data = static_cast<const char*>(from);
  int* ints = static_cast<int*>(scratch);
  cudaError_t error = cudaMemsetAsync(ints, 0, 4, on);
  if (error != cudaSuccess) return error;
  if (claimed) read<true><<<sms * 2, THREADS, 0, on>>>(data, bytes / PIECE, ints);
  else read<false><<<sms * 2, THREADS, 0, on>>>(data, bytes / PIECE, ints);
  return cudaGetLastError();
}
