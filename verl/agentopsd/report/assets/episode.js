// One episode: its facts, the belief over its turns, and every turn with its numbers.

// Fills the page unless, while the chunk was opened, another episode was chosen (isWanted); then null.
async function showEpisode(i, table, list, bound, isWanted) {
  const article = $("#episode");
  const detail = (await cached(`details-${table.chunk[i]}`))[table.offset[i]];
  if (!isWanted()) return null;
  const turns = detail.turns;
  const scored = turns.some((turn) => turn.w !== undefined);
  turns.forEach((turn, k) => (turn.before = k ? turns[k - 1].B : detail.prior));
  const state = { turn: -1 };

  const items = turns.map((turn, k) => turnItem(turn, k));
  const plot = scored ? beliefPlot(turns, detail.prior, bound, chooseTurn) : null;
  const parts = [
    head(),
    facts(),
    siblings(),
    scored ? plot.node : el("p", { class: "fine" }, whyNoCredit()),
    opening(),
    el("div", { class: "section-head" }, el("h3", { title: "each turn: the action, then what the game answered" }, count(turns.length, "turn")), scored ? weightLegend(bound, table.columns.advantage[i]) : null, gapsButton()),
    turns.some((turn) => turn.gaps) ? el("p", { class: "fine" }, `Tokens: log-prob with the skill less without, in nats; full colour at ±${FULL_GAP}.`) : null,
    el("ol", { class: "turns" }, items),
  ];
  article.replaceChildren(...parts.filter(Boolean));
  plot?.draw();
  return { step: (by) => chooseTurn(Math.max(0, Math.min(turns.length - 1, state.turn + by))), tokens: () => toggleTokens(Math.max(0, state.turn)), redraw: () => plot?.draw() };

  function head() {
    const [before, after] = [list.neighbour(i, -1), list.neighbour(i, 1)];
    const link = (at, label) => (at === undefined ? el("span", { class: "button off" }, label) : el("a", { class: "button", href: table.route[at] }, label));
    return el(
      "div",
      { class: "episode-head" },
      el("nav", { "aria-label": "Episodes" }, el("a", { class: "button", href: "#/episodes", id: "back" }, "← All episodes"), link(before, "‹ Previous"), link(after, "Next ›")),
      el("h2", { id: "episode-title", tabindex: "-1" }, plainName(table.text("task_type", i)), " ", outcomeBadge(table, i)),
      el("p", { class: "id" }, visible(table.text("game_id", i))),
    );
  }

  function facts() {
    const c = table.columns;
    const entries = [
      ["Update", c.step[i]],
      ["Played in", visible(table.text("phase", i)) + (table.text("split", i) === table.text("phase", i) ? "" : `, ${visible(table.text("split", i))}`)],
      ["Turns", `${turns.length}, ${short(c.invalid[i])} invalid`],
      ["Ended by", c.error[i] ? "an environment error" : detail.truncated_by ? visible(detail.truncated_by).replaceAll("_", " ") : c.won[i] ? "winning" : "the game"],
      ["Reward", detail.reward === null ? null : short(detail.reward)],
      ["Advantage A", c.advantage[i] === null ? null : signed(c.advantage[i], 3)],
      ["Group won", c.rate[i] === null ? null : percent(c.rate[i])],
      ["Belief before, B₀", detail.prior === null ? null : probability(detail.prior)],
      ["Tokens", `${detail.action_tokens} of actions, ${detail.response_tokens} of response, ${detail.prompt_tokens} of prompt`],
      ["Seconds", `${short(detail.seconds)} (${short(detail.gen_seconds)} generating, ${short(detail.env_seconds)} in the game)`],
      ["Weights version", detail.weights_version],
      ["Seed", detail.seed],
      ["Policy's prompt", detail.skill ? "with skill (a control)" : null],
      ["Environment error", detail.env_error ? visible(detail.env_error) : null],
    ];
    return el("dl", { class: "facts" }, entries.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  }

  // The episodes of the same game that set this one's advantage.
  function siblings() {
    const group = table.columns.group[i];
    if (!table.texts.group[group]) return null;
    const members = [];
    for (let j = 0; j < table.n; j++) {
      if (table.columns.group[j] === group && table.columns.step[j] === table.columns.step[i] && table.columns.phase[j] === table.columns.phase[i]) members.push(j);
    }
    if (members.length < 2) return null;
    const link = (j, at) => {
      const label = `${at + 1}: ${outcome(table, j)}, ${short(table.columns.turns[j])} turns`;
      return el("a", { class: `member ${outcome(table, j)}`, href: table.route[j], title: label, "aria-label": label, "aria-current": j === i ? "true" : null }, short(table.columns.turns[j]));
    };
    return el("nav", { class: "group", "aria-label": "Episodes of the same group" }, el("span", {}, `Group of ${members.length}, turns each:`), members.map(link));
  }

  function whyNoCredit() {
    if (table.columns.advantage[i] === 0) return "No credit: the advantage is 0 (all of the group won, or none did), so the teacher did not read this episode.";
    if (table.columns.error[i]) return "No credit: the episode was lost to the environment.";
    return table.columns.advantage[i] === null ? "No credit: only training episodes have an advantage to share out." : "No credit was recorded for this episode.";
  }

  function opening() {
    if (!detail.messages.length) return null;
    return el("details", { class: "opening" }, el("summary", {}, "Opening prompt, as the policy saw it"), detail.messages.map(([role, content]) => [el("h4", {}, visible(role)), el("pre", {}, visible(content))]));
  }

  function gapsButton() {
    if (!turns.some((turn) => turn.gaps)) return null;
    return el("button", { type: "button", id: "all-tokens", "aria-pressed": "false", click: async (event) => {
      const open = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(open));
      for (let k = 0; k < turns.length; k++) if (turns[k].gaps) await toggleTokens(k, open);
    } }, "Tokens of all turns");
  }

  function turnItem(turn, k) {
    const colour = tint(turn.w, bound);
    const numbers = [
      ["e", "evidence: log-prob of the action with the skill less without, summed over its tokens", signed(turn.e, 2)],
      ["B", "belief in success before and after this turn", `${probability(turn.before)} → ${probability(turn.B)}`],
      ["ΔB", "movement of the belief", movement(turn.dB)],
      ["w", "weight of this turn", fixed(turn.w, 3), "weight"],
      ["Ã", "advantage of this turn's tokens: A shared out by weight", signed(turn.advantage, 3)],
    ];
    return el(
      "li",
      { id: `turn-${k + 1}`, class: `turn ${colour.class}`, "--strength": colour["--strength"], tabindex: "-1", focus: () => mark(k) },
      el("span", { class: "k" }, k + 1),
      el(
        "div",
        { class: "text" },
        el("p", { class: "action" }, el("span", { class: "visually-hidden" }, "Action: "), el("code", {}, visible(turn.command) || el("em", {}, "no action")), turn.valid ? null : el("span", { class: "badge invalid" }, turn.well_formed ? "invalid" : "not an action")),
        turn.text === undefined ? null : el("details", { class: "raw" }, el("summary", {}, "Full answer"), el("pre", {}, visible(turn.text))),
        el("p", { class: "observation" }, el("span", { class: "visually-hidden" }, "Observation: "), visible(turn.observation)),
        el("div", { class: "tokens", hidden: true }),
      ),
      el("div", { class: "side" },
        turn.w === undefined ? null : el("dl", { class: "numbers" }, numbers.map(([name, hint, value, kind]) => el("div", { class: kind ?? null, title: hint }, el("dt", {}, name), el("dd", {}, value)))),
        turn.gaps ? el("button", { type: "button", class: "show-tokens", "aria-expanded": "false", click: () => toggleTokens(k) }, count(turn.tokens, "token")) : el("span", { class: "fine" }, turn.tokens === null ? "" : count(turn.tokens, "token")),
      ),
    );
  }

  async function toggleTokens(k, open) {
    const box = $(".tokens", items[k]);
    const button = $(".show-tokens", items[k]);
    if (!button) return;
    open = open ?? box.hidden;
    if (open && !box.hasChildNodes()) box.append(...tokenStrip((await cached(`gaps-${table.chunk[i]}`))[table.offset[i]][k]));
    box.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
  }

  function mark(k) {
    state.turn = k;
    plot?.mark(k);
  }

  function chooseTurn(k) {
    items[k]?.focus({ preventScroll: true });
    items[k]?.scrollIntoView({ block: "center" });
  }
}

