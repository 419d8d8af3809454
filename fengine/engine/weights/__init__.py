"""Live weights: their Hugging Face names, and updates that happen as a whole or not at all."""
