"""Grammars: what a request's output must look like, as masks over the vocabulary. No torch."""
