"""What a person sees of the `roster` command: texts, tables, logs, exit statuses."""
