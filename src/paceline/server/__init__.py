"""Server: the OpenAI-compatible HTTP API.

Here live request schemas, the shapes of answers and errors, and the border to the engine's process.
What may not live here: anything a Python caller of `LLM` would want as well, and flags; fastapi,
msgspec and uvicorn are imported in this room alone.
"""
