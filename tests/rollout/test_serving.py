"""An episode asks for its server once; other clients are left as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl.agentopsd.rollout.environment import Deadline, EpisodeTimeout
from verl.agentopsd.rollout.serving import one_server, request_parameters


@dataclass
class Remote:
    """A method of an actor."""

    call: Callable[..., Any]

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        async def answer() -> Any:
            await asyncio.sleep(0)
            return self.call(*args, **kwargs)

        return asyncio.ensure_future(answer())


@dataclass
class Server:
    name: str
    requests: list[list[int]] = field(default_factory=list)

    @property
    def generate(self) -> Remote:
        def sample(*, prompt_ids: list[int], **_: Any) -> TokenOutput:
            self.requests.append(prompt_ids)
            if prompt_ids == [0]:
                raise ConnectionError("refused")
            return TokenOutput(token_ids=[9], extra_fields={"global_steps": 3})

        return Remote(sample)


@dataclass
class Balancer:
    """Alternates between two servers."""

    servers: tuple[Server, Server] = field(default_factory=lambda: (Server("a"), Server("b")))
    asked: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    require_acquire_fields: Remote = field(default_factory=lambda: Remote(list))
    require_release_fields: Remote = field(default_factory=lambda: Remote(list))

    @property
    def acquire_server(self) -> Remote:
        def acquire(request_id: str) -> tuple[str, Server]:
            self.asked.append(request_id)
            server = self.servers[(len(self.asked) - 1) % 2]
            return server.name, server

        return Remote(acquire)

    @property
    def release_server(self) -> Remote:
        return Remote(lambda server_id: self.released.append(server_id))


def client(balancer: Any, router: str | None = None) -> LLMServerClient:
    rollout = {"name": "vllm", "full_determinism": False, "router_config_path": router}
    return LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)


async def ask(one: Any, prompt_ids: list[int]) -> TokenOutput:
    return await one.generate(request_id="r", prompt_ids=prompt_ids, sampling_params={})


def test_all_turns_of_an_episode_go_to_one_server_that_is_asked_for_once():
    balancer = Balancer()

    async def episode(name: str) -> None:
        async with one_server(client(balancer), name, Deadline(10)) as one:
            for turn in range(1, 4):
                output = await ask(one, [turn])
                assert output.token_ids == [9] and output.extra_fields["min_global_steps"] == 3
            assert name == "second" or balancer.released == []
        await asyncio.sleep(0.01)  # nobody waits for the release

    async def main() -> None:
        await episode("first")
        await episode("second")

    asyncio.run(main())
    assert balancer.asked == ["first", "second"]
    assert balancer.released == ["a", "b"]
    assert [server.requests for server in balancer.servers] == [[[1], [2], [3]]] * 2


def test_a_server_is_given_back_also_when_it_fails():
    balancer = Balancer()

    async def main() -> None:
        with pytest.raises(ConnectionError, match="refused"):
            async with one_server(client(balancer), "r", Deadline(10)) as one:
                await ask(one, [0])
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert balancer.released == ["a"]


def test_a_balancer_that_does_not_answer_ends_the_episode_in_time():
    class Silent(Balancer):
        @property
        def acquire_server(self) -> Any:
            return SimpleNamespace(remote=lambda **_: asyncio.get_running_loop().create_future())

    async def main() -> None:
        with pytest.raises(EpisodeTimeout):
            async with one_server(client(Silent()), "r", Deadline(0.2)):
                pytest.fail("there is no server")

    asyncio.run(main())


class OtherClient(LLMServerClient):
    """One that routes in its own way."""


@pytest.mark.parametrize(("kind", "router"), [(LLMServerClient, "router.yaml"), (OtherClient, None)])
def test_other_clients_are_left_as_they_are(kind: type[LLMServerClient], router: str | None):
    balancer = Balancer()
    given = kind(client(balancer, router).config, balancer)

    async def main() -> None:
        async with one_server(given, "r", Deadline(10)) as one:
            assert one is given

    asyncio.run(main())
    assert balancer.asked == []


def test_vllm_neither_decodes_nor_repeats_and_others_get_no_parameter_they_do_not_know():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    made = SamplingParams(max_tokens=1, **request_parameters("vllm"))
    assert made.output_kind is RequestOutputKind.FINAL_ONLY and made.detokenize is False
    assert request_parameters("sglang") == {}
