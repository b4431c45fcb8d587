// The block table of a running request. It goes between explain.js and page.js into the same script.

const TABLES_MS = 1000;
const MAX_TABLE_ROWS = 200; // of each choice

/** Shows the running requests and the table of the chosen one, while somebody looks. */
async function showTables() {
  if (!stream || !at("tables").open) return;
  try {
    const listed = await (await request("cache/tables")).json();
    const chosen = at("table-request").value;
    showRunning(listed, chosen);
    at("table-note").textContent = "";
    if (!chosen) return at("table").replaceChildren();
    const { requests, page_size: pageSize } = await (await request(`cache/tables?request=${encodeURIComponent(chosen)}`)).json();
    at("table").replaceChildren(...requests.flatMap(({ choices }) => choices.flatMap((choice) => tableOf(choice, pageSize))));
  } catch (error) {
    at("table-note").textContent = error.message; // also that the request has ended: its last table stays
  }
}

/** Fills the list of running requests. It stays as it is while somebody chooses, and keeps one that has ended. */
function showRunning({ requests, more }, chosen) {
  const select = at("table-request");
  if (select.matches(":focus") && select.options.length > 1) return;
  const options = requests.map(({ id, request_id: name, replica, choices }) => {
    const sum = (field) => choices.reduce((total, choice) => total + choice[field], 0);
    const where = replica === undefined ? "" : `replica ${replica}, `;
    const text = `${name || id}: ${where}${choices[0].phase}, ${pagesOf(sum("pages"))}, ${number.format(sum("shared"))} shared, ${number.format(sum("own"))} own`;
    return make("option", { value: id, selected: id === chosen }, text);
  });
  if (chosen && !requests.some(({ id }) => id === chosen)) options.unshift(make("option", { value: chosen, selected: true }, `${chosen}: has ended`));
  const all = requests.length + more;
  select.replaceChildren(make("option", { value: "" }, `choose one of ${number.format(all)}`), ...options);
}

/** Returns a sentence about a choice's table and the table: logical pages and the physical ones that have them. */
function tableOf(choice, pageSize) {
  const columns = [
    ["Logical page", (page) => number.format(page.logical)],
    ["Physical page", (page) => (page.physical === null ? "–" : String(page.physical))],
    ["Filled", (page) => `${page.filled} of ${pageSize}`],
    ["References", (page) => number.format(page.references)],
    ["Tier", (page) => page.tier ?? "–"],
    ["Page", (page) => (page.kind === "tree" ? (page.references > 1 ? "shared" : "in the tree") : page.kind)],
  ];
  for (const [name, field] of [["Host slot", "slot"], ["Window page", "window_page"], ["State slot", "state_slot"]]) {
    if (choice.table.some((page) => field in page)) columns.push([name, (page) => String(page[field] ?? "–")]);
  }
  const rows = choice.table.slice(0, MAX_TABLE_ROWS), hidden = choice.pages - rows.length;
  const parts = [`Choice ${choice.index}, ${choice.phase}: ${number.format(choice.tokens)} tokens`];
  if (choice.pages) parts.push(`${pagesOf(choice.pages)}, ${number.format(choice.in_tree)} in the tree, ${number.format(choice.shared)} of these shared with other block tables, ${number.format(choice.own)} own`);
  if (choice.waits_for) parts.push(`it waits for ${choice.waits_for}`);
  if (choice.freed) parts.push(`${number.format(choice.freed)} freed`);
  if (choice.skipped) parts.push(`${number.format(choice.skipped)} of those in the tree not read`);
  if (hidden > 0 && rows.length) parts.push(`${pagesOf(hidden)} not shown`);
  const sentence = make("p", { className: "hint" }, `${parts.join("; ")}.`);
  if (!rows.length) return [sentence];
  const head = make("tr", {}, ...columns.map(([name]) => make("th", {}, name)));
  const body = rows.map((page) => make("tr", { className: page.references > 1 ? "shared" : page.kind }, ...columns.map(([, of]) => make("td", {}, of(page)))));
  return [sentence, make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)))];
}
