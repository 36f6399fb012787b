"""compute-sanitizer over the kernels' GPU tests: `python -m bench.sanitizer`."""
