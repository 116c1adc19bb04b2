"""Skill texts: the bank that finds them, where they go in a prompt, and the check that they are absent from one."""
