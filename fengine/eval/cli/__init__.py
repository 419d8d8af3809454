"""The command line: Hydra's configurations as checked values, what is seen of a run, exit codes."""
