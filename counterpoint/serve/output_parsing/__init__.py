"""What a model says, told apart: what it thinks, what it tells the user, which tools it calls; and how it is told of tools."""
