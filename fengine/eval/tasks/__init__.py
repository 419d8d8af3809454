"""Evaluation: tasks, their rows and their scores, and the run folders that record them."""
