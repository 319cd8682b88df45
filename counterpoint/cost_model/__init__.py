"""What a step costs: predictions for policies and for simulated devices."""
