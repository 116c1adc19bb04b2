"""Parts of ``scripts/build_tiny_model.py``."""
