"""Other systems under the same requests: transformers' padded `generate` and its continuous batching."""

IN_PROCESS = "transformers in this process"
"""Where a baseline's requests go, in records."""
