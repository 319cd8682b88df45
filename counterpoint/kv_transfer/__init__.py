"""Transports: they move KV bytes between the pools of two workers.

One interface (transport.py), several implementations:

shm       same host, CPU pools: the writer maps the reader's pool (memfd) and copies
cuda_ipc  same host, pools in GPU memory: the writer maps the reader's pool and copies
tcp       any host, no dependency: the receiver reads straight into its pool
nixl      RDMA, NVLink, shared memory or TCP through NVIDIA's NIXL (extra `nixl`)
staged    pools in GPU memory over shm or tcp, through host memory
sharded   one transport per tensor-parallel rank, used as one
sim       tests and simulations: a virtual clock, and every fault on demand
"""
