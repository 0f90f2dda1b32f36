"use strict";
// Draws the figures in the colours of the page, redraws them when the colours change, and adds buttons to copy code.
(async () => {
  const root = document.documentElement;

  for (const box of document.querySelectorAll(".code")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy: " + box.dataset.label);
    button.addEventListener("click", async () => {
      const code = box.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        // pages opened from a file may be refused the clipboard: select the text and ask the document
        getSelection().selectAllChildren(code);
        if (!document.execCommand("copy")) return;
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    box.append(button);
  }

  // light or dark: as in the system, until the reader chooses
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const theme = document.querySelector(".theme");
  const named = () => theme.setAttribute("aria-pressed", String(isDark()));
  theme.hidden = false;
  named();

  // on a telephone only the first figures of each chapter are open, and none beside a visible table with the same data
  const figured = [...document.querySelectorAll("section")].flatMap((each) =>
    [...each.querySelectorAll(".figures")].slice(each.classList.contains("tabled") ? 0 : 1));
  for (const each of figured) each.classList.add("foldable");
  const fold = () => figured.forEach((each) => (each.open = innerWidth > 480 || root.classList.contains("paper")));
  fold();

  const boxes = [...document.querySelectorAll(".plot")];
  const figures = boxes.map((box) => JSON.parse(box.nextElementSibling.textContent));
  let draw = () => {};
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    named();
    draw();
  });
  dark.addEventListener("change", () => { named(); draw(); });
  if (!boxes.length) return;

  const packed = atob(document.getElementById("plotly").textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);

  // plotly cannot read CSS properties or light-dark pairs: the browser resolves them
  const probe = document.createElement("i");
  root.append(probe);
  function property(name) {
    const text = getComputedStyle(root).getPropertyValue(name).trim();
    if (!text.includes("(")) return text;
    probe.style.color = text;
    return getComputedStyle(probe).color;
  }

  function resolved(value) {
    if (typeof value === "string") {
      const name = /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return name ? property(name[1]) : value;
    }
    if (Array.isArray(value)) return value.map(resolved);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item)]));
  }

  draw = () => {
    boxes.forEach((box, i) => {
      if (box.closest("details:not([open])")) return; // drawn once it is opened
      const { data, layout } = resolved(figures[i]);
      layout.width = box.clientWidth;
      if (layout.meta && layout.width < 480) layout.height = layout.meta.narrow;
      Plotly.react(box, data, layout, { displayModeBar: false, doubleClick: false });
    });
  };

  draw();
  let width = innerWidth;
  addEventListener("resize", () => {
    // a phone's address bar changes the height alone
    if (innerWidth !== width && !root.classList.contains("paper")) {
      if (innerWidth > 480 !== width > 480) fold();
      draw();
    }
    width = innerWidth;
  });
  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", () => {
    if (folded.open && folded.querySelector(".plot")) draw();
  });
  addEventListener("beforeprint", () => { root.classList.add("paper"); fold(); draw(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); fold(); draw(); });
})();
