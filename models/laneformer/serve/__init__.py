"""The OpenAI-compatible server and the playground around an Engine: `laneformer serve`. It
needs the extra `serve`.
"""
