"""CUDA: SM partitions of one GPU, and the kernels that are written for them."""
