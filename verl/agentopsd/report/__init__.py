"""A run's credit as one HTML page that opens from disk: ``python -m verl.agentopsd.report RUN_DIR``."""
