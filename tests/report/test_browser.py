"""The page in a real browser, opened from disk and used with mouse and keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verl.agentopsd.evaluation.records import EpisodeRecord
from verl.agentopsd.report.page import write_report

if TYPE_CHECKING:
    from conftest import Browser

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='hit=2'>{{ 7*7 }}${hit=3}\x00\x1b[2J\u202egnp"
ROWS = "#table tbody tr[data-episode]"
OUTCOME = "#filter-outcome label:nth-of-type({})"  # all, won, failed, cut off, env error


def test_filters_and_one_episode(browser: Browser, run_dir: Path) -> None:
    browser.open(write_report(run_dir).path)
    assert browser.text("#count") == "16 episodes · 8 won (50.0 %)"
    assert browser.count(ROWS) == 16

    browser.click(OUTCOME.format(3))
    assert browser.text("#count") == "8 of 16 episodes · 0 won (0 %)"
    assert set(browser.texts(f"{ROWS} td[data-key=won] .badge:first-child")) == {"failed"}
    browser.click("#filter-game")
    browser.type("Pen-1/trial_3")  # of place 7, which is not won
    assert browser.count(ROWS) == 2
    assert browser.texts(f"{ROWS} td[data-key=step]") == ["1", "2"]

    browser.click(f"{ROWS}:nth-child(2) td[data-key=advantage]")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    assert browser.js("location.hash") == "#/train/2/8"
    assert not browser.js("document.querySelector('#overview').checkVisibility()")
    assert browser.text("#episode-title").startswith("look at obj in light failed")
    assert browser.text("#episode .id") == "train/look_at_obj_in_light-Pen-1/trial_3"
    first, second = "#turn-1", "#turn-2"
    assert browser.text(f"{first} .action code") == "go to desk 1"
    assert browser.text(f"{first} .observation").split("\n")[-1] == "On the desk 1, you see a pen 1."
    assert browser.texts(f"{first} .numbers dd") == ["+1.00", "0.500 → 0.730", "+0.230", "1.200", "+1.100"]
    assert browser.texts(f"{second} .numbers dd") == ["−2.00", "0.730 → 0.250", "−0.480", "0.800", "+0.900"]
    assert browser.texts(f"{first} .badge") == [] and browser.texts(f"{second} .badge") == ["invalid"]
    assert browser.count(".belief .point") == 3 and browser.count(".belief .weight-bar") == 2
    colours = browser.js("['1','2'].map((k) => getComputedStyle(document.querySelector('#turn-'+k)).borderLeftColor)")
    assert colours[0] != colours[1]

    assert not browser.js("document.querySelector('#turn-1 .tokens').checkVisibility()")
    browser.click("#turn-1 .show-tokens")
    browser.wait("document.querySelectorAll('#turn-1 .token').length === 2")
    assert browser.texts("#turn-1 .gap") == ["+0.75", "+0.25"]
    assert browser.count("#turn-2 .token") == 0, "only what was asked for is unpacked"

    browser.click("#back")
    browser.wait("document.querySelector('#overview').checkVisibility()")
    assert browser.count(ROWS) == 2, "the filter stays"
    browser.click("#filters button[type=reset]")
    browser.wait("document.querySelector('#count').innerText === '16 episodes · 8 won (50.0 %)'")
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file://", "data:"))] == []


def test_selects_sorting_and_pages(
    browser: Browser, tmp_path: Path, make_episode: Callable[..., EpisodeRecord], make_run: Callable[..., Path]
) -> None:
    records = {
        f"rollouts/{step:06d}.jsonl": [make_episode(step, place, invalid=place) for place in range(40)]
        for step in (1, 2, 3)
    }
    valid = [
        replace(make_episode(0, place, phase="validation", split="valid_seen", advantage=None, group=""), turns=[])
        for place in range(5)
    ]
    lost = make_episode(3, 41, env_error="it crashed", won=False)
    records["rollouts/000003.jsonl"].append(lost)
    browser.open(write_report(make_run(tmp_path / "run", {**records, "validation/000000.jsonl": valid})).path)
    assert browser.text("#count").startswith("121 of 126 episodes"), "it starts with the episodes that have credit"
    assert browser.count(ROWS) == 50 and browser.text("#page") == "page 1 of 3"
    browser.click("#next-page")
    browser.click("#next-page")
    assert browser.count(ROWS) == 21 and browser.js("document.querySelector('#next-page').disabled")

    def choose(selector: str, label: str) -> None:
        browser.js(
            f"(() => {{ const s = document.querySelector('{selector}');"
            f"s.value = [...s.options].find((o) => o.text === {json.dumps(label)}).value;"
            "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    choose("#filter-step", "2")
    choose("#filter-task", "look at obj in light")
    assert browser.text("#count") == "20 of 126 episodes · 10 won (50.0 %)"
    browser.click("th[data-key=invalid] button")
    assert browser.texts(f"{ROWS} td[data-key=invalid]")[:3] == ["39", "38", "35"]
    assert browser.js("document.querySelector('th[data-key=invalid]').ariaSort") == "descending"
    browser.click("th[data-key=invalid] button")
    assert browser.texts(f"{ROWS} td[data-key=invalid]")[:3] == ["2", "3", "6"]
    browser.click("#filters button[type=reset]")
    browser.wait("document.querySelector('#count').innerText.startsWith('126 episodes')")
    browser.click(OUTCOME.format(5))
    assert browser.count(ROWS) == 1
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelector('#episode .facts')")
    assert "it crashed" in browser.text("#episode .facts")
    choose("#filter-task", "look at obj in light")
    browser.click("#back")
    browser.wait("document.querySelector('#overview').checkVisibility()")
    assert "No episode passes" in browser.text("#table tbody") and browser.errors == []


def test_by_keyboard_alone(browser: Browser, run_dir: Path) -> None:
    browser.open(write_report(run_dir).path)
    focused = "document.activeElement.closest('tr')?.rowIndex"
    browser.press("j")
    browser.press("j")
    assert browser.js(focused) == 2
    browser.press("k")
    assert browser.js(focused) == 1
    browser.press("ArrowDown")
    assert browser.js(focused) == 2
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    assert browser.js("location.hash") == "#/train/1/2"
    browser.press("j")
    browser.press("j")
    assert browser.js("document.activeElement.id") == "turn-2"
    assert browser.text(".belief .legend").startswith("turn 2")
    browser.press("t")
    browser.wait("document.querySelectorAll('#turn-2 .token').length === 2")
    browser.press("n")
    browser.wait("location.hash === '#/train/1/3'")
    browser.wait("document.activeElement.id === 'episode-title'")
    browser.press("Escape")
    browser.wait("document.querySelector('#overview').checkVisibility()")
    assert browser.js(focused) == 3, "back where one was"
    browser.press("/")
    assert browser.js("document.activeElement.id") == "filter-game"
    browser.type("j")  # letters are text in a field
    assert browser.js("document.querySelector('#filter-game').value") == "j"
    browser.press("Escape")
    browser.press("?")
    assert browser.js("document.querySelector('#keys').open")
    unlabelled = browser.js(
        "[...document.querySelectorAll('button, a[href], select, input, svg[tabindex]')].filter((e) => "
        "!(e.innerText?.trim() || e.ariaLabel || e.labels?.[0]?.innerText.trim() || !e.checkVisibility()))"
        ".map((e) => e.outerHTML)"
    )
    assert unlabelled == [] and browser.errors == []


def test_curves_are_read_together_and_lead_to_their_episodes(browser: Browser, run_dir: Path) -> None:
    browser.open(write_report(run_dir).path)
    titles = browser.texts("#panels figcaption")
    assert "All task types" in titles and "Saturated beliefs" in titles and "Seconds per stage s" in titles
    assert "Entropy nats / token" not in titles, "no panel without a value"
    assert "rollouts 30.0 %" in browser.texts("#panels .legend")[0]
    browser.js("document.querySelector('#panels svg').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert "rollouts 20.0 %" in browser.texts("#panels .legend")[0]
    assert set(browser.texts("#panels .tick.at")) == {"2"}
    browser.press("Enter")
    assert browser.text("#count") == "8 of 16 episodes · 4 won (50.0 %)"
    assert set(browser.texts(f"{ROWS} td[data-key=step]")) == {"2"}
    label = browser.js("document.querySelector('#panels svg').ariaLabel")
    assert label == "All task types: rollouts from 10.0 % at update 1 to 30.0 % at update 3"
    assert browser.errors == []


def test_hostile_text_is_shown_as_text(
    browser: Browser, tmp_path: Path, make_episode: Callable[..., EpisodeRecord], make_run: Callable[..., Path]
) -> None:
    record = make_episode()
    turns = [replace(record.turns[0], text=HOSTILE + "!", command=HOSTILE, observation=HOSTILE, gaps=[1.0, -1.0])]
    values: dict[str, Any] = dict.fromkeys(("game_id", "task_type", "split", "phase", "group"), HOSTILE)
    bad = replace(record, turns=turns, messages=[{"role": HOSTILE, "content": HOSTILE}], num_turns=1, **values)
    run = make_run(tmp_path / "run", {"rollouts/000001.jsonl": [bad, bad]})
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 4, "data": {f"group/success_rate/{HOSTILE}": 0.5, HOSTILE: 1.0}}) + "\n")
    browser.open(write_report(run).path)
    browser.click(f"{ROWS}:nth-child(2) a")
    browser.wait("document.querySelectorAll('.turn').length === 1")
    browser.click("#episode .opening summary")
    browser.click("#turn-1 .raw summary")
    browser.click("#turn-1 .show-tokens")
    browser.wait("document.querySelectorAll('.token').length === 2")
    shown = HOSTILE.replace("\x00", "␀").replace("\x1b", "␛").replace("\u202e", "⟨U+202E⟩")
    for selector in ("#turn-1 code", "#turn-1 .observation", "#episode .opening pre", "#episode .id"):
        assert shown in browser.text(selector), selector
    assert browser.text("#turn-1 .raw pre") == shown + "!"
    assert browser.js("window.hit") is None and browser.count("img") == 0
    assert browser.errors == []


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, run_dir: Path) -> None:
    browser.resize(360, 740, phone=True)
    browser.open(write_report(run_dir).path)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert browser.js(fits)
    browser.click(f"{ROWS} a")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    assert browser.js(fits)
    small = browser.js(
        "[...document.querySelectorAll('#episode button, #episode nav a')].filter((e) => "
        "e.getBoundingClientRect().height < 24).map((e) => e.outerHTML)"
    )
    assert small == [], "large enough for a finger"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(browser: Browser, run_dir: Path, scheme: str) -> None:
    browser.media(prefers_color_scheme=scheme)
    browser.open(write_report(run_dir).path, "#/train/1/1")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    ratio = """(() => {
      const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
      const over = (css, ground) => { canvas.fillStyle = ground; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = css;
        canvas.fillRect(0, 0, 1, 1); return canvas.getImageData(0, 0, 1, 1).data; };
      const light = (rgb) => { const [r, g, b] = [...rgb].map((v) => { v /= 255;
        return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
      const style = (e) => getComputedStyle(e);
      const worst = [];
      for (const e of document.querySelectorAll('#turn-1 dt, #turn-1 dd, #turn-1 .observation, #turn-2 .badge, h2')) {
        const turn = e.closest('.turn');
        const tinted = turn ? style(turn).backgroundImage.match(/color\\([^)]*\\)|rgba?\\([^)]*\\)/)[0] : 'transparent';
        const card = over(style(turn ?? document.body).backgroundColor, 'white');
        const ground = over(tinted, `rgb(${card[0]},${card[1]},${card[2]})`);
        const [a, b] = [light(ground), light(over(style(e).color, 'white'))].sort((x, y) => y - x);
        worst.push([(a + .05) / (b + .05), e.outerHTML.slice(0, 60)]);
      }
      return worst.sort((x, y) => x[0] - y[0]);
    })()"""
    contrasts = browser.js(ratio)
    assert len(contrasts) > 10 and contrasts[0][0] >= 4.5, contrasts[:3]


def test_ten_thousand_episodes_open_without_ten_thousand_rows(
    browser: Browser, tmp_path: Path, make_episode: Callable[..., EpisodeRecord], make_run: Callable[..., Path]
) -> None:
    records = {f"rollouts/{s:06d}.jsonl": [make_episode(s, place) for place in range(250)] for s in range(1, 41)}
    written = write_report(make_run(tmp_path / "run", records, steps=40))
    assert written.episodes == 10_000 and written.bytes < 5e6
    browser.open(written.path)
    assert browser.count("*") < 5000
    browser.click("th[data-key=step] button")
    assert browser.texts(f"{ROWS} td[data-key=step]")[0] == "40"
    browser.open(written.path, "#/train/40/250")
    browser.wait("document.querySelectorAll('.turn').length === 2")
    assert browser.text("#episode .id").endswith("Pen-62/trial_1")


def test_an_address_without_an_episode_and_an_empty_run(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    browser.open(write_report(run_dir).path, "#/train/9/1")
    assert "does not hold" in browser.text("#problem") and browser.count(ROWS) == 16
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("{}")
    browser.open(write_report(tmp_path / "empty").path)
    assert "No episodes" in browser.text(".notes")
    assert not browser.js("document.querySelector('#episodes').checkVisibility()") and browser.errors == []