const movement = (value) => (value === undefined || value === null ? "–" : value !== 0 && Math.abs(value) < 0.0005 ? (value > 0 ? "+" : "") + short(value, 2) : signed(value, 3));

function weightLegend(bound, advantage) {
  const steps = [-1, -0.5, 0, 0.5, 1].map((t) => 1 + t * bound);
  return el("p", { class: "weight-legend" }, "Weight ", steps.map((w) => el("span", { ...tint(w, bound), class: `chip ${tint(w, bound).class}` }, short(w))), el("span", { class: "fine" }, advantage < 0 ? "heavier turns take more of the blame" : "heavier turns take more of the merit"));
}

const FULL_GAP = 3;

function tokenStrip(found) {
  const { gaps, texts } = found;
  const tokens = gaps.map((gap, at) => {
    const text = texts ? visible(texts[at]).replace(/^ /, "\u2423").replaceAll("\n", "↵") : `${at + 1}`;
    return el("span", { class: `token ${gap > 0 ? "up" : "down"}`, "--strength": Math.min(1, Math.abs(gap ?? 0) / FULL_GAP).toFixed(3) }, el("span", { class: "piece" }, text), el("span", { class: "gap" }, signed(gap, 2)));
  });
  return [el("div", { class: "strip" }, tokens), texts ? null : el("p", { class: "fine" }, "Numbered, for the tokens' texts are not known.")].filter(Boolean);
}

