"""Panels, per-episode records, statistics, summaries and plots. Nothing here imports verl's training stack."""
