"""The host column: pages, prefix cache and scheduler. Plain Python, never torch."""
