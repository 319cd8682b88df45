// The SM that a block runs on. Promises: block i writes its SM's number to out[i], then spins for
// `cycles` clock cycles, so that a grid of several times the SMs covers every SM of the stream.

#include <cuda_runtime.h>

__global__ void smid(int* out, long long cycles) {
  if (threadIdx.x == 0) {
    int number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    out[blockIdx.x] = number;
  }
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

extern "C" int counterpoint_smid(void* out, int blocks, long long cycles, void* stream) {
  smid<<<blocks, 1024, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<int*>(out), cycles);
  return cudaGetLastError();
}
