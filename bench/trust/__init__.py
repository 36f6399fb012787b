"""What Roster promises about isolation, each promise tried and held against its bar: `python -m bench.trust`."""
