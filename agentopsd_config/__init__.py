"""Hydra configuration of AgentOPSD; composed on top of verl's own ``ppo_trainer``."""
