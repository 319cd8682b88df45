"""Devices: they run steps. Real ones keep wall-clock time, the simulated one its own.

Torch-free, and imported without the rest: event_queue, sim, contract_checker, timeline, cores.
"""
