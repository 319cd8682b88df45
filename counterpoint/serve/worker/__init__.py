"""A pool: many workers behind one endpoint. The front's side of it, and what a worker's process is."""
