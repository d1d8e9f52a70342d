"""Talking to patched SGLang servers: `client` (HTTP), `process` (starting one), `doctor` (is it fit for use?).

Nothing is imported here: `import eagle3_data.server` costs nothing, and each part brings only what it needs.
"""
