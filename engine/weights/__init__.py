"""Where weights come from: safetensors folders, GGUF files, and the store that keeps them.

Knows formats and files; does not know what a layer computes.
"""
