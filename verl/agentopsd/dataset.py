"""The games of a split as verl's dataset: one row is one game, its text comes from the environment."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from verl.agentopsd.envs.base import make_family
from verl.agentopsd.evaluation.panel import spread


class EpisodeDataset(Dataset):
    """``data.train_files`` and ``data.val_files`` name splits; ``data.env`` is the section ``env``.

    Args:
        data_files: a split or a list of splits.
        config: the section ``data``.
        max_samples: keep at most so many games of each split, task types taking turns; all when negative.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        processor: Any = None,
        config: DictConfig | None = None,
        max_samples: int = -1,
    ):
        assert config is not None
        section = OmegaConf.to_container(config.env, resolve=True)
        assert isinstance(section, dict)
        self.seed = int(section["seed"])
        self.env_name = str(section["name"])
        family = make_family({str(key): value for key, value in section.items()})
        splits = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tasks = []
        for split in splits:
            tasks = family.tasks(split)
            self.tasks += tasks if int(max_samples) < 0 else spread(tasks, int(max_samples))

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self.tasks[index]
        return {
            # verl wants a prompt in every row; the agent loop writes the real one after the environment's reset
            "raw_prompt": [{"role": "user", "content": task.game_id}],
            "index": index,
            "data_source": f"{self.env_name}/{task.split}",
            "agent_name": "text_env",
            "extra_info": {
                "index": index,
                "game_id": task.game_id,
                "split": task.split,
                "task_type": task.task_type,
                "path": task.path,
                "seed": self.seed,
            },
        }
