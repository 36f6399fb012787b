"""What several GPUs bring: exchanges of ranks, steps of divided models, a rank killed under load."""
