"""What a step costs: predictions for the policies (belief) and for the simulated device (physics)."""
