// Opens the page's data, follows the address (#/phase/update/position is an episode) and the keyboard.

async function main() {
  if (typeof DecompressionStream === "undefined") {
    problem("This browser cannot open the data of this page (it lacks DecompressionStream): use Chrome 111, Firefox 113, Safari 16.4 or later.");
    return;
  }
  const { rule, metrics, table: packed } = await inflate("data");
  const table = openTable(packed);
  const weights = [...packed.columns.w_min, ...packed.columns.w_max].filter((weight) => weight !== null);
  const widest = weights.reduce((most, weight) => Math.max(most, Math.abs(weight - 1)), 0);
  const bound = rule.bound ?? (widest || 1);
  let list = null;
  let episode = null;
  const redraw = drawCurves(metrics, (step) => {
    if (!list) return;
    list.onlyStep(step);
    location.hash = "#/episodes";
    toEpisodes();
  });
  if (table.n) list = showTable(table, bound);

  function toEpisodes() {
    $("#episodes").scrollIntoView();
    $("#episodes-title").focus({ preventScroll: true });
  }

  let shown;
  let scrolled = 0;
  async function follow() {
    const i = table.routes.get(location.hash);
    const overview = $("#overview");
    if (i === undefined) {
      const back = shown !== undefined;
      if (/^#\/.+\/.+\/.+/.test(location.hash)) problem("This address names an episode that the report does not hold; here is the whole list.");
      shown = episode = undefined;
      $("#episode").hidden = true;
      $("#episode").replaceChildren();
      overview.hidden = false;
      if (back) {
        redraw?.();
        window.scrollTo(0, scrolled);
        list.focus(list.state.focus);
      } else if (location.hash === "#/episodes" && list) toEpisodes();
      return;
    }
    if (shown === undefined) scrolled = window.scrollY;
    shown = i;
    $("#problem").hidden = true;
    list.remember(i);
    $("#episode").hidden = false;
    overview.hidden = true;
    try {
      const opened = await showEpisode(i, table, list, bound, () => shown === i);
      if (!opened) return;
      episode = opened;
      $("#episode-title").focus({ preventScroll: true });
      window.scrollTo(0, 0);
    } catch (error) {
      problem(`This episode cannot be shown: ${error.message}. Write the report again.`);
    }
  }
  window.addEventListener("hashchange", follow);
  window.addEventListener("resize", () => episode?.redraw());
  await follow();

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("#keys").open) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const inTurns = event.target.closest?.(".turn");
    const inTable = event.target.closest?.("#table tbody");
    const arrows = shown === undefined ? inTable : inTurns;
    const key = arrows ? ({ ArrowDown: "j", ArrowUp: "k" }[event.key] ?? event.key) : event.key;
    const by = { j: 1, k: -1 }[key];
    const pageBy = { n: 1, p: -1 }[key];
    if (key === "?") $("#keys").showModal();
    else if (key === "/" && shown === undefined) $("#filter-game").focus();
    else if (by && shown === undefined) list?.move(by);
    else if (by) episode?.step(by);
    else if (pageBy && shown === undefined) list?.show(list.state.page + pageBy);
    else if (pageBy) {
      const next = list.neighbour(shown, pageBy);
      if (next !== undefined) location.hash = table.route[next];
    } else if (key === "t" && shown !== undefined) episode?.tokens();
    else if (key === "Escape" && shown !== undefined) location.hash = "#/episodes";
    else return;
    event.preventDefault();
  });
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => problem(`This page's data cannot be opened: ${error.message}. Write the report again.`));
