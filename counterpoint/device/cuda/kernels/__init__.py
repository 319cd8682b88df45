"""CUDA C++ kernels for partitions of few SMs, built at first use, called through ctypes on torch's
current stream."""
