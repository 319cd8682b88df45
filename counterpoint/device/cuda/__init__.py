"""CUDA device: SM partitions of one GPU, CUDA graphs, and the kernels written for them."""
