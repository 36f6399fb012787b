"""Code of the mask processes, which alone call the grammar library. `structural_tag` runs in front workers."""
