"""Plays a load against simulated devices with the scheduler that serves, and plans deployments with it."""
