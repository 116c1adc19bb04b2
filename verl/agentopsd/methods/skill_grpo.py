"""Skill-GRPO: GRPO of a student that reads the skill in its prompt during training; no teacher.

The upper end of what a skill can give while training, and the usual way in which it is lost afterwards: validation is
skill-free as always, and a second pass with the skill is reported beside it.
"""

from verl.agentopsd.methods.base import Method

METHOD = Method("skill_grpo", student_skill=True)
