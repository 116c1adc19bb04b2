// The table of episodes: filtered and sorted as columns, shown a page at a time.

const PAGE = 50;
const OUTCOMES = [
  ["all", "All"], ["won", "Won"], ["failed", "Failed"], ["truncated", "Cut off"], ["error", "Env error"],
];

// The packed columns with what is derived from them: chunk and place of each episode, its place within its step.
function openTable(packed) {
  const { columns, texts, sizes, n } = packed;
  const chunk = new Array(n);
  const offset = new Array(n);
  let at = 0;
  sizes.forEach((size, number) => {
    for (let i = 0; i < size; i++, at++) [chunk[at], offset[at]] = [number, i];
  });
  const text = (name, i) => texts[name][columns[name][i]];
  const seen = new Map();
  const routes = new Map();
  const route = new Array(n);
  for (let i = 0; i < n; i++) {
    const place = `${encodeURIComponent(text("phase", i).toWellFormed?.() ?? text("phase", i))}/${columns.step[i]}`;
    const position = (seen.get(place) ?? 0) + 1;
    seen.set(place, position);
    route[i] = `#/${place}/${position}`;
    routes.set(route[i], i);
  }
  return { n, columns, texts, text, chunk, offset, route, routes };
}

const outcome = (table, i) => (table.columns.error[i] ? "error" : table.columns.won[i] ? "won" : "failed");

function outcomeBadge(table, i) {
  const kind = outcome(table, i);
  const label = { won: "won", failed: "failed", error: "env error" }[kind];
  return [el("span", { class: `badge ${kind}` }, label), table.columns.truncated[i] ? el("span", { class: "badge cut" }, "cut off") : null];
}

// Game ids are long: what the folder name of the game says after the split, its task type first.
function gameName(table, i) {
  const parts = table.text("game_id", i).split("/");
  const name = parts.length > 1 ? parts.slice(1).join("/") : parts[0];
  const type = table.text("task_type", i);
  return visible(name.startsWith(`${type}-`) ? name.slice(type.length + 1) : name);
}

function weightRange(table, i, bound) {
  const { w_min: low, w_max: high } = table.columns;
  if (low[i] === null) return "–";
  return [el("span", { ...tint(low[i], bound), class: `chip ${tint(low[i], bound).class}` }, fixed(low[i], 2)), " … ", el("span", { ...tint(high[i], bound), class: `chip ${tint(high[i], bound).class}` }, fixed(high[i], 2))];
}

const COLUMNS = [
  { key: "step", title: "Update", numeric: true, cell: (t, i) => t.columns.step[i] },
  { key: "phase", title: "Played in", text: true, cell: (t, i) => visible(t.text("phase", i)) },
  { key: "task_type", title: "Task type", text: true, cell: (t, i) => plainName(t.text("task_type", i)) },
  { key: "game_id", title: "Game", text: true, cell: (t, i) => el("a", { href: t.route[i], title: visible(t.text("game_id", i)) }, gameName(t, i)) },
  { key: "won", title: "Outcome", cell: outcomeBadge },
  { key: "turns", title: "Turns", numeric: true, cell: (t, i) => short(t.columns.turns[i]) },
  { key: "invalid", title: "Invalid", numeric: true, cell: (t, i) => short(t.columns.invalid[i]) },
  { key: "rate", title: "Group won", hint: "share of the group's episodes that were won: the belief before the first turn", numeric: true, cell: (t, i) => (t.columns.rate[i] === null ? "–" : `${fixed(100 * t.columns.rate[i], 0)} %`) },
  { key: "advantage", title: "A", hint: "advantage of the whole episode, before credit", numeric: true, cell: (t, i) => signed(t.columns.advantage[i], 2) },
  { key: "dB", title: "Largest ΔB", hint: "largest movement of belief in one turn; sorted by size", numeric: true, size: true, cell: (t, i) => signed(t.columns.dB[i], 2) },
  { key: "w_max", title: "Weights", hint: "smallest and largest weight of a turn; sorted by the largest", cell: weightRange },
];

