"""A run, a sweep, or two runs as one HTML file that opens offline: data as plain values, and the page around them."""
