"""Plays loads against simulated devices with the scheduler that serves, and plans deployments."""
