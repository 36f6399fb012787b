"""A runner of several processes: how its ranks start, follow rank 0, lose one another and form again."""
