"""Several processes of one engine: ranks that hold one model together, and replicas that each hold all of it."""
