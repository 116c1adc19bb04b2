"""What verl and vLLM need to run on a machine without an accelerator. Nothing here is imported on a GPU."""
