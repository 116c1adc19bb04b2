// Training curves: small multiples over the updates, one cursor for all of them.

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c0"];
const plainName = (text) => visible(text).replaceAll("_", " ");

// verl's names of the stages of an update, in words; others are shown as they are.
const STAGES = {
  gen: "rollout", old_log_prob: "old log-probs", ref: "reference log-probs", adv: "teacher and credit", update_actor: "policy update",
  update_weights: "weights to the rollout engine", testing: "validation", save_checkpoint: "checkpoint",
};

// The panels of a run; those without a value are left out.
function panelGroups(names) {
  const under = (prefix) => names.filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length));
  const types = [...new Set([...under("group/success_rate/"), ...under("val/success_rate/")])].sort();
  const stages = under("timing_s/").filter((stage) => stage !== "step");
  const share = { format: percent, low: 0, high: 1 };
  const success = (suffix) => [
    { metric: `group/success_rate${suffix}`, name: "rollouts", colour: "--c0", join: suffix !== "" },
    { metric: `val/success_rate${suffix}`, name: "validation", colour: "--c1", sparse: true },
  ];
  return [
    ["Success", [
      { title: "All task types", ...share, lines: success(""), band: ["val/success_low", "val/success_high"] },
      ...types.map((type) => ({ title: plainName(type), ...share, lines: success(`/${type}`) })),
    ]],
    ["Learning signal", [
      { title: "Groups with zero advantage", ...share, lines: [
        { metric: "group/zero_adv_frac", name: "all", colour: "--c0" },
        { metric: "group/zero_adv_frac_all_fail", name: "every episode failed", colour: "--c2" },
        { metric: "group/zero_adv_frac_all_success", name: "every episode won", colour: "--c3" },
      ] },
      { title: "Reward", lines: [
        { metric: "group/reward_mean", name: "mean" }, { metric: "group/reward_std", name: "sd", colour: "--c0" },
      ] },
      { title: "Teacher gap", unit: "nats / token", lines: [
        { metric: "teacher/gap_mean", name: "mean" }, { metric: "teacher/gap_abs_mean", name: "mean size", colour: "--c2" },
      ] },
      { title: "Episodes the teacher read", low: 0, lines: [
        { metric: "teacher/rows_scored", name: "scored" }, { metric: "teacher/rows_skipped", name: "skipped, A = 0", colour: "--c0" },
      ] },
    ]],
    ["Credit", [
      { title: "Evidence e", unit: "nats / turn", lines: [
        { metric: "credit/evidence_mean", name: "mean" }, { metric: "credit/evidence_abs_mean", name: "mean size", colour: "--c2" },
      ] },
      { title: "Belief B", ...share, format: probability, lines: [
        { metric: "credit/belief_first_mean", name: "after the first turn" }, { metric: "credit/belief_last_mean", name: "after the last", colour: "--c2" },
      ] },
      { title: "Saturated beliefs", ...share, lines: [{ metric: "credit/saturated_frac", name: "share of turns", colour: "--c2" }] },
      { title: "Movement of belief |ΔB|", low: 0, lines: [{ metric: "credit/delta_b_abs_mean", name: "mean" }] },
      { title: "Weights w", lines: [{ metric: "credit/weight_mean", name: "mean" }], band: ["credit/weight_min", "credit/weight_max"] },
      { title: "Weights at the bound", ...share, lines: [{ metric: "credit/weight_clip_frac", name: "share of turns" }] },
      { title: "Mixing λ", low: 0, lines: [{ metric: "credit/lambda", name: "λ" }] },
    ]],
    ["Policy update", [
      { title: "Clipped ratio", format: percent, low: 0, lines: [
        { metric: "actor/pg_clipfrac", name: "share of tokens" }, { metric: "actor/pg_clipfrac_lower", name: "lower", colour: "--c0" },
      ] },
      { title: "KL", unit: "nats / token", lines: [
        { metric: "actor/ppo_kl", name: "to the rollout policy" }, { metric: "actor/kl_loss", name: "to the reference", colour: "--c2" },
      ] },
      { title: "Entropy", unit: "nats / token", low: 0, lines: [{ metric: "actor/entropy", name: "policy" }] },
      { title: "Gradient norm", low: 0, lines: [{ metric: "actor/grad_norm", name: "before clipping" }] },
    ]],
    ["Rollout", [
      { title: "Rollout to actor gap", unit: "nats / token", log: true, lines: [
        { metric: "rollout/logprob_gap_abs_mean", name: "mean" }, { metric: "rollout/logprob_gap_abs_max", name: "largest", colour: "--c2" },
      ] },
      { title: "Turns", low: 0, lines: [
        { metric: "env/turns_mean", name: "rollouts" }, { metric: "val/turns_mean", name: "validation", colour: "--c2", sparse: true },
      ] },
      { title: "Invalid actions", ...share, lines: [
        { metric: "env/invalid_frac", name: "rollouts", colour: "--c0" }, { metric: "val/invalid_frac", name: "validation", colour: "--c1", sparse: true },
      ] },
      { title: "Episodes cut off", ...share, lines: [
        { metric: "env/truncated_frac", name: "rollouts", colour: "--c0" }, { metric: "val/truncated_frac", name: "validation", colour: "--c1", sparse: true },
      ] },
      { title: "Action tokens per second", low: 0, lines: [{ metric: "rollout/tokens_per_second", name: "rollouts" }] },
      { title: "Slowest episode ÷ mean", low: 0, lines: [{ metric: "rollout/straggler_ratio", name: "ratio" }] },
    ]],
    ["Time", [{ title: "Seconds per stage", unit: "s", low: 0, stack: true, total: "timing_s/step", lines: stages.map((stage) => ({ metric: `timing_s/${stage}`, name: STAGES[stage] ?? plainName(stage) })) }]],
  ];
}

