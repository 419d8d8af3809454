"""Where a checkpoint comes from and whether its files can be trusted: the hub, directories, safetensors headers."""
