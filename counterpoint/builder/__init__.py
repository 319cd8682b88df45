"""The composition root: from a Config to a running engine, and to a worker of a pool."""