function drawCurves(metrics, openStep) {
  const { steps, series } = metrics;
  const names = Object.keys(series).sort();
  if (!steps.length || !names.length) return;
  const first = steps[0];
  const last = Math.max(steps.at(-1), first + 1);
  const panels = [];
  let cursor = null;

  const moveTo = (index) => {
    cursor = index;
    for (const panel of panels) panel.read(index);
  };

  function addPanel(spec, holder) {
    const lines = spec.lines.filter((line) => series[line.metric]?.some((value) => value !== null));
    if (!lines.length) return null;
    if (spec.stack) lines.sort((a, b) => sum(series[b.metric]) - sum(series[a.metric]));
    lines.forEach((line, i) => (line.colour = line.colour ?? COLOURS[Math.min(i, COLOURS.length - 1)]));
    const panel = makePanel({ ...spec, lines }, steps, series, first, last, { moveTo, openStep, cursor: () => cursor });
    holder.append(panel.node);
    panels.push(panel);
    return panel;
  }

  for (const [title, specs] of panelGroups(names)) {
    const grid = el("div", { class: "grid" });
    for (const spec of specs) addPanel(spec, grid);
    if (grid.children.length) $("#panels").append(el("h3", {}, title), grid);
  }
  const any = el("select", { id: "any-metric" }, el("option", { value: "" }, "choose…"), names.map((name) => el("option", { value: name }, visible(name))));
  const holder = el("div", { class: "grid" });
  any.addEventListener("change", () => {
    if (holder.firstChild) panels.pop();
    holder.replaceChildren();
    if (any.value) addPanel({ title: visible(any.value), lines: [{ metric: any.value, name: "value" }] }, holder)?.draw();
  });
  $("#panels").append(el("h3", {}, "Any other metric"), el("label", { class: "any" }, "Metric ", any), holder);

  $("#curves").hidden = false;
  const redraw = () => panels.forEach((panel) => panel.draw());
  redraw();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) redraw();
    width = window.innerWidth;
  });
  return redraw;
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

