"""Kernels for partitions of a few SMs: CUDA C++ built at first use, called through ctypes on torch's current stream."""
