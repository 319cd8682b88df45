// Which SM a block runs on. Owns: nothing. Promises: block i writes its SM's number to out[i], then stays `cycles` clock cycles,
// so that a grid of several times the SMs spreads over every SM that the stream may use.

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
