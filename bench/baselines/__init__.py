"""Other systems under the same requests: transformers' padded `generate` and its continuous batching."""

IN_PROCESS = "transformers in this process"
"""Target that records name for a baseline's requests."""