function makePanel(spec, steps, series, first, last, shared) {
  const format = spec.format ?? short;
  const mayGrow = spec.band || spec.lines.some((line) => line.sparse); // reading an update makes these longer
  const legend = el("p", { class: mayGrow ? "legend tall" : "legend" });
  const plot = el("svg", { role: "img", tabindex: "0", "aria-label": describe(spec, steps, series, format) });
  const node = el("figure", { class: `panel${spec.stack ? " wide" : ""}` }, el("figcaption", {}, spec.title, spec.unit ? el("span", {}, ` ${spec.unit}`) : null), plot, legend);
  const marks = el("g");
  let x = null;
  let y = null;

  function draw() {
    const width = Math.max(node.clientWidth - 20, 200);
    const height = spec.stack ? 170 : 120;
    const left = 46, right = 8, top = 8, bottom = 20;
    const [low, high, yTicks, scale] = yRange(spec, steps, series);
    x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
    y = (value) => height - bottom - ((scale(value) - low) / (high - low)) * (height - top - bottom);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("width", width);
    plot.setAttribute("height", height);
    plot.replaceChildren();
    for (const tick of yTicks) {
      plot.append(
        el("line", { class: "grid-line", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
        el("text", { class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, tickLabel(tick, format)),
      );
    }
    for (const tick of ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
      plot.append(el("text", { class: "tick", x: x(tick), y: height - 5, "text-anchor": "middle" }, tick));
    }
    if (spec.stack) drawStack();
    else {
      if (spec.band && spec.band.every((name) => series[name])) drawBand();
      spec.lines.forEach(drawLine);
    }
    marks.replaceChildren();
    plot.append(marks);
    read(shared.cursor());
  }

  function drawLine(line) {
    const values = series[line.metric];
    let path = "";
    let open = false;
    const present = [];
    values.forEach((value, i) => {
      if (value === null || (spec.log && value <= 0)) {
        if (!line.sparse && !line.join) open = false;
        return;
      }
      path += `${open ? "L" : "M"}${x(steps[i]).toFixed(1)},${y(value).toFixed(1)}`;
      open = true;
      present.push(i);
    });
    plot.append(el("path", { class: `line${line.sparse ? " strong" : ""}`, d: path, "--colour": `var(${line.colour})` }));
    if (line.sparse || present.length === 1) {
      for (const i of present) plot.append(el("circle", { class: "dot", cx: x(steps[i]), cy: y(values[i]), r: 3, "--colour": `var(${line.colour})` }));
    } else {
      // a value between two missing ones may have no line to show it
      const lonely = present.filter((i, at) => present[at - 1] !== i - 1 && present[at + 1] !== i + 1);
      for (const i of lonely) plot.append(el("circle", { class: "dot", cx: x(steps[i]), cy: y(values[i]), r: 1.6, "--colour": `var(${line.colour})` }));
    }
  }

  function drawBand() {
    const [lows, highs] = spec.band.map((name) => series[name]);
    const at = steps.map((_, i) => i).filter((i) => lows[i] !== null && highs[i] !== null);
    if (!at.length) return;
    const edge = (values, order) => order.map((i) => `${x(steps[i]).toFixed(1)},${y(values[i]).toFixed(1)}`).join("L");
    plot.append(el("path", { class: "band", d: `M${edge(highs, at)}L${edge(lows, [...at].reverse())}Z` }));
  }

  function drawStack() {
    const width = Math.max(1, Math.min(14, ((x(last) - x(first)) / (last - first)) * 0.7));
    steps.forEach((step, i) => {
      let base = 0;
      for (const line of spec.lines) {
        const value = series[line.metric][i] ?? 0;
        if (!(value > 0)) continue;
        plot.append(el("rect", { class: "bar", x: x(step) - width / 2, y: y(base + value), width, height: Math.max(0, y(base) - y(base + value)), "--colour": `var(${line.colour})` }));
        base += value;
      }
    });
  }

  // Legend and marks at one update; the latest value of each line without a cursor.
  function read(index) {
    const latest = (values) => values.findLastIndex((value) => value !== null);
    const entries = spec.lines.map((line) => {
      const values = series[line.metric];
      const at = index === null ? latest(values) : line.sparse ? latest(values.slice(0, index + 1)) : index;
      const earlier = index !== null && at >= 0 && at < index ? ` at ${steps[at]}` : "";
      return el("span", {}, el("i", { "--colour": `var(${line.colour})` }), `${line.name} `, el("b", {}, format(values[at])), earlier);
    });
    const total = spec.total && series[spec.total];
    if (total) entries.push(el("span", {}, "step ", el("b", {}, format(total[index ?? latest(total)]))));
    if (spec.band && index !== null && series[spec.band[0]]?.[index] != null) {
      entries.push(el("span", {}, `[${spec.band.map((name) => format(series[name][index])).join(", ")}]`));
    }
    legend.replaceChildren(...entries);
    marks.replaceChildren();
    if (index === null || !x) return;
    marks.append(el("line", { class: "cursor", x1: x(steps[index]), x2: x(steps[index]), y1: 4, y2: spec.stack ? 150 : 100 }));
    marks.append(el("text", { class: "tick at", x: x(steps[index]), y: spec.stack ? 165 : 115, "text-anchor": "middle" }, steps[index]));
    if (spec.stack) return;
    for (const line of spec.lines) {
      const value = series[line.metric][index];
      if (value === null || (spec.log && value <= 0)) continue;
      marks.append(el("circle", { class: "dot", cx: x(steps[index]), cy: y(value), r: 3.5, "--colour": `var(${line.colour})` }));
    }
  }

  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    let best = 0;
    steps.forEach((step, i) => {
      if (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at)) best = i;
    });
    return best;
  };
  plot.addEventListener("pointermove", (event) => shared.moveTo(nearest(event)));
  plot.addEventListener("pointerleave", () => shared.moveTo(null));
  plot.addEventListener("blur", () => shared.moveTo(null));
  plot.addEventListener("click", (event) => shared.openStep(steps[nearest(event)]));
  plot.addEventListener("keydown", (event) => {
    const at = shared.cursor();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) shared.moveTo(Math.max(0, Math.min(steps.length - 1, (at ?? (move > 0 ? -1 : steps.length)) + move)));
    else if (event.key === "Home") shared.moveTo(0);
    else if (event.key === "End") shared.moveTo(steps.length - 1);
    else if (event.key === "Enter" && at !== null) shared.openStep(steps[at]);
    else return;
    event.preventDefault();
  });
  return { node, draw, read };
}

