"""ALFWorld: household text games in six task types."""
