"use strict";
// Draws the figures in the colours of the page, again when those change, and lets code be copied.
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

  const boxes = [...document.querySelectorAll(".plot")];
  if (!boxes.length) return;
  const figures = boxes.map((box) => JSON.parse(box.nextElementSibling.textContent));

  const packed = atob(document.getElementById("plotly").textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);

  // plotly knows no properties of the page, and no pairs of colours: the browser picks the one that holds
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

  function draw() {
    boxes.forEach((box, i) => {
      const { data, layout } = resolved(figures[i]);
      layout.width = box.clientWidth;
      Plotly.react(box, data, layout, { displayModeBar: false, doubleClick: false });
    });
  }

  draw();
  let width = innerWidth;
  addEventListener("resize", () => {
    // a phone's address bar changes the height alone
    if (innerWidth !== width && !root.classList.contains("paper")) draw();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.classList.add("paper"); draw(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); draw(); });
})();
