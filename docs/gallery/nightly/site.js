"use strict";
// The theme, filters, moving in the grid, and reading charts night by night. Nothing is fetched, nothing is sent.
(() => {
  const root = document.documentElement;
  const store = {
    // pages opened from a file may be refused a storage
    get: () => { try { return localStorage.getItem("quantkit-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("quantkit-theme", value); } catch { /* for this page alone */ } },
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = store.get();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  function theme() {
    const button = document.querySelector(".theme");
    const show = () => button.setAttribute("aria-pressed", String(isDark()));
    button.hidden = false;
    show();
    dark.addEventListener("change", show);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      store.set(root.dataset.theme);
      show();
    });
  }

  function filters() {
    const form = document.querySelector(".filters");
    if (!form) return;
    form.hidden = false;
    const tiles = [...document.querySelectorAll(".tile")].map((link) => {
      const [model, recipe, target, runtime, batch] = link.dataset.key.split("|");
      const answer = link.classList[1];
      return { link, words: link.dataset.key.toLowerCase(), facts: { model, recipe, target, runtime, batch, answer } };
    });
    const rows = [...document.querySelectorAll(".row")];
    const groups = [...document.querySelectorAll(".group")];
    const chips = [...form.querySelectorAll("[data-answer]")];
    const selects = [...form.querySelectorAll("select")];
    const shown = form.querySelector(".shown");

    function apply(remember) {
      const answers = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.answer);
      const wanted = selects.filter((select) => select.value).map((select) => [select.name, select.value]);
      const words = form.elements.words.value.toLowerCase().split(/[\s|·]+/).filter(Boolean);
      let count = 0;
      for (const { link, words: text, facts } of tiles) {
        const fits = (!answers.length || answers.includes(facts.answer))
          && wanted.every(([name, value]) => facts[name] === value) && words.every((word) => text.includes(word));
        link.parentElement.hidden = !fits;
        count += fits;
      }
      const filtered = answers.length + wanted.length + words.length > 0;
      for (const row of rows) {
        row.hidden = !row.querySelector(".tile") || ![...row.querySelectorAll(".tile")].some((link) => !link.parentElement.hidden);
        for (const none of row.querySelectorAll(".none")) none.hidden = filtered;
      }
      for (const group of groups) group.hidden = ![...group.querySelectorAll(".row")].some((row) => !row.hidden);
      shown.textContent = filtered ? `${count} of ${tiles.length} cells` : "";
      if (remember) {
        const state = new URLSearchParams([...wanted, ...answers.map((name) => ["answer", name])]);
        if (words.length) state.set("words", words.join(" "));
        // a link to what is shown; files have no history to write to in some browsers
        try { history.replaceState(null, "", state.size ? `#${state}` : "#grid"); } catch { /* as it is */ }
      }
      grid.home();
    }

    const state = new URLSearchParams(location.hash.slice(1));
    for (const chip of chips) chip.setAttribute("aria-pressed", String(state.getAll("answer").includes(chip.dataset.answer)));
    for (const select of selects) if (state.get(select.name)) select.value = state.get(select.name);
    form.elements.words.value = state.get("words") ?? "";
    for (const chip of chips) chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      apply(true);
    });
    form.addEventListener("input", () => apply(true));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      for (const chip of chips) chip.setAttribute("aria-pressed", "false");
      apply(true);
    }));
    addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.target.closest("input, select, textarea")) {
        event.preventDefault();
        form.elements.words.focus();
      }
    });
    const grid = moving();
    apply(false);
  }

  // one stop for the tab key; arrows move among what is shown
  function moving() {
    const grids = [...document.querySelectorAll(".group")];
    document.querySelector(".keyboard").hidden = false;
    const lines = () => grids.flatMap((grid) => [...grid.querySelectorAll(".row")]).filter((row) => !row.hidden)
      .map((row) => [...row.querySelectorAll(".tile")].filter((link) => !link.parentElement.hidden)).filter((line) => line.length);
    let stop = null;
    function rest(link) {
      if (stop) stop.tabIndex = -1;
      stop = link;
      if (stop) stop.tabIndex = 0;
    }
    for (const link of document.querySelectorAll(".tile")) link.tabIndex = -1;
    document.getElementById("grid").addEventListener("keydown", (event) => {
      const link = event.target.closest(".tile");
      if (!link || event.ctrlKey || event.metaKey || event.altKey) return;
      const all = lines();
      const at = all.findIndex((line) => line.includes(link));
      const column = all[at].indexOf(link);
      const pick = (line, place) => all[line]?.[Math.min(place, all[line].length - 1)];
      const next = {
        ArrowRight: () => all[at][column + 1] ?? pick(at + 1, 0),
        ArrowLeft: () => all[at][column - 1] ?? pick(at - 1, Infinity),
        ArrowDown: () => pick(at + 1, column),
        ArrowUp: () => pick(at - 1, column),
        PageDown: () => pick(Math.min(at + 5, all.length - 1), column),
        PageUp: () => pick(Math.max(at - 5, 0), column),
        Home: () => (event.ctrlKey ? all[0][0] : all[at][0]),
        End: () => all[at][all[at].length - 1],
      }[event.key];
      if (!next) return;
      event.preventDefault();
      const found = next();
      if (found) { rest(found); found.focus(); }
    });
    document.getElementById("grid").addEventListener("focusin", (event) => {
      const link = event.target.closest(".tile");
      if (link) rest(link);
    });
    return { home: () => rest(lines()[0]?.[0] ?? null) };
  }

  // a chart is read like a slider: a place, and what is told of it
  function charts() {
    const days = document.getElementById("days");
    const x = days ? JSON.parse(days.textContent) : [];
    for (const figure of document.querySelectorAll(".chart")) {
      const data = figure.querySelector("script");
      if (!data) continue;
      const { rows, none } = JSON.parse(data.textContent);
      const plane = figure.querySelector(".plane");
      const drawing = figure.querySelector(".drawing");
      const cursor = document.createElement("i");
      cursor.className = "cursor";
      cursor.hidden = true;
      drawing.append(cursor);
      const line = document.createElement("p");
      line.className = "readout";
      line.textContent = "\u00a0";
      figure.append(line);
      let at = x.length - 1;
      const name = plane.getAttribute("aria-label");
      const values = { role: "slider", tabindex: 0, "aria-label": name, "aria-valuemin": 1, "aria-valuemax": x.length };
      for (const [key, value] of Object.entries(values)) plane.setAttribute(key, value);
      const told = (place) => rows.filter(([, texts]) => texts[place]).map(([label, texts]) => (label ? `${texts[place]} ${label}` : texts[place])).join(", ") || none;
      function show(place, visible = true) {
        at = Math.max(0, Math.min(place, x.length - 1));
        cursor.style.left = `${(100 * (at + 0.5)) / x.length}%`;
        cursor.hidden = !visible;
        const text = `${x[at]}: ${told(at)}`;
        line.textContent = visible ? text : "\u00a0";
        plane.setAttribute("aria-valuenow", at + 1);
        plane.setAttribute("aria-valuetext", text);
      }
      show(at, false);
      drawing.addEventListener("pointermove", (event) => {
        const box = drawing.getBoundingClientRect();
        show(Math.floor((x.length * (event.clientX - box.left)) / box.width));
      });
      plane.addEventListener("focus", () => show(at, plane.matches(":focus-visible")));
      plane.addEventListener("blur", () => show(at, false));
      plane.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        show(at + step);
      });
    }
  }

  addEventListener("DOMContentLoaded", () => { theme(); filters(); charts(); });
})();