// Belief after each turn above, the turn's weight below; in log-odds, a saturated belief still moves.
function beliefPlot(turns, prior, bound, choose) {
  const K = turns.length;
  const plot = el("svg", { role: "img", "aria-label": `Belief over ${count(K, "turn")}, from ${probability(prior)} to ${probability(turns[K - 1].B)}` });
  const read = el("p", { class: "legend" });
  const log = el("input", { type: "checkbox", id: "log-odds", change: draw });
  const node = el("figure", { class: "panel belief" }, el("figcaption", {}, "Belief and weight of each turn"), el("label", { class: "check" }, log, " belief in log-odds"), plot, read);
  const curve = [prior, ...turns.map((turn) => turn.B ?? null)];
  const logit = (p) => (p === null ? null : Math.max(-40, Math.min(40, Math.log(Math.max(p, 1e-300)) - Math.log1p(-Math.min(p, 1 - 2 ** -53)))));
  const marks = el("g");
  let x, y, bottom, chosen = -1;

  function draw() {
    const width = Math.max(node.clientWidth - 24, 240);
    const left = 44, right = 12, top = 10, upper = 150, gap = 26, lower = 60;
    bottom = top + upper + gap + lower;
    const values = log.checked ? curve.map(logit) : curve;
    const known = values.filter((value) => value !== null);
    let [low, high] = log.checked ? [Math.min(...known), Math.max(...known)] : [0, 1];
    if (!(high > low)) [low, high] = [low - 1, high + 1];
    x = (k) => left + (k / K) * (width - left - right);
    y = (value) => top + upper - ((value - low) / (high - low)) * upper;
    const middle = top + upper + gap + lower / 2;
    const w = (weight) => middle - (Math.max(-1, Math.min(1, (weight - 1) / bound)) * lower) / 2;
    plot.setAttribute("viewBox", `0 0 ${width} ${bottom + 18}`);
    plot.setAttribute("width", width);
    plot.setAttribute("height", bottom + 18);
    plot.replaceChildren();
    const label = (text, at, anchor = "end") => el("text", { class: "tick", x: anchor === "end" ? left - 6 : at[0], y: anchor === "end" ? at + 3.5 : at[1], "text-anchor": anchor }, text);
    for (const tick of ticks(low, high, log.checked ? 4 : 2)) {
      plot.append(el("line", { class: "grid-line", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }), label(log.checked ? signed(tick, 0) : short(tick), y(tick)));
    }
    for (const weight of [1 - bound, 1, 1 + bound]) {
      plot.append(el("line", { class: "grid-line", x1: left, x2: width - right, y1: w(weight), y2: w(weight) }), label(`w ${short(weight)}`, w(weight)));
    }
    const every = Math.max(1, Math.ceil(K / Math.max(4, Math.floor(width / 45))));
    for (let k = 0; k <= K; k += every) plot.append(label(k === 0 ? "start" : k, [x(k), bottom + 14], "middle"));
    let path = "";
    values.forEach((value, k) => (path += value === null ? "" : `${path ? "L" : "M"}${x(k).toFixed(1)},${y(value).toFixed(1)}`));
    plot.append(el("path", { class: "line strong", d: path, "--colour": "var(--muted)" }));
    if (values[0] !== null) plot.append(el("circle", { class: "point plain", cx: x(0), cy: y(values[0]), r: 4 }));
    const half = Math.max(1.5, Math.min(9, (x(1) - x(0)) * 0.32));
    turns.forEach((turn, k) => {
      const colour = tint(turn.w, bound);
      if (values[k + 1] !== null) plot.append(el("circle", { ...colour, class: `point ${colour.class}`, cx: x(k + 1), cy: y(values[k + 1]), r: K > 60 ? 3 : 4.5 }));
      if (turn.w !== undefined) {
        const [from, to] = [w(1), w(turn.w)].sort((a, b) => a - b);
        plot.append(el("rect", { ...colour, class: `weight-bar ${colour.class}`, x: x(k + 1) - half, width: 2 * half, y: from, height: Math.max(1, to - from) }));
      }
    });
    plot.append(marks);
    mark(chosen);
  }

  function mark(k) {
    chosen = k;
    const turn = turns[k];
    marks.replaceChildren();
    if (!turn) {
      read.replaceChildren("Point at a turn to read it; click to go to it.");
      return;
    }
    marks.append(el("line", { class: "cursor", x1: x(k + 1), x2: x(k + 1), y1: 4, y2: bottom }));
    read.replaceChildren(el("span", { class: "when" }, `turn ${k + 1}`), el("span", {}, el("code", {}, visible(turn.command).slice(0, 80))), ...[["e", signed(turn.e, 2)], ["B", `${probability(turn.before)} → ${probability(turn.B)}`], ["w", fixed(turn.w, 3)]].map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))));
  }

  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    return Math.max(0, Math.min(K - 1, Math.round(((at - x(0)) / (x(K) - x(0))) * K) - 1));
  };
  plot.addEventListener("pointermove", (event) => mark(nearest(event)));
  plot.addEventListener("click", (event) => choose(nearest(event)));
  return { node, draw, mark };
}
