"""The GPU backend of a runner that drafts: steps that verify, and the acceptance of drafts on the device."""
