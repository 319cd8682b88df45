"""Benchmarks: loads, replays, latency reports, calibration."""
