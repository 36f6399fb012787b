"""The `roster` command's output: texts, tables, logs, exit statuses."""
