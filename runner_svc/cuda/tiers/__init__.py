"""Copies of KV blocks between a GPU and a page-locked host pool."""
