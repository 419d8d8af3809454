"""What happens to logits between the model and the draw, one stage a file, in the order that bits depend on.

penalties -> logit_bias -> processors -> structured -> the draw -> logprobs
"""
