"""Where sequences wait, and in which order: one queue, or one a tenant; what each tenant may have."""
