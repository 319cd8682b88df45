"""Devices: what runs a step. Real ones keep wall time, the simulated one keeps its own.

This room's torch-free half (wall, sim, cores, memory) can be imported without the other.
"""
