"""Models of a Hugging Face hub: names, the files that a runner reads, the cache, downloads."""
