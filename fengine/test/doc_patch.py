"""Does nothing. SGLang's documentation imports its namesake, which applies nest_asyncio and lowers memory defaults.

fengine's Engine works inside a running event loop as it is, and sizes its memory to the machine.
"""
