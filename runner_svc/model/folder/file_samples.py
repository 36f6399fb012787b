"""Samples of a large file, which tell it from other files in milliseconds."""

from __future__ import annotations

from pathlib import Path

# Number and size in bytes of the samples that a fingerprint reads of each file. This takes milliseconds, while reading
# whole files takes seconds; any training step changes some of the samples.
FINGERPRINT_SAMPLES = 256
FINGERPRINT_SAMPLE_BYTES = 4096


def sample_bytes(path: Path) -> bytes:
    """Returns the file's size and evenly spaced samples, which include the first and the last bytes."""
    size = path.stat().st_size
    last = max(0, size - FINGERPRINT_SAMPLE_BYTES)
    samples = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for index in range(FINGERPRINT_SAMPLES):
            file.seek(last * index // (FINGERPRINT_SAMPLES - 1))
            samples.append(file.read(FINGERPRINT_SAMPLE_BYTES))
    return b"".join(samples)
