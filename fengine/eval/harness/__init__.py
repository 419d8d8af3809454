"""fengine inside other people's evaluation harnesses: lm-evaluation-harness and inspect-ai."""
