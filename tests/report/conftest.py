"""Runs of a few episodes, and a headless Chromium that opens reports from disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from verl.agentopsd.evaluation.records import EpisodeRecord, Turn

TYPES = ("pick_and_place_simple", "look_at_obj_in_light")


class Browser:
    """One page of a headless Chromium, driven over the DevTools protocol with real mouse and keyboard events."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._last = socket, 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            self._note(message)
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, file: Path, fragment: str = "") -> None:
        """Opens a file from disk and waits until its script has run."""
        self.call("Page.navigate", url="about:blank")
        self.requests, self.errors = [], []
        self.call("Page.navigate", url=file.resolve().as_uri() + fragment)
        self.wait("document.documentElement.dataset.ready === 'yes' || !document.querySelector('#problem').hidden")

    def js(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not self.js(f"Boolean(document.querySelector('#problem') && ({expression}))"):
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What a reader sees of the first element."""
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        return self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => (e.innerText ?? e.textContent).trim())"
        )

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        """Clicks the middle of an element, which must be what lies there."""
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); const x = b.x + b.width / 2, y = b.y + b.height / 2;"
            "const hit = document.elementFromPoint(x, y);"
            "return {x, y, hit: e.contains(hit) || hit.contains(e), what: hit.outerHTML.slice(0, 200)}; })()"
        )
        assert box["hit"], f"{selector} is covered by {box['what']}"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box["x"], y=box["y"], button="left", clickCount=1)

    def press(self, key: str, code: int = 0) -> None:
        """Presses a key by its DOM name; ``code`` is the virtual key of one that types nothing."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = code or {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39}.get(key, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def media(self, **features: str) -> None:
        """Emulates media features, e.g. ``prefers_color_scheme='dark'``; nothing given resets."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)


def _chromium() -> str:
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    pytest.fail(
        "Chromium is not installed, so the report cannot be opened; run 'apt-get install -y chromium' "
        "or set CHROMIUM to the program",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Browser]]:
    """Opens a fresh page of one browser process."""
    profile = tmp_path_factory.mktemp("chromium")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    log = (profile / "log.txt").open("wb")
    command = [_chromium(), *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        address, until = profile / "DevToolsActivePort", time.monotonic() + 90
        while not (address.exists() and len(address.read_text().split()) == 2):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"Chromium did not start: {(profile / 'log.txt').read_text()[-2000:]}", pytrace=False)
            time.sleep(0.05)
        port, path = address.read_text().split()

        def page() -> Browser:
            with connect(f"ws://127.0.0.1:{port}{path}", proxy=None) as root:
                root.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
                while "result" not in (answer := json.loads(root.recv(timeout=60))):
                    pass
            target = answer["result"]["targetId"]
            url = f"ws://127.0.0.1:{port}/devtools/page/{target}"
            return Browser(sockets.enter_context(connect(url, proxy=None, max_size=None)))

        with ExitStack() as sockets:
            yield page
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


@pytest.fixture
def browser(chromium: Callable[[], Browser]) -> Browser:
    page = chromium()
    page.resize(1280, 900)
    return page


def turn(command: str = "look", observation: str = "You see nothing special.", **values: Any) -> Turn:
    return Turn(
        text=values.pop("text", command), command=command, well_formed=True, valid=values.pop("valid", True),
        observation=observation, tokens=values.pop("tokens", 2), **values,
    )  # fmt: skip


def episode(step: int = 1, place: int = 0, **values: Any) -> EpisodeRecord:
    """A scored training episode of two turns; ``place`` counts within the step, even ones are won."""
    won, kind = place % 2 == 0, TYPES[place // 2 % 2]
    turns = [
        turn("go to desk 1", "On the desk 1, you see a pen 1.", e=1.0, B=0.73, dB=0.23, w=1.2, advantage=1.1,
             gaps=[0.75, 0.25], logprob_sum=-1.5, teacher_logprob_sum=-0.5),
        turn("eat pen 1", "Nothing happens.", valid=False, e=-2.0, B=0.25, dB=-0.48, w=0.8, advantage=0.9,
             gaps=[-1.0, -1.0], logprob_sum=-1.0, teacher_logprob_sum=-3.0),
    ]  # fmt: skip
    made = EpisodeRecord(
        run="r", step=step, phase="train", split="train", game_id=f"train/{kind}-Pen-{place // 4}/trial_{place % 4}",
        task_type=kind, seed=7, won=won, num_turns=2, invalid=1, truncated=not won, turns=turns, group=f"{step}-0",
        messages=[{"role": "user", "content": "You are in a room."}], reward=float(won), success_rate=0.5, prior=0.5,
        advantage=1.0 if won else -1.0, action_tokens=4, prompt_tokens=5, response_tokens=9,
    )  # fmt: skip
    return replace(made, **values)


def write_run(folder: Path, records: dict[str, list[EpisodeRecord]], steps: int = 3) -> Path:
    """A run directory with ``records`` by file name, and metrics of so many updates."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, episodes in records.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(e.to_json() + "\n" for e in episodes), encoding="utf-8")
    (folder / "config.yaml").write_text(
        "actor_rollout_ref: {model: {path: some/model}}\nalgorithm: {adv_estimator: agentopsd}\n"
        "agentopsd: {lambda: 0.5, gamma: 0.95, bound: 0.2}\n"
    )
    (folder / "versions.json").write_text('{"verl": "0.9.1"}')
    lines = [
        {"step": step, "data": {
            "group/success_rate": step / 10, f"group/success_rate/{TYPES[0]}": step / 10, "group/zero_adv_frac": 0.25,
            "credit/saturated_frac": 0.9, "credit/belief_last_mean": 0.02, "timing_s/gen": 2.0, "timing_s/step": 3.0,
        }}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two updates of eight episodes."""
    records = {f"rollouts/{step:06d}.jsonl": [episode(step, place) for place in range(8)] for step in (1, 2)}
    return write_run(tmp_path / "run", records)


@pytest.fixture
def make_episode() -> Callable[..., EpisodeRecord]:
    return episode


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run
