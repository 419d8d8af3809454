"""Modules that SGLang's documentation imports from `sglang.test`. fengine's own tests lie in `tests/`."""
