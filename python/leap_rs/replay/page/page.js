"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const views = [];
  const picked = new Set();
  let shown = page.start;

  // A table's columns as rows, policies by name.
  const rows = (table) => {
    const names = Object.keys(table);
    return table[names[0]].map((_, i) => {
      const row = {};
      for (const name of names) row[name] = name === "policy" ? page.policies[table[name][i]] : table[name][i];
      return row;
    });
  };
  const at = (list) => list[list.length > 1 ? shown : 0];
  const names = () => [...picked].map((i) => page.policies[i]);

  const draw = async (figure) => {
    const target = document.getElementById("f-" + figure.name);
    const spec = { ...figure.spec, datasets: { rows: rows(at(figure.tables)) } };
    const options = { mode: "vega-lite", actions: false, renderer: "svg", tooltip: { theme: "light" } };
    try {
      const { view } = await vegaEmbed(target, spec, options);
      views.push({ figure, view });
    } catch (error) {
      target.innerHTML = '<p class="failed">This chart could not be drawn.</p>';
      console.error(figure.name, error);
    }
  };

  const show = (point) => {
    shown = point;
    for (const table of document.querySelectorAll(".numbers")) {
      table.hidden = Number(table.dataset.point) !== page.points[point];
    }
    for (const { figure, view } of views) {
      document.getElementById("c-" + figure.name).textContent = at(figure.captions);
      if (figure.tables.length > 1) view.data("rows", rows(at(figure.tables))).runAsync();
    }
  };

  const highlight = () => {
    document.querySelector(".legend").classList.toggle("picking", picked.size > 0);
    document.getElementById("all").hidden = picked.size === 0;
    for (const chip of document.querySelectorAll(".chip")) {
      chip.setAttribute("aria-pressed", picked.has(Number(chip.dataset.policy)));
    }
    for (const row of document.querySelectorAll(".numbers tr[data-policy]")) {
      row.classList.toggle("dim", picked.size > 0 && !picked.has(Number(row.dataset.policy)));
    }
    for (const { view } of views) view.signal("picked", names()).runAsync();
  };

  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const policy = Number(chip.dataset.policy);
      if (!picked.delete(policy)) picked.add(policy);
      highlight();
    });
  }
  document.getElementById("all").addEventListener("click", () => {
    picked.clear();
    highlight();
  });
  document.getElementById("point")?.addEventListener("change", (event) => show(Number(event.target.value)));

  document.getElementById("copy").addEventListener("click", async (event) => {
    const code = document.getElementById("command");
    const button = event.target;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      // Without permission the text is selected instead, so that one key copies it.
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 2000);
  });

  Promise.all(page.figures.map(draw)).then(() => {
    // A browser may bring back a form's last value; the page shows what its selector says.
    const point = document.getElementById("point");
    if (point && Number(point.value) !== shown) show(Number(point.value));
    document.documentElement.dataset.charts = views.length;
  });
})();
