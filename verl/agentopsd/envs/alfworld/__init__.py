"""ALFWorld: household text games of six task types. Importing this package registers ``env.name=alfworld``."""

from verl.agentopsd.envs.alfworld.family import AlfworldFamily

__all__ = ["AlfworldFamily"]
