"""The engine's core and what it is built of. `Engine` itself is `fengine.Engine`; its former path still works."""

from fengine.compat import moved_names

__getattr__ = moved_names(__name__, {"Engine": "fengine.api.engine"})
