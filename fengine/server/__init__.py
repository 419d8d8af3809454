"""An OpenAI-compatible HTTP server over one `Engine`: the extra `serve`. Nothing else of fengine opens a port."""