function showTable(table, bound) {
  const state = { rows: [], page: 0, focus: 0, sort: null, down: false };
  const filters = $("#filters");
  const body = $("#table tbody");

  for (const [value, label] of OUTCOMES) {
    $("#filter-outcome").append(el("label", {}, el("input", { type: "radio", name: "outcome", value, checked: value === "all" }), el("span", {}, label)));
  }
  const fill = (id, values, label) => $(id).append(el("option", { value: "" }, "all"), ...values.map((value) => el("option", { value }, label(value))));
  fill("#filter-phase", table.texts.phase.map((_, code) => code), (code) => visible(table.texts.phase[code]));
  // Credit is what one comes for: start with the episodes that have it, and say so in the filter; Reset shows all.
  const withCredit = table.columns.w_max.findIndex((weight) => weight !== null);
  if (withCredit >= 0) $("#filter-phase").value = String(table.columns.phase[withCredit]);
  fill("#filter-step", [...new Set(table.columns.step)].sort((a, b) => a - b), String);
  const types = table.texts.task_type.map((name, code) => [name, code]).sort((a, b) => (a[0] < b[0] ? -1 : 1));
  fill("#filter-task", types.map(([, code]) => code), (code) => plainName(table.texts.task_type[code]));

  const header = $("#table thead tr");
  for (const column of COLUMNS) {
    const button = el("button", { type: "button", title: column.hint ?? null, click: () => sortBy(column) }, column.title);
    header.append(el("th", { scope: "col", class: column.numeric ? "number" : null, "data-key": column.key }, button));
  }

  function sortBy(column) {
    if (state.sort === column && state.down === !column.text) state.down = !state.down;
    else if (state.sort === column) [state.sort, state.down] = [null, false];
    else [state.sort, state.down] = [column, !column.text];
    apply();
  }

  function keep() {
    const { columns, texts } = table;
    const chosen = filters.elements.outcome.value;
    const pick = (id) => ($(id).value === "" ? null : Number($(id).value));
    const [phase, step, task] = [pick("#filter-phase"), pick("#filter-step"), pick("#filter-task")];
    const part = $("#filter-game").value.trim().toLowerCase();
    const games = part ? texts.game_id.map((id) => id.toLowerCase().includes(part)) : null;
    const scored = $("#filter-scored").checked;
    const rows = [];
    for (let i = 0; i < table.n; i++) {
      if (phase !== null && columns.phase[i] !== phase) continue;
      if (step !== null && columns.step[i] !== step) continue;
      if (task !== null && columns.task_type[i] !== task) continue;
      if (games && !games[columns.game_id[i]]) continue;
      if (scored && columns.w_max[i] === null) continue;
      if (chosen === "truncated" ? !columns.truncated[i] : chosen !== "all" && outcome(table, i) !== chosen) continue;
      rows.push(i);
    }
    return rows;
  }

  function apply() {
    state.rows = keep();
    const column = state.sort;
    if (column) {
      const values = table.columns[column.key];
      const of = column.text ? (i) => table.text(column.key, i) : column.size ? (i) => (values[i] === null ? null : Math.abs(values[i])) : (i) => values[i];
      const direction = state.down ? -1 : 1;
      state.rows.sort((i, j) => {
        const [a, b] = [of(i), of(j)];
        if (a === null || b === null) return (a === null) - (b === null) || i - j;
        return a < b ? -direction : a > b ? direction : i - j;
      });
    }
    for (const cell of header.children) {
      const sorted = column && cell.dataset.key === column.key;
      if (sorted) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    state.focus = 0;
    show(0);
  }

  const pages = () => Math.max(1, Math.ceil(state.rows.length / PAGE));

  function show(page) {
    state.page = Math.max(0, Math.min(page, pages() - 1));
    const from = state.page * PAGE;
    const rows = state.rows.slice(from, from + PAGE);
    body.replaceChildren(...rows.map(row));
    if (!rows.length) body.append(el("tr", { class: "none" }, el("td", { colspan: COLUMNS.length }, "No episode passes these filters.")));
    const won = state.rows.filter((i) => outcome(table, i) === "won").length;
    const valid = state.rows.filter((i) => outcome(table, i) !== "error").length;
    $("#count").textContent =
      `${state.rows.length === table.n ? "" : `${state.rows.length.toLocaleString("en")} of `}${count(table.n, "episode")}` +
      (valid ? ` · ${won.toLocaleString("en")} won (${percent(won / valid)})` : "");
    $("#page").textContent = `page ${state.page + 1} of ${pages()}`;
    $("#previous-page").disabled = state.page === 0;
    $("#next-page").disabled = state.page >= pages() - 1;
    $("#pager").hidden = pages() === 1;
  }

  function row(i) {
    const cells = COLUMNS.map((column) => el("td", { class: column.numeric ? "number" : null, "data-key": column.key, "data-title": column.title }, column.cell(table, i, bound)));
    return el("tr", { "data-episode": i, class: outcome(table, i) }, cells);
  }

  // The at-th of the rows that pass, focused and on its page.
  function focus(at) {
    if (!state.rows.length) return;
    state.focus = Math.max(0, Math.min(at, state.rows.length - 1));
    const page = Math.floor(state.focus / PAGE);
    if (page !== state.page) show(page);
    const link = $("a", body.children[state.focus - page * PAGE]);
    link.focus();
    link.closest("tr").scrollIntoView({ block: "nearest" });
  }

  filters.addEventListener("input", apply);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(apply));
  $("#previous-page").addEventListener("click", () => show(state.page - 1));
  $("#next-page").addEventListener("click", () => show(state.page + 1));
  body.addEventListener("click", (event) => {
    const chosen = event.target.closest("tr[data-episode]");
    if (chosen && !event.target.closest("a") && !String(getSelection())) location.hash = table.route[Number(chosen.dataset.episode)];
  });
  body.addEventListener("focusin", (event) => {
    const at = [...body.children].indexOf(event.target.closest("tr"));
    if (at >= 0) state.focus = state.page * PAGE + at;
  });

  $("#episodes").hidden = false;
  apply();
  return {
    state,
    focus,
    show,
    move(by) {
      focus(document.activeElement?.closest("#table tbody tr") ? state.focus + by : state.focus);
    },
    onlyStep(step) {
      filters.reset();
      $("#filter-step").value = String(step);
      apply();
    },
    // The neighbour of an episode in the list as it is filtered and sorted.
    neighbour(i, by) {
      const at = state.rows.indexOf(i);
      return at < 0 ? undefined : state.rows[at + by];
    },
    remember(i) {
      const at = state.rows.indexOf(i);
      if (at >= 0) state.focus = at;
    },
  };
}