function tickLabel(value, format) {
  if (format === percent) return `${Number((100 * value).toPrecision(3))} %`;
  return format === probability ? String(value) : short(value);
}

// Lowest and highest value to show, round numbers between them, and what a value is before it is placed.
function yRange(spec, steps, series) {
  const shown = [...spec.lines.map((line) => line.metric), ...(spec.band ?? [])].map((name) => series[name] ?? []);
  if (spec.stack) {
    const high = Math.max(...steps.map((_, i) => sum(spec.lines.map((line) => series[line.metric][i]))));
    return [0, high || 1, ticks(0, high || 1), (value) => value];
  }
  const values = shown.flat().filter((value) => value !== null && (!spec.log || value > 0));
  if (spec.log && values.length) {
    const low = Math.floor(Math.log10(Math.min(...values)));
    const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
    const every = Math.ceil((high - low) / 4);
    const decades = [];
    for (let power = low; power <= high; power += every) decades.push(10 ** power);
    return [low, high, decades, (value) => Math.log10(value)];
  }
  let low = spec.low ?? Math.min(...values);
  let high = spec.high ?? Math.max(...values);
  if (!(high > low)) {
    const room = Math.abs(high) || 1;
    [low, high] = spec.low === undefined ? [low - room / 2, high + room / 2] : [low, low + room];
  } else if (spec.high === undefined) {
    const room = (high - low) * 0.06;
    [low, high] = [spec.low === undefined ? low - room : low, high + room];
  }
  return [low, high, ticks(low, high, spec.high === 1 ? 2 : 3), (value) => value];
}

function describe(spec, steps, series, format) {
  const parts = spec.lines.map((line) => {
    const values = series[line.metric];
    const at = values.map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
    return `${line.name} from ${format(values[at[0]])} at update ${steps[at[0]]} to ${format(values[at.at(-1)])} at update ${steps[at.at(-1)]}`;
  });
  return `${spec.title}: ${parts.join("; ")}`;
}
