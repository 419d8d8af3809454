"""Ops: every reduction of the model with its tree declared. Import the module you need."""
