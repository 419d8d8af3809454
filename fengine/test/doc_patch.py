"""What SGLang's documentation imports before it starts engines and servers. Imported, it changes nothing.

Its namesake applies nest_asyncio and lowers memory defaults; fengine's Engine works inside a running event loop as it
is, and sizes its memory to the machine.
"""

from fengine.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
