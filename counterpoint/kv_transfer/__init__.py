"""Movers of KV bytes between two workers: one interface (port.py), several ways.

local    the same process: a copy, or nothing at all where both ends share the pool
shm      the same host, CPU pools: the writer maps the other's pool (memfd) and copies
tcp      any host, no dependency: the receiver reads straight into its pool
nixl     RDMA, NVLink, shared memory, TCP by NVIDIA's NIXL (extra `nixl`)
sim      tests and simulations: a virtual clock, and every fault on demand
cuda_ipc the same host, pools in GPU memory: the writer maps the other's pool and copies
staged   pools in GPU memory over one of the others, through host memory
"""
