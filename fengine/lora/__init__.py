"""LoRA adapters: PEFT's files, checked; their place in the slots of the device; which of them are loaded."""
