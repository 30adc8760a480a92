// Filter, sort, state in the address, keys, copying. The page is whole without any of it.
(() => {
  "use strict";
  const one = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  document.documentElement.classList.add("js");

  const form = one("#filter");
  const table = one("table.index");
  const rows = table ? all("tbody tr", table) : [];
  const boxes = form ? all("input[name=status]", form) : [];
  const words = form ? one("input[name=q]", form) : null;
  const text = new Map(rows.map((row) => [row, `${row.textContent} ${row.dataset.words}`.toLowerCase()]));
  const blocks = all(".case, .line");
  const blockText = new Map(blocks.map((block) => [block, sayings(block)]));
  const cells = all(".matrix td a");
  const cellText = new Map(cells.map((cell) => [cell, describe(cell)]));
  let sorting = "";

  // What a case is about: its head and what was found.
  function sayings(block) {
    const found = all(".findings > li", block).map((item) => item.textContent).join(" ");
    return `${(one("summary", block) ?? block).textContent} ${found}`.toLowerCase();
  }

  // What a cell of the matrix is about: its block, precision and plan, and its case.
  function describe(cell) {
    const block = one(".block", cell.closest("tbody"));
    const own = `${block.textContent} ${cell.closest("tr").firstElementChild.textContent} ${cell.title}`;
    const target = document.getElementById(cell.hash.slice(1))?.closest(".case, .line");
    return `${own} ${blockText.get(target) ?? ""}`.toLowerCase();
  }

  // The address is #place?status=fault&q=words&sort=margin:d: a fragment alone, which files may change.
  function read() {
    const [place, query = ""] = location.hash.slice(1).split("?");
    return { place, state: new URLSearchParams(query) };
  }

  function write(place = read().place) {
    const state = new URLSearchParams();
    const on = boxes.filter((box) => box.checked).map((box) => box.value);
    if (on.length < boxes.length) state.set("status", on.join(","));
    if (words && words.value) state.set("q", words.value);
    if (sorting) state.set("sort", sorting);
    const query = state.toString();
    const hash = `#${place}${query ? `?${query}` : ""}`;
    history.replaceState(null, "", hash === "#" ? location.pathname + location.search : hash);
  }

  function show() {
    const on = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const match = (content) => wanted.every((word) => content.includes(word));
    let shown = 0, cases = 0, total = 0;
    for (const row of rows) {
      row.hidden = !(on.has(row.dataset.status) && match(text.get(row)));
      total += Number(row.dataset.cases);
      if (!row.hidden) { shown += 1; cases += Number(row.dataset.cases); }
    }
    for (const cell of cells) {
      cell.classList.toggle("dim", !(on.has(cell.dataset.status) && match(cellText.get(cell))));
    }
    for (const block of blocks) {
      const known = blockText.get(block);
      block.hidden = !(on.has(block.dataset.status) && match(known));
    }
    for (const group of all(".group")) group.hidden = !one(".case:not([hidden]), .line:not([hidden])", group);
    one(".nothing").hidden = shown > 0;
    for (const link of all(".strip a")) {
      const only = on.size === 1 && boxes.length > 1 && on.has(link.dataset.status);
      link.setAttribute("aria-current", String(only));
    }
    one("output", form).textContent = `${shown} of ${rows.length} rows, ${cases} of ${total} cases`;
  }

  function sort(key, direction) {
    const heads = all("thead th", table);
    const column = heads.findIndex((head) => head.dataset.sort === key);
    if (column < 0) return;
    sorting = `${key}:${direction}`;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", direction === "d" ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const numeric = rows.every((row) => row.cells[column].dataset.value !== undefined);
    const order = (a, b) => (numeric ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b)));
    const sorted = [...rows].sort((a, b) => (direction === "d" ? order(b, a) : order(a, b)));
    one("tbody", table).append(...sorted);
  }

  function sortable(key) {
    return all("thead th[data-sort]", table).some((head) => head.dataset.sort === key);
  }

  function unsort() {
    sorting = "";
    all("thead th", table).forEach((head) => head.removeAttribute("aria-sort"));
    one("tbody", table).append(...rows);
  }

  function apply() {
    const { place, state } = read();
    if (form) {
      const named = (state.get("status") ?? "").split(",");
      const known = boxes.filter((box) => named.includes(box.value));
      for (const box of boxes) box.checked = !known.length || known.includes(box);
      words.value = state.get("q") ?? "";
      const [key, direction] = (state.get("sort") ?? "").split(":");
      if (sortable(key)) sort(key, direction === "a" ? "a" : "d");
      else unsort();
      show();
    }
    reveal(place || (form && [...state].length ? "index" : ""));
  }

  function reveal(place) {
    const target = place && document.getElementById(place);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) {
      at.hidden = false;
      if (at.localName === "details") at.open = true;
    }
    target.scrollIntoView();
  }

  // The cases in the order of the page; n and p go from the one in hand, or on the screen, to the next.
  function go(by) {
    const heads = all(".case > summary").filter((head) => head.offsetParent);
    if (!heads.length) return;
    const held = heads.findIndex((head) => head.parentElement.contains(document.activeElement));
    const passed = heads.filter((head) => head.getBoundingClientRect().top < 60).length - 1;
    const next = heads[Math.min(Math.max((held < 0 ? passed : held) + by, 0), heads.length - 1)];
    next.parentElement.open = true;
    next.focus();
    next.scrollIntoView();
    write(one(".body", next.parentElement).id);
  }

  if (form) {
    for (const head of all("thead th[data-sort]", table)) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("number") ? "d" : "a";
        const other = first === "d" ? "a" : "d";
        sort(head.dataset.sort, sorting === `${head.dataset.sort}:${first}` ? other : first);
        write();
      });
    }
    form.addEventListener("input", () => { show(); write(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => { show(); write(); }));
    for (const link of all(".strip a")) {
      link.addEventListener("click", () => {
        const only = link.getAttribute("aria-current") === "true";
        for (const box of boxes) box.checked = only || box.value === link.dataset.status;
        show();
      });
    }
  }

  for (const block of all(".copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = one("code", block);
      getSelection().selectAllChildren(code);
      try { await navigator.clipboard.writeText(code.textContent); } catch { document.execCommand("copy"); }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }

  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && event.target === words) { form.reset(); words.blur(); }
    if (typing) return;
    if (event.key === "/" && words) { event.preventDefault(); words.focus(); }
    if (event.key === "n") go(1);
    if (event.key === "p") go(-1);
  });

  // A plain link to a place keeps the view: the state moves over to the new address.
  addEventListener("hashchange", () => {
    const { place, state } = read();
    if ([...state].length) { apply(); return; }
    reveal(place);
    if (form) write();
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of closed) details.open = false; });
  apply();
})();
