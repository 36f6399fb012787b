"""Reads models from GGUF files and writes them as Hugging Face folders; needs numpy and the package `gguf` only."""
