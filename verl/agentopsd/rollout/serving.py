"""What an episode asks of the rollout servers beside sampling: one server for all its turns, and no work for nothing.

verl's client asks the load balancer for a server before every request and tells it afterwards, three calls between
processes per turn; the balancer answers the same server every time, where the episode's prefix is cached. Here it is
asked once per episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient

from verl.agentopsd.rollout.environment import Deadline


class OneServerClient(LLMServerClient):
    """A client of one server, which its owner has acquired and will release."""

    def __init__(self, config: Any, acquired: tuple[str, Any]) -> None:
        super().__init__(config)
        self._acquired = acquired

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return self._acquired

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


@asynccontextmanager
async def one_server(client: Any, request_id: str, deadline: Deadline) -> AsyncIterator[Any]:
    """A client for the episode ``request_id``, whose server is asked for once and given back at the end.

    Any other client than verl's own, and one whose router wants to see every prompt (``rollout.router_config_path``),
    is left as it is.
    """
    if type(client) is not LLMServerClient or OmegaConf.select(
        client.config, "actor_rollout_ref.rollout.router_config_path"
    ):
        yield client
        return
    acquired = await deadline.wait(client._acquire_server(request_id))
    try:
        yield OneServerClient(client.config, acquired)
    finally:
        client._release_server(acquired[0], request_id=request_id)


def request_parameters(server: str) -> dict[str, Any]:
    """Sampling parameters that spare the server ``rollout.name`` what an episode does not use.

    vLLM would decode every token into text, and hand over the whole answer again after each of its tokens.
    """
    if server != "vllm":
        return {}
    from vllm.sampling_params import RequestOutputKind  # takes seconds to import

    return {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
